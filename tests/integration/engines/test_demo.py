"""The demo as its users run it, with every token sampled; and what it says when something is wrong."""

import asyncio
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from steno.contracts.errors import CannotListen
from steno_cli.demo import record
from steno_cli.demo.processes import DemoFailed
from steno_cli.demo.record import demo
from tests.support.programs.ports import free_port
from tests.support.programs.stack import ROOT


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until_it_listens(port: int, timeout_s: float = 180) -> None:
    until = time.monotonic() + timeout_s
    while not listens(port):
        assert time.monotonic() < until, "the demo's proxy did not come up"
        time.sleep(0.05)


def test_the_demo_records_its_agents_serves_the_lines_it_prints_and_ends_cleanly() -> None:
    port = free_port()
    # Whoever started the tests in the background left SIGINT ignored, and Ctrl-C is what this is about.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "steno", "demo", "--keep", "--trials", "2"]
    command += ["--port", str(port)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line)
            if "Serving until Ctrl-C" in line:
                break
        printed = "".join(lines)
        try:
            assert "2 of 2 agents solved their task" in printed
            assert "reward 1.0" in printed
            curls = [line.strip() for line in lines if line.strip().startswith("curl ")]
            assert len(curls) == 4
            for curl in curls:
                answer = subprocess.run([*shlex.split(curl), "-f"], capture_output=True, check=True, timeout=30)
                assert json.loads(answer.stdout)
            assert {"<|im_start|>", "<|im_end|>"} < set(special_texts(port))
        finally:
            child.send_signal(signal.SIGINT)
            try:
                code = child.wait(timeout=180)
            except subprocess.TimeoutExpired:
                child.terminate()
                raise
            last = child.stdout.read().splitlines()[-1]
        assert code == 0 and last.startswith("stopped: ")
    assert not listens(port)


def special_texts(port: int) -> list[str]:
    """What the embedded engine has said of its special tokens, once it was asked."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        until = time.monotonic() + 180
        while not (keys := client.get("/workers/tokenizers").json()["items"]):
            assert time.monotonic() < until, "no texts of tokens are kept"
            time.sleep(0.1)
        kept = client.get(f"/workers/tokenizers/{keys[0]}").json()
    return [kept["texts"][one] for one in kept["special"]]


async def run(port: int) -> tuple[bool, str]:
    output = io.StringIO()
    solved = await demo(Console(file=output, width=120), trials=1, port=port)
    return solved, output.getvalue()


async def test_an_agent_that_fails_is_shown_and_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "AGENT_S", 0.01)
    solved, printed = await run(port := free_port())
    assert not solved
    assert "no answer in 0 s" in printed
    assert not listens(port)


async def test_a_worker_that_does_not_come_up_is_shown_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "TINY", tmp_path)
    with pytest.raises(DemoFailed, match=r"the worker ended with code \d+:\n.*has no config.json") as failed:
        await run(port := free_port())
    assert "Traceback" not in str(failed.value)
    assert not listens(port)


async def test_a_port_that_is_taken_is_nothing_to_run_on() -> None:
    """Or its agents would be recorded by whoever listens there."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(CannotListen, match="the address is in use already"):
            await run(other.getsockname()[1])


async def test_cancelling_it_ends_its_processes() -> None:
    port = free_port()
    task = asyncio.create_task(run(port))
    await asyncio.to_thread(wait_until_it_listens, port)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not listens(port)
