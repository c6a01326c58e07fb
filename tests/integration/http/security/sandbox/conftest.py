"""A sandbox with one trial's key against a proxy as it runs (I8): real processes, real sockets, everything it can think of.

After each attempt: others are served, another trial's record is what it was, no key is in any log, each record of the log is
one line of ours, and the proxy is no larger than it may be.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.programs.stack import ROOT, Stack, running

ADMIN, WORKER = "ak-test-Zq81", "wk-test-Zq82"
SCRIPT = """
def say(request):
    slow = "SLOW" in str(request["messages"])
    if request.get("tools"):
        arguments = {"path": "a"}
        call = {"id": "own", "type": "function", "function": {"name": "read", "arguments": arguments}}
        return {"content": "", "tool_calls": [call]}
    return {"content": "one two three " * (400 if slow else 1)}
"""
CHAT = "/v1/chat/completions"
HTTP = httpx.Client(timeout=60)
"""Shared: a client of its own for each request would read the system's certificates each time."""
MOST_MB = 220
"""Of memory: what the proxy takes at rest, and what the largest bodies of these tests may add."""


class Target:
    """The proxy, and what the sandbox knows of it: its own trial `mine` and that trial's key."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.port, self.url = stack, stack.port, stack.url
        self.key = self.register("mine")
        self.victims_key = self.register("victim")
        assert self.ask("victim", self.victims_key, "a secret").status_code == 200
        self.victim = self.admin("/sessions/victim").json(), self.admin("/sessions/victim/turns").json()

    def admin(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        return HTTP.request(
            method, self.url + path, headers={"authorization": f"Bearer {ADMIN}"}, timeout=60, **options
        )

    def register(self, trial_id: str) -> str:
        return str(self.admin(f"/sessions/{trial_id}", "POST").raise_for_status().json()["api_key"])

    def ask(self, trial_id: str, key: str, text: str = "x", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}]} | fields
        headers = {"authorization": f"Bearer {key}"}
        return HTTP.post(f"{self.url}/{trial_id}{CHAT}", json=body, headers=headers, timeout=60)

    def connect(self, timeout_s: float = 60) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)

    def raw(self, data: bytes, *, answers: int = 1, half: bool = False, silence_s: float = 1.0) -> bytes:
        """What comes back for these bytes, until the proxy closes or is silent for a while after so many answers.
        half: we then say no more. Raises: TimeoutError: it neither answers so often nor closes."""
        with self.connect() as client:
            found = b""
            try:
                client.sendall(data)
                if half:
                    client.shutdown(socket.SHUT_WR)
                while piece := client.recv(65536):
                    found += piece
                    if len(statuses(found)) >= answers:
                        client.settimeout(silence_s)
            except ConnectionError:
                pass  # closed, while we still sent
            except TimeoutError:
                if len(statuses(found)) < answers:
                    raise
            return found

    def head(self, path: str, method: str = "POST", trial_key: str | None = None) -> bytes:
        return f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {trial_key or self.key}\r\n".encode()

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.stack.folder.glob("*.log")))

    def check(self) -> None:
        """What is true after everything."""
        assert self.stack.proxy.poll() is None
        served = self.ask("mine", self.key, "still there?")
        assert served.status_code == 200, served.text
        assert self.victim == (self.admin("/sessions/victim").json(), self.admin("/sessions/victim/turns").json())
        assert [worker["id"] for worker in self.admin("/workers").json()["items"]] == ["w"]
        log = self.log()
        for key in (ADMIN, WORKER, self.key, self.victims_key):
            assert key not in log and key[-20:] not in log
        ours = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) [a-z]")
        for line in (self.stack.folder / "proxy.log").read_text(errors="replace").split("\n"):
            assert not line or ours.match(line), line
            assert line.isprintable(), ascii(line)
        assert "unhandled exception" not in log and "Traceback" not in log
        status = Path(f"/proc/{self.stack.proxy.pid}/status").read_text()
        peak = next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        assert peak < MOST_MB, peak


@pytest.fixture(scope="package")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("hostile")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    flags = ["--admin-key", ADMIN, "--worker-key", WORKER, "--log-level", "debug", "--body-timeout-s", "5"]
    flags += ["--max-body-bytes", str(4 * 2**20)]
    with running(folder / "run", None, proxy=flags) as stack:
        stack.start_worker(
            *("--engine", "scripted", "--script", f"{script}:say", "--model", str(ROOT / "steno/models/tiny")),
            *("--key", WORKER, "--worker-id", "w"),
        )
        until = time.monotonic() + 120
        admin = {"authorization": f"Bearer {ADMIN}"}
        while not HTTP.get(stack.url + "/workers", headers=admin, timeout=30).json()["items"]:
            assert time.monotonic() < until, stack.logs()
            time.sleep(0.1)
        yield Target(stack)


@pytest.fixture(autouse=True)
def unharmed(proxy: Target) -> Iterator[None]:
    yield
    proxy.check()


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


NAMES = [
    "victim",
    "%76ictim",
    "mine/../victim",
    "mine/%2e%2e/victim",
    "mine%2f..%2fvictim",
    "/victim",
    "//victim",
    "./victim",
    "victim%00",
    "victim%20",
    "%20victim",
    "VICTIM",
    "mine;victim",
    "mine\\..\\victim",
    "victim%0d%0aHost:x",
    "%2576ictim",
    "mine%00victim",
    "%ef%bd%96%ef%bd%89%ef%bd%83%ef%bd%94%ef%bd%89%ef%bd%8d",
    "mine/v1/../../victim",
    "%c0%ae%c0%ae/victim",
    "mine,victim",
    "%ff",
    "victim%e2%80%8b",
    "http://127.0.0.1/victim",
    "mine%3fx%3d/victim",
    "..;/victim",
    "mine%23/victim",
    "%u0076ictim",
]
"""Ways to say `victim` in a path."""
