"""A marked retry at another replica than the one that refused or still runs the attempt: two proxies on one Redis. They do
not join across replicas; what is sampled at either is on record once, with which took the place of which, and one trains."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from steno.contracts.errors import EngineFailed
from steno_proxy.store.redis.store import RedisStore
from tests.integration.http.conftest import Proxy, running
from tests.integration.http.faults.test_retries import AGAIN, ask, leave_after, read, samples, text
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say


@contextlib.asynccontextmanager
async def replicas(one: ParrotEngine, two: ParrotEngine) -> AsyncIterator[tuple[Proxy, Proxy]]:
    redis = RedisServer()
    stores = [RedisStore(redis.url, **PATIENT), RedisStore(redis.url, **PATIENT)]
    try:
        for store in stores:
            await store.open()
        async with running(one, store=stores[0]) as first, running(two, store=stores[1]) as second:
            yield first, second
    finally:
        for store in stores:
            await store.close()
        redis.close()


async def trained(proxy: Proxy) -> Counter[str]:
    """Turn id -> how many of its tokens train, over all samples; checked: none in two."""
    found: Counter[str] = Counter()
    for sample in await samples(proxy):
        for turn_id, place in zip(sample["turn_ids"], sample["completions"], strict=True):
            count = sum(sample["loss_mask"][place["start"] : place["end"]])
            assert not (count and found[turn_id]), "a token trains once"
            found[turn_id] += count
    return found


async def test_what_one_replica_refused_another_answers_and_it_is_one_turn() -> None:
    refusing = ParrotEngine(lambda request: Say(refuse=EngineFailed("not now")))
    async with replicas(refusing, ParrotEngine(lambda request: Say("abcd"))) as (one, two):
        assert (await ask(one)).status_code == 503
        answer = await ask(two, AGAIN)
        assert answer.json()["choices"][0]["message"]["content"] == "abcd"
        [turn] = await two.turns("t", 1)
        assert turn.fork_reason is None and turn.retry_of is None
        assert await trained(two) == {turn.turn_id: 5}


@pytest.mark.parametrize("first", ["attempt", "retry"])
async def test_an_attempt_that_runs_elsewhere_with_nothing_on_record_is_superseded_whichever_ends_first(
    first: str,
) -> None:
    gates = {"attempt": asyncio.Event(), "retry": asyncio.Event()}
    slow = ParrotEngine(lambda request: Say("abcd", gates={2: gates["attempt"]}))
    async with replicas(slow, ParrotEngine(lambda request: Say("efgh", gates={2: gates["retry"]}))) as (one, two):
        asked = {"attempt": asyncio.create_task(read(one, {}))}
        await until(lambda: one.engine.requests)
        asked["retry"] = asyncio.create_task(read(two, AGAIN))
        await until(lambda: two.engine.requests)
        for name in sorted(gates, key=lambda name: name != first):
            gates[name].set()
            assert text(await asked[name]) == {"attempt": "abcd", "retry": "efgh"}[name]
        turns = {turn.reply["content"]: turn for turn in await two.turns("t", 2)}
        old, new = turns["abcd"], turns["efgh"]
        assert (old.superseded_by, new.retry_of, new.superseded_by) == (new.turn_id, old.turn_id, None)
        assert await trained(two) == {new.turn_id: 5}
        # Whoever asks again now gets the same, and nothing new is sampled, at either.
        for proxy in (one, two):
            assert text(await read(proxy, AGAIN)) == "efgh"
        assert len(one.engine.requests) == len(two.engine.requests) == 1


async def test_an_attempt_elsewhere_whose_client_leaves_after_its_retry_is_superseded() -> None:
    engine = ParrotEngine(lambda request: Say("abcd", gates={2: asyncio.Event()}))
    async with replicas(engine, ParrotEngine(lambda request: Say("efgh"))) as (one, two):
        first = asyncio.create_task(read(one, {}))
        await until(lambda: one.engine.requests)
        assert text(await read(two, AGAIN)) == "efgh"
        first.cancel()
        new, old = await two.turns("t", 2)
        assert (old.finish_reason, old.superseded_by, new.retry_of) == ("cancelled", new.turn_id, old.turn_id)
        assert await trained(two) == {new.turn_id: 5}


async def test_of_two_retries_at_two_replicas_and_their_attempt_one_trains() -> None:
    gate = asyncio.Event()
    slow = ParrotEngine(lambda request: Say("abcd", gates={2: gate}))
    async with replicas(slow, ParrotEngine(lambda request: Say("efgh", gates={2: gate}))) as (one, two):
        asked = [asyncio.create_task(read(one, {}))]
        await until(lambda: one.engine.requests)
        asked.append(asyncio.create_task(read(two, AGAIN)))
        await until(lambda: two.engine.requests)
        asked.append(asyncio.create_task(read(two, {"x-stainless-retry-count": "2"})))  # joins
        gate.set()
        assert [text(lines) for lines in await asyncio.gather(*asked)] == ["abcd", "efgh", "efgh"]
        turns = await two.turns("t", 2)
        assert [turn.reply["content"] for turn in turns if turn.superseded_by is None] == ["efgh"]
        assert sum((await trained(two)).values()) == 5


async def test_what_one_replica_refused_is_new_at_another_and_no_retry_of_its_siblings() -> None:
    says = [Say("one"), Say(refuse=EngineFailed("not now"))]
    engine = ParrotEngine(lambda request: says.pop(0))
    async with replicas(engine, ParrotEngine(lambda request: Say("two"))) as (one, two):
        assert (await ask(one)).json()["choices"][0]["message"]["content"] == "one"
        assert (await ask(one)).status_code == 503
        assert (await ask(two, AGAIN)).json()["choices"][0]["message"]["content"] == "two"
        old, new = await two.turns("t", 2)
        assert (old.superseded_by, new.retry_of, new.fork_reason) == (None, None, "sibling")
        assert await trained(two) == {old.turn_id: 4, new.turn_id: 4}


async def test_what_a_replica_that_stops_refused_is_new_at_another() -> None:
    async with replicas(ParrotEngine(lambda r: Say("one")), ParrotEngine(lambda r: Say("two"))) as (one, two):
        assert (await ask(one)).json()["choices"][0]["message"]["content"] == "one"
        await one.app.state.turns.drain(0.0)
        assert (await ask(one)).status_code == 503
        assert (await ask(two, AGAIN)).json()["choices"][0]["message"]["content"] == "two"


async def test_an_attempt_that_its_client_left_for_another_replica_is_superseded_once_it_is_on_record() -> None:
    engine = ParrotEngine(lambda request: Say("abcd", gates={2: asyncio.Event()}))
    async with replicas(engine, ParrotEngine(lambda request: Say("efgh"))) as (one, two):
        await leave_after(one, "b")
        await two.turns("t", 1)
        assert text(await read(two, AGAIN)) == "efgh"
        old, new = await two.turns("t", 2)
        assert (old.finish_reason, old.superseded_by, new.retry_of) == ("cancelled", new.turn_id, old.turn_id)
        counts: dict[str, Any] = await trained(two)
        assert counts == {new.turn_id: 5}, "what broke never trains"
