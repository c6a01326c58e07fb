"""A Redis that is dead, frozen or fresh: an error within a bound (I3), and recovery without help."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from proxy.contracts.errors import ConfigError, StoreUnavailable
from proxy.store.redis import RedisStore
from tests.support.recordings import conversation, row, session, turn
from tests.support.redis_server import RedisServer
from tests.support.store_contract import record

T = TypeVar("T")

BOUND_S = 10.0  # call_timeout_s of the store under test, and room for two busy cores


@pytest.fixture(scope="module", params=["server", "cluster"])
def mortal(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = RedisServer(cluster=request.param == "cluster")
    yield server
    server.close()


@pytest.fixture
async def hasty(mortal: RedisServer) -> AsyncIterator[RedisStore]:
    """Bounds that a test can wait for."""
    async with opened(mortal, reply_timeout_s=1.0, call_timeout_s=3.0) as store:
        yield store


@pytest.fixture
async def store(mortal: RedisServer) -> AsyncIterator[RedisStore]:
    async with opened(mortal) as store:
        yield store


@asynccontextmanager
async def opened(server: RedisServer, **bounds: float) -> AsyncIterator[RedisStore]:
    with server.client() as client:
        client.flushall()
    store = RedisStore(server.url, **bounds)
    await store.open()
    yield store
    await store.close()


async def once_back(call: Callable[[], Awaitable[T]], within_s: float = 30.0) -> T:
    """What a call returns when it is answered, as whoever keeps a turn says it again: a server that wakes takes its time."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await call()
        except StoreUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


async def test_a_frozen_server_is_unavailable_within_a_bound_and_then_back(
    mortal: RedisServer, hasty: RedisStore
) -> None:
    made = await record(hasty, "frozen", 2)
    late = turn(5)
    mortal.pause()
    try:
        began = time.monotonic()
        results = await asyncio.gather(
            hasty.commit("frozen", late, row(late), now=1.0), hasty.tail("frozen", 0), hasty.ping(), hasty.turns("frozen"),
            hasty.register(session("x")), hasty.stats(), return_exceptions=True,
        )  # fmt: skip
        took_s = time.monotonic() - began
    finally:
        mortal.resume()
    assert [type(result) for result in results] == [StoreUnavailable] * 6
    assert took_s < BOUND_S
    # The frozen server may have taken the commit from its socket: said again, it is there once.
    number = await once_back(lambda: hasty.commit("frozen", late, row(late), now=2.0))
    assert [one.turn_id for one in await hasty.turns("frozen")] == [one.turn_id for one in [*made, late]]
    assert number == 2


async def test_a_killed_server_keeps_what_was_acknowledged(mortal: RedisServer, hasty: RedisStore) -> None:
    made = await record(hasty, "killed", 3)
    mortal.kill()
    late = turn(5)
    began = time.monotonic()
    for call in (hasty.commit("killed", late, row(late), now=1.0), hasty.tail("killed", 0), hasty.ping()):
        with pytest.raises(StoreUnavailable):
            await call
    assert time.monotonic() - began < 3 * BOUND_S
    mortal.start()
    assert await once_back(lambda: hasty.turns("killed")) == made  # appendfsync always: what returned is on disk
    # Its scripts went with it: they are sent again.
    assert await once_back(lambda: hasty.commit("killed", late, row(late), now=2.0)) == 3


async def test_nothing_there_is_unavailable_and_another_scheme_a_config_error() -> None:
    store = RedisStore("redis://127.0.0.1:1/0")
    with pytest.raises(StoreUnavailable):
        await store.open()
    await store.close()
    with pytest.raises(ConfigError):
        RedisStore("http://127.0.0.1:1/0")


async def test_a_cancelled_call_harms_no_other(store: RedisStore) -> None:
    made = conversation(30)
    await store.register(session("cancelled"))
    for number, (one, its_row) in enumerate(made):
        task = asyncio.ensure_future(store.commit("cancelled", one, its_row, now=1.0))
        for _ in range(number % 7):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.commit("cancelled", one, its_row, now=1.0)
    assert [one.turn_id for one in await store.turns("cancelled")] == [one.turn_id for one, _ in made]


async def test_two_replicas_number_their_turns_without_gaps_and_see_one_tail(
    mortal: RedisServer, store: RedisStore
) -> None:
    other = RedisStore(mortal.url)
    await store.register(session("shared"))
    made = [turn(number, seed=3) for number in range(40)]
    numbers = await asyncio.gather(
        *((store, other)[number % 2].commit("shared", one, row(one), now=1.0) for number, one in enumerate(made))
    )
    assert sorted(numbers) == list(range(40))
    first, second = await store.tail("shared", 0), await other.tail("shared", 0)
    assert first == second
    assert [first.rows[number].turn_id for number in numbers] == [one.turn_id for one in made]
    await other.close()


async def test_a_text_wrongly_believed_to_be_there_is_sent_after_all(mortal: RedisServer, store: RedisStore) -> None:
    """The trial was flushed and made anew by another replica: this one still believes that its tools are stored."""
    await record(store, "renewed", 2)
    with mortal.client() as client:
        client.flushall()
    made = await record(store, "renewed", 2)
    assert await store.turns("renewed") == made


async def test_a_commit_is_one_round_trip(mortal: RedisServer, store: RedisStore) -> None:
    await record(store, "counted", 2)
    one = turn(7)
    with mortal.client() as client:
        before = client.info("commandstats")
        await store.commit("counted", one, row(one), now=1.0)
        after = client.info("commandstats")
    sent = {
        name: stats["calls"] - before.get(name, {"calls": 0})["calls"]
        for name, stats in after.items()
        if name in ("cmdstat_evalsha", "cmdstat_eval")
    }
    assert sum(sent.values()) == sent["cmdstat_evalsha"] == 1


async def test_reading_while_others_commit_gives_whole_turns(mortal: RedisServer, store: RedisStore) -> None:
    other = RedisStore(mortal.url)
    await store.register(session("busy"))
    made = [turn(number, seed=4, text_bytes=50) for number in range(100)]

    async def write() -> None:
        for one in made:
            await other.commit("busy", one, row(one), now=1.0)

    writing = asyncio.ensure_future(write())
    while not writing.done():
        read = await store.turns("busy")
        assert read == made[: len(read)]
    await writing
    assert await store.turns("busy") == made
    await other.close()
