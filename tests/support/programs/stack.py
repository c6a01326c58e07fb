"""The whole product as its users run it: proxy and worker as processes of their own, over loopback.

`running(...)` starts `python -m steno proxy` and `python -m steno worker`, waits until the model is announced, yields a `Stack`,
and ends both by pid. Their output goes to files under `folder`, shown when something does not start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.programs import forked
from tests.support.programs.forked import Started
from tests.support.programs.ports import free_port
from tests.support.sources import ROOT
from tests.support.wire_recorder import VARIABLE, WireRecorder

_HTTP = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=60)
"""One for all that is polled; a connection of its own for each request, since servers are killed and told to stop."""


@dataclass
class Stack:
    """A running proxy and its workers."""

    folder: Path
    port: int
    proxy: Started
    workers: list[Started] = field(default_factory=list)
    front: int | None = None  # port of the recorder that stands before the proxy, if one does

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.front or self.port}"

    def base_url(self, trial_id: str) -> str:
        """What an OpenAI client is pointed at."""
        return f"{self.url}/{trial_id}/v1"

    def get(self, path: str) -> Any:
        answer = _HTTP.get(self.url + path, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def turns(self, trial_id: str) -> list[dict[str, Any]]:
        """All turns of a session in commit order, as the REST API gives them."""
        turns: list[dict[str, Any]] = []
        while True:
            page = self.get(f"/sessions/{trial_id}/turns?start={len(turns)}&limit=100")
            items = page["items"] if isinstance(page, dict) else page
            turns += items
            if len(items) < 100:
                return turns

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.log")))

    def restart_proxy(self, *args: str) -> None:
        """Start a proxy on the same port, after the caller has ended the one before; wait until it answers."""
        command = ["proxy", "--host", "127.0.0.1", "--port", str(self.port), *args]
        self.proxy = _spawn(self.folder / "proxy.log", sys.executable, *command)
        self.wait_for_proxy()

    def wait_for_proxy(self) -> None:
        until = time.monotonic() + 240
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if _HTTP.get(f"http://127.0.0.1:{self.port}/healthz", timeout=2).status_code == 200:
                    return
            if self.proxy.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"the proxy did not start\n{self.logs()}")
            time.sleep(0.1)

    def start_worker(
        self, *args: str, name: str = "worker", python: str = sys.executable, port: int | None = None
    ) -> Started:
        """port: of what stands between it and the proxy, if anything does."""
        url = f"ws://127.0.0.1:{port or self.port}"
        child = _spawn(self.folder / f"{name}.log", python, "worker", "--proxy", url, *args)
        self.workers.append(child)
        return child

    def wait_for_model(self, timeout_s: float = 180) -> str:
        """Until some worker has announced a model; returns its name."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for child in [self.proxy, *self.workers]:
                if child.poll() is not None:
                    raise AssertionError(f"{child.args} ended with {child.returncode}\n{self.logs()}")
            with contextlib.suppress(httpx.HTTPError):
                models = _HTTP.get(self.base_url("probe") + "/models", timeout=5).json().get("data", [])
                if models:
                    return str(models[0]["id"])
            time.sleep(0.1)
        raise AssertionError(f"no model was announced within {timeout_s} s\n{self.logs()}")

    def close(self) -> None:
        for child in [*self.workers, self.proxy]:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        for child in [*self.workers, self.proxy]:
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _spawn(log: Path, python: str, *args: str) -> Started:
    with log.open("ab") as out:
        return forked.start([python, "-m", "steno", *args], {**os.environ, "PYTHONUNBUFFERED": "1"}, ROOT, out)


@contextlib.contextmanager
def running(
    folder: Path, worker: Sequence[str] | None, *, proxy: Sequence[str] = (), python: str = sys.executable
) -> Iterator[Stack]:
    """A proxy, and a worker with these arguments (None: no worker yet)."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    child = _spawn(folder / "proxy.log", sys.executable, "proxy", "--host", "127.0.0.1", "--port", str(port), *proxy)
    stack = Stack(folder, port, child)
    try:
        stack.wait_for_proxy()
        if worker is not None:
            stack.start_worker(*worker, python=python)
            stack.wait_for_model()
        if wanted := os.environ.get(VARIABLE):
            with WireRecorder(port) as recorder:
                stack.front = recorder.port
                try:
                    yield stack
                finally:
                    recorder.write(Path(wanted), stack.turns)  # of a test that fails, too: what changed may say why
        else:
            yield stack
    finally:
        stack.close()
