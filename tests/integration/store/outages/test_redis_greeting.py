"""A Redis that sends everybody away at the door: what it says there reaches who has to do something about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from steno.contracts.errors import StoreUnavailable
from steno_cli.doctor import redis_checks
from steno_cli.doctor.findings import FindingLevel
from steno_cli.doctor.redis_checks import check_redis
from steno_proxy.config.redis_url import read_redis_url
from steno_proxy.store.redis.link import greeting
from steno_proxy.store.redis.link.greeting import refusal
from steno_proxy.store.redis.store import RedisStore
from tests.support.machine.redis_server import PATIENT, RedisServer

PROTECTED = (
    b"-DENIED Redis is running in protected mode because protected mode is enabled and no password is set for the default "
    b"user. In this mode connections are only accepted from the loopback interface. If you want to connect from external "
    b"computers to Redis you may adopt one of the following solutions: 1) Just disable protected mode\r\n"
)
"""Word for word what Redis 7.0 says to an address that is not loopback, before it closes the connection."""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How soon it says something is no matter."""
    monkeypatch.setattr(greeting, "WITHIN_S", 30.0)
    monkeypatch.setattr(redis_checks, "TIMEOUT_S", 30.0)


@asynccontextmanager
async def protected() -> AsyncIterator[int]:
    def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PROTECTED)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("form", ["redis://{}/0", "redis+cluster://{},{}", "redis+sentinel://{}/steno"])
async def test_protected_mode_is_named_with_what_to_do(form: str) -> None:
    async with protected() as port:
        url = form.format(f"127.0.0.1:{port}", f"127.0.0.1:{port}")
        store = RedisStore(url, **PATIENT)
        try:
            with pytest.raises(StoreUnavailable) as refused:
                await store.open()
        finally:
            await store.close()
        assert "DENIED Redis is running in protected mode" in refused.value.message
        assert "requirepass" in refused.value.message and "solutions" not in refused.value.message
        found = [one for one in await asyncio.to_thread(check_redis, url) if one.check == "redis.reachable"]
        assert [one.level for one in found] == [FindingLevel.BAD]
        assert "protected mode" in found[0].advice and "requirepass" in found[0].advice


@pytest.mark.usefixtures("patient")
async def test_a_full_house_is_named() -> None:
    server = RedisServer()
    try:
        with server.client() as client:
            client.config_set("maxclients", 1)
            store = RedisStore(server.url, **PATIENT)
            try:
                with pytest.raises(StoreUnavailable, match=r"max number of clients reached.*raise its maxclients"):
                    await store.ping()
            finally:
                await store.close()
    finally:
        server.close()


async def test_one_that_serves_says_nothing_and_one_that_is_away_neither() -> None:
    server = RedisServer()
    try:
        assert await refusal(read_redis_url(server.url)) == ""
        server.kill()
        assert await refusal(read_redis_url(server.url)) == ""
    finally:
        server.close()
