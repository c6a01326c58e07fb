"""What only whole processes show: how a proxy takes leave."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.stack import ROOT, running

SCRIPT = 'def say(request):\n    return {"content": "one two three"}\n'


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return ["--engine", "scripted", "--script", f"{script}:say", "--model", str(ROOT / "steno/models/tiny")]


def test_a_proxy_told_to_stop_says_goodbye_to_its_workers(worker: list[str], tmp_path: Path) -> None:
    with running(tmp_path / "run", worker) as stack:
        stack.proxy.terminate()
        assert stack.proxy.wait(20) == 0
        until = time.monotonic() + 10
        while "the proxy stops" not in (log := (tmp_path / "run" / "worker.log").read_text()):
            assert time.monotonic() < until, log
            time.sleep(0.05)
        assert "1012" not in log  # what uvicorn closes sockets with that nobody took leave of
