"""I5 in bytes: what Redis itself says that a recording takes."""

from __future__ import annotations

import asyncio

from steno_proxy.store.redis.schema import trial_keys
from steno_proxy.store.redis.store import RedisStore
from tests.support.machine.redis_server import RedisServer
from tests.support.records.recordings import conversation, row, session, turn
from tests.support.waiting import until

TOKEN_BYTES = 14
TURN_BYTES = 400
TRIAL = "trial-0123456789abcdef"
METADATA = {"instance": "django__django-11039", "seed": 7}


async def test_a_session_of_twenty_turns_is_within_its_budget(server: RedisServer, store: RedisStore) -> None:
    made = conversation(20)
    await store.register(session(TRIAL, group_id="g-1", metadata=METADATA))
    for one, its_row in made:
        await store.commit(TRIAL, one, its_row, now=1_700_000_100.123)
    tokens = sum(len(one.new_prompt_ids) // 4 + one.completion_tokens for one, _ in made)
    keys = trial_keys(TRIAL)
    with server.client() as redis:
        assert {key.decode() for key in redis.keys(f"*{TRIAL}*")} == set(keys) - {keys.events, keys.again}
        used = {key: redis.memory_usage(key, samples=0) or 0 for key in keys}
        text_bytes = sum(map(len, redis.lrange(keys.texts, 0, -1)))
    token_bytes = used[keys.ids] + used[keys.logprobs]
    assert token_bytes <= TOKEN_BYTES * tokens
    assert sum(used.values()) - text_bytes - token_bytes <= TURN_BYTES * len(made)


async def test_a_turn_costs_the_same_however_long_the_session_is(server: RedisServer, store: RedisStore) -> None:
    await store.register(session(TRIAL))
    made = conversation(200, text_bytes=500)

    async def grow(first: int, last: int) -> float:
        with server.client() as redis:
            before = sum(redis.memory_usage(key, samples=0) or 0 for key in trial_keys(TRIAL))
            for one, its_row in made[first:last]:
                await store.commit(TRIAL, one, its_row, now=1.0)
            return sum(redis.memory_usage(key, samples=0) or 0 for key in trial_keys(TRIAL)) - before

    first, _, last = await grow(0, 50), await grow(50, 150), await grow(150, 200)
    assert last <= 1.1 * first


async def test_texts_are_stored_once_however_often_they_are_sent(server: RedisServer, store: RedisStore) -> None:
    """A rewritten history sends everything again as a new branch: nothing that is here is stored again."""
    await store.register(session(TRIAL))
    messages = [{"role": "user", "content": f"{number} " * 400} for number in range(10)]
    texts = trial_keys(TRIAL).texts
    with server.client() as redis:
        first = turn(0, messages=messages)
        await store.commit(TRIAL, first, row(first), now=1.0)
        before = redis.llen(texts)
        again = turn(1, messages=messages)
        await store.commit(TRIAL, again, row(again), now=1.0)
        assert redis.llen(texts) == before + 1  # its reply


async def test_an_unwatched_session_has_no_stream(server: RedisServer, store: RedisStore) -> None:
    await store.register(session(TRIAL))
    for one, its_row in conversation(3):
        await store.commit(TRIAL, one, its_row, now=1.0)
    events = store.events(TRIAL)
    with server.client() as redis:
        assert not redis.exists(trial_keys(TRIAL).events)
        await anext(events)
        assert redis.type(trial_keys(TRIAL).events) == b"stream"
        assert 0 < redis.ttl(trial_keys(TRIAL).events) <= 60
    await events.aclose()


async def test_watchers_that_have_gone_leave_no_connection(server: RedisServer, store: RedisStore) -> None:
    await store.register(session(TRIAL))
    with server.client() as redis:
        watchers = [store.events(TRIAL) for _ in range(30)]
        events = [asyncio.ensure_future(anext(watcher)) for watcher in watchers]
        await until(lambda: sum(client["cmd"] == "xread" for client in redis.client_list()) == 30)
        [(one, its_row)] = conversation(1)
        await store.commit(TRIAL, one, its_row, now=1.0)
        await asyncio.gather(*events)
        for watcher in watchers:
            await watcher.aclose()
        await until(lambda: not any(client["cmd"] == "xread" for client in redis.client_list()))
