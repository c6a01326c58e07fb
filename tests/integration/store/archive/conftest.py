"""A store with an archive: a folder, or fsspec's memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from steno_proxy.store.redis.store import RedisStore
from tests.integration.store.archive.support import (
    replica,
)
from tests.support.machine.redis_server import RedisServer


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "archive")
    return f"memory://{tmp_path.name}"


@pytest.fixture
async def store(server: RedisServer, url: str) -> AsyncIterator[RedisStore]:
    store, store.archiver = replica(server, url)  # type: ignore[attr-defined]
    yield store
    await store.close()
