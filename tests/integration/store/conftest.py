"""Redis servers that these tests may flush, stop and kill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from steno_proxy.store.redis.store import RedisStore
from tests.support.machine.redis_server import PATIENT, RedisServer


@pytest.fixture(scope="session", params=["server", "cluster"])
def own_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = RedisServer(cluster=request.param == "cluster")
    yield server
    server.close()


@pytest.fixture
def server(own_server: RedisServer) -> RedisServer:
    """An empty one."""
    with own_server.client() as client:
        client.flushall()
    return own_server


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    """How long a busy machine takes to write to its disk is no matter of what these tests are about."""
    async with opened(server, **PATIENT) as store:
        yield store


@asynccontextmanager
async def opened(server: RedisServer, **bounds: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(server.url, **bounds)
    await store.open()
    try:
        yield store
    finally:
        await store.close()
