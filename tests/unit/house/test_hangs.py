"""A test that hangs fails, also in uvloop and at the end of a fixture, and the next one runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INI = """
[pytest]
asyncio_mode = auto
timeout = 4
"""
CONFTEST = """
import asyncio
import pytest
import uvloop
from tests.conftest import pytest_timeout_cancel_timer, pytest_timeout_set_timer


def pytest_asyncio_loop_factories():
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def that_hangs_at_its_end():
    yield
    await asyncio.create_task(asyncio.sleep(3600))
"""
TESTS = """
import asyncio
import threading


async def test_waits_in_a_loop():
    await asyncio.sleep(3600)


async def test_ends_late(that_hangs_at_its_end):
    pass


def test_waits_for_a_lock():
    threading.Event().wait(3600)


async def test_is_well():
    assert "uvloop" in type(asyncio.get_running_loop()).__module__
"""


def test_what_hangs_is_ended_and_the_next_test_runs(tmp_path: Path) -> None:
    for name, text in (("pytest.ini", INI), ("conftest.py", CONFTEST), ("test_hanging.py", TESTS)):
        (tmp_path / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = {line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR"))}
    assert told == {
        "FAILED test_hanging.py::test_waits_in_a_loop",
        "PASSED test_hanging.py::test_ends_late",
        "ERROR test_hanging.py::test_ends_late",
        "FAILED test_hanging.py::test_waits_for_a_lock",
        "PASSED test_hanging.py::test_is_well",
    }, done.stdout + done.stderr
    assert "in test_waits_for_a_lock" in done.stdout, "the stack is shown"
