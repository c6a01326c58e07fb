"""A Redis that is dead, frozen or fresh: an error within a bound (I3), and recovery without help."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from steno.contracts.errors import ConfigError, StoreUnavailable
from steno_proxy.store.redis.store import RedisStore
from tests.support.contracts.recording import record
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.recordings import conversation, row, session, turn
from tests.support.waiting import insist

BOUND_S = 30.0  # call_timeout_s of the store under test, and room for two busy cores


@pytest.fixture
async def hasty(server: RedisServer) -> AsyncIterator[RedisStore]:
    """Bounds that a test can wait for; it is connected."""
    store = RedisStore(server.url, reply_timeout_s=1.0, call_timeout_s=3.0)
    await insist(store.ping)
    yield store
    await store.close()


async def test_a_frozen_server_is_unavailable_within_a_bound_and_then_back(
    server: RedisServer, store: RedisStore, hasty: RedisStore
) -> None:
    made = await record(store, "frozen", 2)
    late = turn(5)
    server.pause()
    try:
        began = time.monotonic()
        results = await asyncio.gather(
            hasty.commit("frozen", late, row(late), now=1.0), hasty.tail("frozen", 0), hasty.ping(), hasty.turns("frozen"),
            hasty.register(session("x")), hasty.stats(), return_exceptions=True,
        )  # fmt: skip
        took_s = time.monotonic() - began
    finally:
        server.resume()
    assert [type(result) for result in results] == [StoreUnavailable] * 6
    assert took_s < BOUND_S
    # The frozen server may have taken the commit from its socket: said again, it is there once.
    number = await insist(lambda: hasty.commit("frozen", late, row(late), now=2.0))
    assert [one.turn_id for one in await insist(lambda: hasty.turns("frozen"))] == [
        one.turn_id for one in [*made, late]
    ]
    assert number == 2


async def test_a_killed_server_keeps_what_was_acknowledged(
    server: RedisServer, store: RedisStore, hasty: RedisStore
) -> None:
    made = await record(store, "killed", 3)
    server.kill()
    late = turn(5)
    began = time.monotonic()
    try:
        for call in (hasty.commit("killed", late, row(late), now=1.0), hasty.tail("killed", 0), hasty.ping()):
            with pytest.raises(StoreUnavailable):
                await call
        assert time.monotonic() - began < 3 * BOUND_S
    finally:
        server.start()
    assert await insist(lambda: hasty.turns("killed")) == made  # appendfsync always: what returned is on disk
    # Its scripts went with it: they are sent again.
    assert await insist(lambda: hasty.commit("killed", late, row(late), now=2.0)) == 3


async def test_nothing_there_is_unavailable_and_another_scheme_a_config_error() -> None:
    store = RedisStore("redis://127.0.0.1:1/0")
    with pytest.raises(StoreUnavailable):
        await store.open()
    await store.close()
    with pytest.raises(ConfigError):
        RedisStore("http://127.0.0.1:1/0")


async def test_a_process_that_was_busy_while_it_connected_is_not_told_that_the_server_is_gone(
    server: RedisServer,
) -> None:
    for steps in (1, 2, 3):
        store = RedisStore(server.url, **PATIENT)
        asked = asyncio.create_task(store.ping())
        for _ in range(steps):
            await asyncio.sleep(0)
        time.sleep(1.2)  # noqa: ASYNC251  the event loop's own stall
        await asked
        await store.close()


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
    server: RedisServer, store: RedisStore
) -> None:
    other = RedisStore(server.url, **PATIENT)
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


async def test_a_text_wrongly_believed_to_be_there_is_sent_after_all(server: RedisServer, store: RedisStore) -> None:
    """The trial was flushed and made anew by another replica: this one still believes that its tools are stored."""
    await record(store, "renewed", 2)
    with server.client() as client:
        client.flushall()
    made = await record(store, "renewed", 2)
    assert await store.turns("renewed") == made


async def test_a_commit_is_one_round_trip(server: RedisServer, store: RedisStore) -> None:
    await record(store, "counted", 2)
    one = turn(7)
    with server.client() as client:
        before = client.info("commandstats")
        await store.commit("counted", one, row(one), now=1.0)
        after = client.info("commandstats")
    sent = {
        name: stats["calls"] - before.get(name, {"calls": 0})["calls"]
        for name, stats in after.items()
        if name in ("cmdstat_evalsha", "cmdstat_eval")
    }
    assert sum(sent.values()) == sent["cmdstat_evalsha"] == 1


async def test_reading_while_others_commit_gives_whole_turns(server: RedisServer, store: RedisStore) -> None:
    other = RedisStore(server.url, **PATIENT)
    await store.register(session("busy"))
    made = [turn(number, seed=4, text_bytes=50) for number in range(100)]
    for number, one in enumerate(made):
        one.index = number  # a reader may see a turn before its writer is told its number

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
