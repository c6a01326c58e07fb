"""What only whole processes show: how a proxy takes leave, and what it does with what is no request."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.support.programs.stack import ROOT, running

SCRIPT = """
import asyncio
from pathlib import Path

asked = []


async def say(request):
    asked.append(request["trial_id"])
    while asked.count("t") > 1 and not Path(GO).exists():
        await asyncio.sleep(0.02)
    return {"content": "one two three"}
"""


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(f"GO = {str(tmp_path / 'go')!r}\n{SCRIPT}")
    return ["--engine", "scripted", "--script", f"{script}:say", "--model", str(ROOT / "steno/models/tiny")]


def test_a_proxy_told_to_stop_says_goodbye_to_its_workers(worker: list[str], tmp_path: Path) -> None:
    with running(tmp_path / "run", worker) as stack:
        stack.proxy.terminate()
        assert stack.proxy.wait(60) == 0
        until = time.monotonic() + 60
        while "the proxy stops" not in (log := (tmp_path / "run" / "worker.log").read_text()):
            assert time.monotonic() < until, log
            time.sleep(0.05)
        assert not re.search(r"\b1012\b", log)  # what uvicorn closes sockets with that nobody took leave of


def test_nobody_asks_again_at_a_proxy_that_stops_while_its_streams_end(worker: list[str], tmp_path: Path) -> None:
    """Clients keep connections open. At one that stays, a client would be refused until its retries are spent."""
    with running(tmp_path / "run", worker, proxy=["--shutdown-s", "120"]) as stack:
        stack.wait_for_model()
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 2}  # the second waits for `go`
        with (
            socket.create_connection(("127.0.0.1", stack.port), timeout=60) as kept,
            httpx.stream("POST", stack.url + "/t/v1/chat/completions", json=body, timeout=60) as response,
        ):
            assert response.status_code == 200
            kept.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = b""
            while b"}" not in answer:
                answer += kept.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            stack.proxy.terminate()
            assert kept.recv(65536) == b"", "it is closed"
            assert stack.proxy.poll() is None, "it is still there for its stream"
            (tmp_path / "go").touch()
            assert b"".join(response.iter_bytes()).rstrip().endswith(b"[DONE]")
        assert stack.proxy.wait(60) == 0


HEAD = b"POST /t/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
ENDLESS = {
    "address": b"GET /",
    "header": HEAD + b"x-a: ",
    "headers": HEAD,
    "trailers": HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-a: ",
}


def test_a_head_without_end_is_not_kept(tmp_path: Path) -> None:
    with running(tmp_path / "run", None) as stack:
        for name, begin in ENDLESS.items():
            with socket.create_connection(("127.0.0.1", stack.port), timeout=60) as client:
                client.sendall(begin)
                piece = b"x-a: 1\r\n" * 8192 if name == "headers" else b"a" * 65536
                with pytest.raises(ConnectionError):
                    for _ in range(1000):  # 64 MB
                        client.sendall(piece)
        assert httpx.get(stack.url + "/healthz", timeout=60).status_code == 200
        assert peak_mb(stack.proxy.pid) < 120


def test_large_heads_within_bounds_and_long_bodies_are_served(tmp_path: Path) -> None:
    with running(tmp_path / "run", None) as stack:
        body = b'{"messages": "' + b"a" * 2**20 + b'"}'
        response = httpx.post(
            stack.url + "/t/v1/chat/completions", content=body, headers={"x-a": "a" * 30_000}, timeout=60
        )
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
        chunks = (b" " * 1000 for _ in range(1000))
        assert httpx.post(stack.url + "/t/v1/chat/completions", content=chunks, timeout=60).status_code == 400


def peak_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) // 1024
