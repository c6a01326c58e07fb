"""What a lost Redis looks like to the rest of the proxy: one error, whatever the library below calls it."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from steno.contracts.errors import StoreUnavailable
from steno_proxy.store.redis.link import redis_link as link_module
from steno_proxy.store.redis.link.redis_link import RedisLink


def link() -> RedisLink:
    return RedisLink("redis://127.0.0.1:1/0", max_connections=1, reply_timeout_s=1.0, call_timeout_s=1.0)


async def fails(error: Exception) -> None:
    raise error


async def test_a_connection_closed_while_it_is_written_to_is_an_unavailable_store() -> None:
    closed = RuntimeError(
        "unable to perform operation on <TCPTransport closed=True reading=False>; the handler is closed"
    )
    with pytest.raises(StoreUnavailable):
        await link().call(fails(closed))


async def test_the_same_failure_is_logged_once_in_a_while_and_another_one_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logged() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.getMessage().startswith("a Redis command")]

    async def fail(words: str) -> None:
        with pytest.raises(StoreUnavailable):
            await link().call(fails(RedisConnectionError(words)))

    for words in ("away at first", "away at first", "away at first", "full"):
        await fail(words)
    first, full = (f"a Redis command failed: ConnectionError: {words}" for words in ("away at first", "full"))
    assert logged() == [first, full]
    monkeypatch.setattr(link_module, "SAY_AGAIN_S", 0.0)
    await fail("full")
    assert logged() == [first, full, full]


async def test_other_surprises_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="something else"):
        await link().call(fails(RuntimeError("something else")))
