"""One proxy with an admin key and one scripted worker for this folder's tests, and one without keys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from steno.client.client import Client
from tests.support.programs.stack import Stack, running
from tests.support.programs.variables import without_settings

ADMIN = "admin-key-of-the-tests"
SCRIPT = Path(__file__).with_name("script.py")
WORKER = ["--engine", "scripted", "--script", f"{SCRIPT}:reply"]


@pytest.fixture(scope="package", autouse=True)
def clean_environment() -> Iterator[None]:
    with without_settings():
        yield


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Without keys: sessions are registered on first use."""
    with running(tmp_path_factory.mktemp("stack"), WORKER) as found:
        yield found


@pytest.fixture(scope="package")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """With an admin key, and a worker that shows the same key."""
    with running(tmp_path_factory.mktemp("locked"), None, proxy=["--admin-key", ADMIN]) as found:
        found.start_worker(*WORKER, "--key", ADMIN)
        with Client(found.url, ADMIN) as client:
            until = time.monotonic() + 180
            while not client.workers():
                assert time.monotonic() < until, found.logs()
                time.sleep(0.1)
        yield found
