"""Redis servers that these tests may flush, stop and kill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from proxy.store.redis import RedisStore
from tests.support.redis_server import RedisServer


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
    store = RedisStore(server.url)
    await store.open()
    yield store
    await store.close()
