"""Processes that stand still at random moments: `tests/support/stalls`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.sources import ROOT

SAID = """
import os, threading
named = lambda: "stalls" in [thread.name for thread in threading.enumerate()]
print(named(), flush=True)
if os.fork() == 0:
    print(named(), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(("asked", "stalls"), [({"STALLS": "0.01,0.02"}, True), ({}, False)])
def test_a_process_and_its_forks_have_the_thread_that_stops_them_if_asked(asked: dict[str, str], stalls: bool) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "STALLS"}  # this test may run under it
    environment = {**inherited, "PYTHONPATH": str(ROOT / "tests/support/stalls"), **asked}
    done = subprocess.run([sys.executable, "-c", SAID], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(stalls)] * 2, done.stderr
