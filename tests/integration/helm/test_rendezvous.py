"""The nodes of a trainer meet by the variables that the chart gives them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.helm.support import environment, pods, render
from tests.support.programs.ports import free_port
from tests.support.programs.stack import ROOT

pytestmark = pytest.mark.helm


@pytest.fixture(scope="module")
def given() -> dict[str, str]:
    pod = environment(pods(render("training"))["run-steno-trainer"])
    return {"PATH": os.environ["PATH"]} | {name: pod[name] for name in pod if not name.startswith("STENO_")}


@contextlib.contextmanager
def node(given: dict[str, str], port: int, address: str, *, is_host: bool) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.integration.helm.rendezvous_node", str(port), address, str(int(is_host))]
    child = subprocess.Popen(command, cwd=ROOT, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def meet(*nodes: subprocess.Popen[str]) -> list[list[str]]:
    """What each said: its number, and the first rank's port."""
    for one in nodes:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    return [one.stdout.readline().split() for one in nodes if one.stdout is not None]


@pytest.mark.timeout(300)
def test_a_node_that_is_new_meets_one_that_stayed(given: dict[str, str]) -> None:
    """torch publishes the first rank's address in its node's first round only. The new node waited `read_timeout` for it."""
    port = free_port()
    with node(given, port, "127.0.0.1", is_host=True) as first:
        with node(given, port, "127.0.0.2", is_host=False) as second:
            before = meet(first, second)
            second.kill()  # it is missed after three heartbeats, 15 s
        with node(given, port, "127.0.0.2", is_host=False) as new:
            after = meet(first, new)
    for (one, its_port), (other, others_port) in (before, after):
        assert (one, other) == ("0", "1") and its_port == others_port
