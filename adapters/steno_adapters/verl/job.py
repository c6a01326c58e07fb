"""What the processes of one verl job share: the run's name, the lineage of its versions, and where the proxy is.

An actor of Ray's with a name has it. In the embedded mode the actor also runs the proxy, with keys of its own making, and the
proxy ends with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import ray

ACTOR = "steno"
START_S = 300.0
_WITH_ITS_PARENT = (
    'exec 3<&0; "$@" 3<&- </dev/null & program=$!; { read -r _ <&3; kill "$program"; } 2>/dev/null & reader=$!; '
    'exec 3<&-; wait "$program"; code=$?; kill "$reader" 2>/dev/null; exit "$code"'
)
"""Shell script: runs a program, and ends it (SIGTERM) when this process is gone, however it ended: the script's stdin closes."""


@dataclass(frozen=True)
class JobFacts:
    """run: what the groups are registered under. lineage: of this start's versions."""

    run: str
    lineage: str
    proxy: str
    key: str | None
    worker_key: str | None


class JobActor:
    """The actor. Args: run: None: `name` and the lineage. proxy: "": one is started here."""

    def __init__(self, name: str, run: str | None, proxy: str, key: str | None, worker_key: str | None) -> None:
        lineage = f"verl-{uuid.uuid4().hex[:8]}"
        self._proxy: EmbeddedProxy | None = None
        if not proxy:
            self._proxy = EmbeddedProxy(ray.util.get_node_ip_address())
            proxy, key, worker_key = self._proxy.url, self._proxy.key, self._proxy.worker_key
        self._facts = JobFacts(run or f"{name[:100]}-{lineage}", lineage, proxy, key, worker_key)

    def facts(self) -> JobFacts:
        """Raises: RuntimeError: the embedded proxy has ended."""
        if self._proxy is not None:
            self._proxy.check()
        return self._facts


def job(name: str, run: str | None, proxy: str, key: str | None, worker_key: str | None) -> Any:
    """The handle of this job's actor. The first process that asks makes the actor, and the actor ends with that process."""
    return (
        ray.remote(JobActor)
        .options(name=ACTOR, get_if_exists=True, num_cpus=0, max_concurrency=8)
        .remote(name, run, proxy, key, worker_key)
    )


def facts_of(handle: Any) -> JobFacts:
    """Blocking. Raises: RayError: the proxy did not start, or has ended."""
    facts: JobFacts = ray.get(handle.facts.remote())
    return facts


class EmbeddedProxy:
    """A proxy as a process, at a free port of `host`. Its other settings are those of the environment (`STENO_…`).

    Raises: RuntimeError: it did not start; with its last words.
    """

    def __init__(self, host: str) -> None:
        self.key, self.worker_key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._log = Path(mkdtemp(prefix="steno-proxy-")) / "proxy.log"
        # Bound until the proxy listens there: no other program that asks for any free port is given it.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind((host, 0))
            self._start(host, reserved.getsockname()[1])

    def check(self) -> None:
        """Raises: RuntimeError: it has ended."""
        if (code := self._process.poll()) is not None:
            raise RuntimeError(f"the proxy ended with exit code {code}: {self._said()}")

    def _start(self, host: str, port: int) -> None:
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        given = {"STENO_ADMIN_KEY": self.key, "STENO_WORKER_KEY": self.worker_key}
        command = [sys.executable, "-m", "steno", "proxy", "--host", host, "--port", str(port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _WITH_ITS_PARENT, "sh", *command],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, **given}, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + START_S
        while not self._answers():
            self.check()
            if time.monotonic() > until:
                raise RuntimeError(f"the proxy did not start within {START_S:.0f} s: {self._said()}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.url + "/healthz", timeout=2).status_code == 200
        return False

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]
