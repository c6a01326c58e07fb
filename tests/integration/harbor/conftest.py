"""Harbor, in an interpreter of its own, with Podman; a proxy that its sandboxes reach; `steno rollout --harbor`.

Asks: STENO_TEST_HARBOR_PYTHON: a python that has Harbor 0.24 and podman-compose beside it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from steno.client.client import Client
from steno.contracts.records import Session
from tests.integration.rollouts.conftest import ADMIN, Rollout, until_served
from tests.support.machine import agents_image
from tests.support.machine.engine_storage import own_storage
from tests.support.machine.far_host import far_host
from tests.support.programs.stack import Stack, running
from tests.support.programs.variables import without_settings

Sessions = Callable[[str], dict[str, Session]]
PYTHON = os.environ.get("STENO_TEST_HARBOR_PYTHON", "")
PROGRAMS = Path(__file__).with_name("programs")
SHELL = f"{PROGRAMS / 'shell.py'}:Shell"
WORKER_KEY = ("--key", "worker-key")
PROXY = ("--host", "0.0.0.0", "--admin-key", ADMIN, "--worker-key", WORKER_KEY[1])
"""Sandboxes reach it, by keys only."""
DOCKERFILE = f"FROM {agents_image.NAME}\nCOPY . /opt/task/\nWORKDIR /app\n"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sandboxes are many processes: minutes where the machine is idle, and more where it is not."""
    for item in items:
        if item.get_closest_marker("harbor"):
            item.add_marker(pytest.mark.timeout(2400))


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    with without_settings():
        yield


@pytest.fixture(scope="session")
def storage(clean_environment: None) -> Iterator[Path]:
    """Podman's, of these tests."""
    with own_storage("podman") as root:
        yield root


@pytest.fixture(scope="session")
def image(storage: Path) -> str:
    made = agents_image.make(storage / "image", "podman")
    shutil.rmtree(storage / "image")
    return made


def own_address() -> str:
    """This machine's, which sandboxes reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, clean_environment: None) -> Iterator[Stack]:
    worker = ["--engine", "scripted", "--script", f"{PROGRAMS / 'script.py'}:reply", *WORKER_KEY]
    with running(tmp_path_factory.mktemp("stack"), None, proxy=PROXY) as found:
        found.start_worker(*worker, "--context-tokens", "200000")
        until_served(found)
        yield found


@pytest.fixture(scope="session")
def far() -> Iterator[str]:
    """Address of a host outside, which this machine reaches."""
    with far_host() as address:
        yield address


@dataclass
class Harbor(Rollout):
    """`steno rollout --harbor`, with Podman or Docker. Of `words`, `command` stays empty."""

    limit_s: float = 1800
    engine: str = "podman"

    def words(self, tasks: Path, *options: str, command: list[str]) -> list[str]:
        words = super().words(tasks, *options, command=command)
        given = [
            "--proxy", f"http://{own_address()}:{self.stack.port}", "--environment", self.engine, "--harbor-python",
            PYTHON,
        ]  # fmt: skip
        words[words.index("--tasks")] = "--harbor"
        return words[: words.index("--")] + given

    def task(self, name: str, toml: str, files: dict[str, str]) -> Path:
        """A folder of tasks, with one more. files: by their paths; `environment/Dockerfile` is there."""
        folder = self.folder / "tasks" / name
        for path, text in {"task.toml": toml, "environment/Dockerfile": DOCKERFILE, **files}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder.parent

    def left(self) -> list[str]:
        """Names of all containers, whether they run or not."""
        listed = [self.engine, "ps", "--all", "--format={{.Names}}"]
        return subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()


@pytest.fixture
def rollout(stack: Stack, image: str, tmp_path: Path) -> Iterator[Harbor]:
    found = Harbor(stack, tmp_path)
    yield found
    subprocess.run(["podman", "rm", "--all", "--force", "--time=0"], capture_output=True)


@pytest.fixture
def sessions(stack: Stack) -> Sessions:
    """Of a run, by trial."""

    def of(run: str) -> dict[str, Session]:
        with Client(stack.url, ADMIN) as client:
            return {found.trial_id: found for found in client.sessions() if found.run_id == run}

    return of
