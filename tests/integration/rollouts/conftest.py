"""One proxy with keys and a scripted worker; `steno rollout` as its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno.client.client import Client
from steno.contracts.records import Session
from tests.support.programs import forked
from tests.support.programs.stack import ROOT, Stack, running
from tests.support.programs.variables import without_settings

ADMIN = "admin-key-of-the-tests"
SCRIPT = Path(__file__).with_name("script.py")
TOY = [sys.executable, "-m", "steno_cli.demo.toy_agent", "--seed", "{seed}"]


@pytest.fixture(scope="module", autouse=True)
def clean_environment() -> Iterator[None]:
    with without_settings():
        yield


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    worker = ["--engine", "scripted", "--script", f"{SCRIPT}:reply", "--key", "worker-key"]
    proxy = ["--admin-key", ADMIN, "--worker-key", "worker-key"]
    with running(tmp_path_factory.mktemp("stack"), None, proxy=proxy) as found:
        found.start_worker(*worker)
        until_served(found)
        yield found


def until_served(stack: Stack) -> None:
    until = time.monotonic() + 120
    while httpx.get(f"{stack.url}/readyz", timeout=60).json().get("status") != "ok":
        assert time.monotonic() < until, stack.logs()
        time.sleep(0.1)


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, ADMIN) as found:
        yield found


@dataclass
class Rollout:
    """`steno rollout` against the stack; `folder` is the test's own."""

    stack: Stack
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    limit_s: float = 240
    forked: bool = True
    python: str = sys.executable

    def tasks(self, *tasks: dict[str, Any]) -> Path:
        path = self.folder / "tasks.jsonl"
        path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        return path

    @property
    def results(self) -> Path:
        return self.folder / "results.jsonl"

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.results.read_text().splitlines()]

    def words(self, tasks: Path, *options: str, command: list[str]) -> list[str]:
        return [
            self.python, "-m", "steno", "rollout", "--tasks", str(tasks), "--proxy", self.stack.url, "--key", ADMIN,
            "--results", str(self.results), "--work-dir", str(self.folder / "work"), *options, "--", *command,
        ]  # fmt: skip

    def start(self, tasks: Path, *options: str, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(tasks, *options, command=command),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **self.environment},
        )  # fmt: skip

    def __call__(self, tasks: Path, *options: str, command: list[str], code: int = 0) -> str:
        """Run it to its end; what it said on stderr. A fork has another program's command line (`forked`)."""
        words = self.words(tasks, *options, command=command)
        if self.forked:
            done = forked.run(words, self.environment, timeout=self.limit_s)
        else:
            done = subprocess.run(
                words, env={**os.environ, **self.environment}, cwd=ROOT, capture_output=True, text=True, timeout=self.limit_s
            )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stderr


@pytest.fixture
def rollout(stack: Stack, tmp_path: Path) -> Rollout:
    return Rollout(stack, tmp_path)


@pytest.fixture
def sessions(client: Client) -> Callable[[str], list[Session]]:
    """Of the groups of a run, by trial."""
    return lambda run: sorted(
        (session for session in client.sessions() if session.run_id == run), key=lambda session: session.trial_id
    )
