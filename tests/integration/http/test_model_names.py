"""A model that some worker has served is itself or nothing: at every replica, until its name is retired."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from steno.contracts.errors import Conflict, NotFound
from steno_proxy.store.redis.store import RedisStore
from steno_worker.config import WorkerSettings
from steno_worker.main import Worker
from steno_worker.metrics import WorkerMetrics
from tests.integration.http.conftest import Proxy, running
from tests.support.parrot import ParrotEngine
from tests.support.redis_server import PATIENT
from tests.support.waiting import until

JUDGE = "org/judge-7b"


@contextlib.asynccontextmanager
async def serving(engine: ParrotEngine, *proxies: Proxy) -> AsyncIterator[None]:
    """A worker at these replicas; afterwards none of them has it any more."""
    hubs, name = [proxy.app.state.hub for proxy in proxies], engine.cards()[0].name
    given = WorkerSettings(proxy=[f"ws://127.0.0.1:{proxy.port}" for proxy in proxies], worker_id=f"w-{id(engine)}")
    worker = Worker(given, engine, WorkerMetrics(CollectorRegistry()))
    task = asyncio.create_task(worker.run())
    await until(lambda: all(any(card.name == name for card in hub.cards()) for hub in hubs))
    try:
        yield
    finally:
        worker.stop()
        worker.stop()
        await task
        await until(lambda: not any(view.id == given.worker_id for hub in hubs for view in hub.workers()))


def known(proxy: Proxy) -> bool:
    return JUDGE in proxy.app.state.services.policies.names.all()


async def test_no_other_model_answers_for_one_whose_workers_are_away(redis_url: str) -> None:
    stores = [RedisStore(redis_url, **PATIENT) for _ in range(3)]
    actor, judge = ParrotEngine(name="actor"), ParrotEngine(name=JUDGE, policy="frozen")
    async with (
        running(store=stores[0], worker=False, queue_s=0.2) as one,
        running(store=stores[1], worker=False) as two,
        serving(actor, one, two),
    ):
        async with serving(judge, one):
            assert (await one.chat("a", "hello", model=JUDGE)).status_code == 200
            await until(lambda: known(two))
            with pytest.raises(Conflict, match="is served by"):
                await one.steno.retire_model(JUDGE)
        refused = await one.chat("b", "hello", model=JUDGE)
        assert refused.status_code == 503 and JUDGE in refused.text and refused.headers["retry-after"]
        assert await one.turns("b") == []
        assert (await one.chat("c", "hello", model="gpt-5")).status_code == 200, "an unknown name is the default policy"
        assert [request.model for request in actor.requests] == ["actor"]
        waiting = asyncio.create_task(two.chat("d", "hello", model=JUDGE))
        await until(lambda: len(two.app.state.hub.waiting) == 1)
        assert (await two.chat("e", "hello", model="")).status_code == 200, "nobody else waits for it"
        async with serving(judge, two):
            assert (await waiting).status_code == 200
        [turn] = await two.turns("d")
        assert (turn.served_model, turn.policy) == (JUDGE, "frozen")
        async with running(store=stores[2], worker=False, queue_s=0.2) as restarted, serving(actor, restarted):
            assert (await restarted.chat("f", "hello", model=JUDGE)).status_code == 503, "it is in the store"
        found = {one.name: len(one.workers) for one in await two.steno.models()}
        assert (found[JUDGE], found["actor"]) == (0, 1)
        waiting = asyncio.create_task(two.chat("g", "hello", model=JUDGE))
        await until(lambda: len(two.app.state.hub.waiting) == 1)
        await one.steno.retire_model(JUDGE)
        assert (await waiting).status_code == 200, (
            "it means the default policy now, also where it is waited for already"
        )
        assert (await one.chat("h", "hello", model=JUDGE)).status_code == 200
        assert [turn.served_model for trial in "gh" for turn in await one.turns(trial)] == ["actor", "actor"]
        with pytest.raises(NotFound):
            await one.steno.retire_model(JUDGE)
