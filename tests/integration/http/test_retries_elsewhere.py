"""A marked retry at another replica than the one that refused or still runs the attempt: two proxies on one Redis. They do
not join across replicas; what is sampled at either is on record once, and no token of it is trained twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from proxy.contracts.errors import EngineFailed
from proxy.store.redis import RedisStore
from tests.integration.http.conftest import Proxy, running, until
from tests.integration.http.test_retries import AGAIN, ask, leave_after, read, samples, text
from tests.support.parrot import ParrotEngine, Say
from tests.support.redis_server import RedisServer


@contextlib.asynccontextmanager
async def replicas(one: ParrotEngine, two: ParrotEngine) -> AsyncIterator[tuple[Proxy, Proxy]]:
    redis = RedisServer()
    stores = [RedisStore(redis.url), RedisStore(redis.url)]
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


async def test_an_attempt_that_still_runs_elsewhere_is_not_joined_and_each_token_trains_once() -> None:
    gate = asyncio.Event()
    slow = ParrotEngine(lambda request: Say("abcd", gates={2: gate}))
    async with replicas(slow, ParrotEngine(lambda request: Say("efgh"))) as (one, two):
        first = asyncio.create_task(read(one, {}))
        await until(lambda: one.engine.requests)
        assert text(await read(two, AGAIN)) == "efgh"
        gate.set()
        assert text(await first) == "abcd"
        turns = await two.turns("t", 2)
        assert {turn.reply["content"] for turn in turns} == {"abcd", "efgh"}
        assert await trained(two) == {turn.turn_id: 5 for turn in turns}
        # Whoever asks again now gets one of the two, and nothing new is sampled, at either.
        for proxy in (one, two):
            assert text(await read(proxy, AGAIN)) in ("abcd", "efgh")
        assert len(one.engine.requests) == len(two.engine.requests) == 1


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
