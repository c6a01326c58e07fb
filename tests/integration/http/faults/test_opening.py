"""A proxy that starts before its Redis, and keys that outlive the admin key."""

from __future__ import annotations

import asyncio

import pytest

from steno_proxy.store.redis.store import RedisStore
from tests.integration.http.conftest import running
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

ADMIN, NEXT = "the first admin key", "the next admin key"


async def test_without_redis_it_starts_is_not_ready_and_serves_once_redis_is_there() -> None:
    redis = RedisServer()
    try:
        redis.kill()
        async with running(store=RedisStore(redis.url, **PATIENT), worker=False, admin_key=ADMIN) as proxy:
            assert (await proxy.http.get("/healthz")).status_code == 200
            ready = await proxy.http.get("/readyz")
            assert ready.status_code == 503 and ready.json()["status"] == "store"
            asked = {"messages": [{"role": "user", "content": "hello"}]}
            key = {"authorization": "Bearer of no key that could be told from a good one yet"}
            agent = await proxy.http.post("/t/v1/chat/completions", json=asked, headers=key)
            assert agent.status_code == 503 and "retry-after" in agent.headers
            assert (await proxy.http.post("/sessions/t")).status_code == 503
            redis.start()
            await until(lambda: proxy.app.state.services.keys.pending is None)
            assert (await proxy.http.get("/readyz")).status_code == 200
            assert (await proxy.http.post("/sessions/t")).status_code in (200, 201)
            agent = await proxy.http.post("/t/v1/chat/completions", json=asked, headers=key)
            assert agent.status_code == 403
    finally:
        redis.close()


async def test_a_new_admin_key_ends_no_running_trial_and_a_given_secret_counts(redis_url: str) -> None:
    async with running(store=RedisStore(redis_url, **PATIENT), admin_key=ADMIN) as proxy:
        key = proxy.agent_key("kept")
    async with running(store=RedisStore(redis_url, **PATIENT), admin_key=NEXT) as proxy:
        assert proxy.agent_key("kept") == key
        assert (await proxy.http.get("/workers")).status_code == 200
    async with running(store=RedisStore(redis_url, **PATIENT), admin_key=NEXT, trial_secret="given") as proxy:
        assert proxy.agent_key("kept") != key


async def test_a_session_deleted_while_a_turn_runs_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    gate = asyncio.Event()
    engine = ParrotEngine(lambda request: Say("abcd", gates={2: gate}))
    async with running(engine) as proxy:
        task = asyncio.create_task(proxy.chat("t", "hello"))
        in_flight = proxy.app.state.turns._running
        await until(lambda: any(choice.transcript.tokens for one in in_flight for choice in one.choices))
        await proxy.steno.delete("t")
        gate.set()
        assert (await task).status_code == 410
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_what_broke_before_its_first_token_makes_no_sibling_of_the_next() -> None:
    """Its client is told 503, and asks again without saying so."""
    answers = [Say("ab", fail_after=0), Say("ab")]
    engine = ParrotEngine(lambda request: answers.pop(0))
    async with running(engine) as proxy:
        assert (await proxy.chat("t", "hello")).status_code == 503
        assert (await proxy.chat("t", "hello")).status_code == 200
        [turn] = await proxy.turns("t")
        assert turn.fork_reason is None and not turn.partial
