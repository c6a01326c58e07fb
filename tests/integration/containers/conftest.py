"""A container engine with storage of its own, a tiny image in it, and `steno rollout` with containers.

Podman, unless STENO_TEST_ENGINE says `docker` (tests/support/machine/docker_daemon.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from steno.client.client import Client
from steno.contracts.records import Session
from tests.integration.rollouts.conftest import ADMIN, SCRIPT, Rollout, until_served
from tests.support.machine import tiny_image
from tests.support.machine.engine_storage import own_storage
from tests.support.programs.stack import Stack, running
from tests.support.programs.variables import without_settings

ENGINE = os.environ.get("STENO_TEST_ENGINE", "podman")


@pytest.fixture(scope="session")
def engine() -> Iterator[str]:
    """Its command, with the tiny image. What the machine's own Podman has is left alone."""
    with own_storage(ENGINE) as root:
        tiny_image.make(root / "image", ENGINE)
        shutil.rmtree(root / "image")
        yield ENGINE


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    with without_settings():
        yield


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, clean_environment: None) -> Iterator[Stack]:
    worker = ["--engine", "scripted", "--script", f"{SCRIPT}:reply", "--key", "worker-key"]
    with running(
        tmp_path_factory.mktemp("stack"), None, proxy=["--admin-key", ADMIN, "--worker-key", "worker-key"]
    ) as found:
        found.start_worker(*worker)
        until_served(found)
        yield found


@dataclass
class Containers(Rollout):
    """`steno rollout` with containers of the engine, in the tiny image."""

    engine: str = ENGINE
    limit_s: float = 1500  # nine tasks took up to 84 s beside other sections

    def words(self, tasks: Path, *options: str, command: list[str]) -> list[str]:
        given = ["--executor", self.engine, "--forwarder-image", tiny_image.NAME, *options]
        return super().words(tasks, *given, command=command)

    def task(self, name: str, *, toml: str = "", tests: str | None = None, **environment: str) -> Path:
        """A folder of tasks, with one more. environment: files of its environment, `_` for the dot in their names."""
        folder = self.folder / "tasks" / name
        (folder / "environment").mkdir(parents=True)
        (folder / "task.toml").write_text(toml)
        (folder / "instruction.md").write_text("Say hello.\n")
        for file, text in environment.items():
            (folder / "environment" / file.replace("_", ".")).write_text(text)
        if tests is not None:
            (folder / "tests").mkdir()
            (folder / "tests" / "test.sh").write_text(f"#!/bin/sh\n{tests}")
        return folder.parent

    def left(self, *more: str) -> list[str]:
        """Names of containers of ours, whether they run or not."""
        listed = [self.engine, "ps", "--all", "--filter=label=steno.trial", "--format={{.Names}}", *more]
        return subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()


@pytest.fixture
def rollout(stack: Stack, engine: str, tmp_path: Path) -> Iterator[Containers]:
    found = Containers(stack, tmp_path)
    yield found
    for name in found.left():  # of a test that failed
        subprocess.run([engine, "rm", "--force", name], capture_output=True)


@pytest.fixture
def sessions(stack: Stack) -> Iterator[Callable[[str], dict[str, Session]]]:
    """Of a run, by trial."""
    with Client(stack.url, ADMIN) as client:
        yield lambda run: {found.trial_id: found for found in client.sessions() if found.run_id == run}
