"""Fixtures that any test may ask for. What is needed and missing fails by name; nothing is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.redis_server import RedisServer

# How long an example takes says more about the machine than about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A real redis-server for the whole run. Use trial ids of your own; do not kill or flush it (make one for that)."""
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture(scope="session")
def redis_cluster_url() -> Iterator[str]:
    """A real cluster: one node that owns every slot."""
    server = RedisServer(cluster=True)
    yield server.url
    server.close()
