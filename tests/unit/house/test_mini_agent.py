"""The server that forks an agent for each run: what a run that goes wrong leaves, with a stand-in for mini-swe-agent."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs.mini_agent import mini_server, run_mini

APP = """import sys, time
def app():
    print("asked", sys.argv[1], flush=True)
    if sys.argv[1] == "break":
        raise KeyError("the agent's own mistake")
    if sys.argv[1] == "hang":
        time.sleep(600)
    sys.exit(7)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    package = tmp_path / "packages" / "minisweagent"
    for name, text in {"models/litellm_model.py": "LitellmModel = None", "run/mini.py": APP}.items():
        (package / name).parent.mkdir(parents=True)
        (package / name).write_text(text)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/packages exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    with mini_server(python) as address:
        yield address


def test_an_exception_of_the_agent_is_in_its_log(server: Path, tmp_path: Path) -> None:
    log = tmp_path / "mini.log"
    assert run_mini(server, ["end"], tmp_path, {}, log) == 7
    assert log.read_text() == "asked end\n"
    assert run_mini(server, ["break"], tmp_path, {}, log) == 1
    assert "Traceback" in log.read_text() and 'KeyError: "the agent\'s own mistake"' in log.read_text()


def test_an_agent_that_hangs_is_killed_in_time(server: Path, tmp_path: Path) -> None:
    assert run_mini(server, ["end"], tmp_path, {}, tmp_path / "first.log") == 7
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"took longer than 8 s: asked hang"):
        run_mini(server, ["hang"], tmp_path, {}, tmp_path / "mini.log", within_s=8)
    assert time.monotonic() - started < 60
