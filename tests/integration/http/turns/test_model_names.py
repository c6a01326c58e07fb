"""A model that some worker has served is itself or nothing: at every replica, until its name is retired."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from steno.contracts.chat import Job
from steno.contracts.errors import Conflict, NotFound
from steno_proxy.store.redis.store import RedisStore
from steno_worker.config import WorkerSettings
from steno_worker.main import Worker
from steno_worker.metrics import WorkerMetrics
from tests.integration.http.conftest import Proxy, running
from tests.support.machine.redis_server import PATIENT
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine

JUDGE = "org/judge-7b"


class CountingParrot(ParrotEngine):
    """Of any prompt it says that it has so many tokens."""

    def __init__(self, tokens: int, **card: str) -> None:
        super().__init__(**card)
        self._tokens = tokens

    async def count(self, job: Job) -> int:
        return self._tokens


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


def known(proxy: Proxy, name: str = JUDGE) -> bool:
    return name in proxy.app.state.services.policies.names.all()


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


async def test_a_name_that_nobody_has_served_is_never_another_policys_while_the_default_one_is_away(
    redis_url: str,
) -> None:
    """Seed 206 of chaos, with long stops: all workers of the default policy were away for longer than the grace."""
    stores = [RedisStore(redis_url, **PATIENT) for _ in range(3)]
    actor, judge = ParrotEngine(name="actor"), ParrotEngine(name=JUDGE, policy="frozen")
    async with (
        running(store=stores[0], worker=False, queue_s=0.2) as one,
        running(store=stores[1], worker=False) as two,
        serving(judge, one, two),
    ):
        await until(lambda: known(one) and known(two))
        for left in [kept for kept in await one.steno.models() if not kept.workers]:  # by other tests of this Redis
            await one.steno.retire_model(left.name)
        await until(lambda: not two.app.state.hub.has_default())
        assert (await one.chat("away-a", "hello", model="gpt-5")).status_code == 200, "there is no other policy yet"
        [turn] = await one.turns("away-a")
        assert turn.served_model == JUDGE
        async with serving(actor, one):
            assert (await one.chat("away-b", "hello", model="gpt-5")).status_code == 200
            await until(lambda: known(two, "actor"))
        for trial_id, model in (("away-c", "gpt-5"), ("away-d", "")):
            refused = await one.chat(trial_id, "hello", model=model)
            assert refused.status_code == 503 and "'default'" in refused.text and refused.headers["retry-after"]
            assert await one.turns(trial_id) == []
        asked = {"model": "gpt-5", "messages": [{"role": "user", "content": "hello"}]}
        for path, why in (("/away-c/v1/messages/count_tokens", "can count"), ("/away-c/tokenize", "'default'")):
            counted = await one.http.post(path, json=asked)
            assert counted.status_code == 503 and why in counted.text, "another model's tokenizer says nothing of it"
        shown = (await one.http.get("/away-c/v1/models/gpt-5")).json()
        assert (shown["id"], shown["max_model_len"]) == ("gpt-5", None)
        assert (await one.chat("away-e", "hello", model=JUDGE)).status_code == 200
        async with running(store=stores[2], worker=False, queue_s=0.2) as restarted, serving(judge, restarted):
            assert (await restarted.chat("away-f", "hello", model="gpt-5")).status_code == 503, "it is in the store"
        waiting = asyncio.create_task(two.chat("away-g", "hello", model="gpt-5"))
        await until(lambda: len(two.app.state.hub.waiting) == 1)
        assert (await two.chat("away-h", "hello", model=JUDGE)).status_code == 200, "nobody else waits for it"
        async with serving(actor, two):
            assert (await waiting).status_code == 200
        assert [turn.served_model for trial in "bg" for turn in await two.turns(f"away-{trial}")] == ["actor", "actor"]
        assert {one.name: one.policy for one in await two.steno.models()} == {"actor": "default", JUDGE: "frozen"}
        waiting = asyncio.create_task(two.chat("away-i", "hello", model="gpt-5"))
        await until(lambda: len(two.app.state.hub.waiting) == 1)
        await one.steno.retire_model("actor")
        assert (await waiting).status_code == 200, "no model is of the default policy any more"
        [turn] = await two.turns("away-i")
        assert (turn.served_model, turn.policy) == (JUDGE, "frozen")


async def test_who_waits_for_a_model_without_any_worker_is_told_at_once_when_it_is_retired() -> None:
    async with running(worker=False) as proxy:
        async with serving(ParrotEngine(name="actor"), proxy):
            assert (await proxy.chat("a", "hello", model="gpt-5")).status_code == 200
        waiting = [asyncio.create_task(proxy.chat(name, "hello", model=name)) for name in ("actor", "gpt-5")]
        await until(lambda: len(proxy.app.state.hub.waiting) == 2)
        await proxy.steno.retire_model("actor")
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [503, 503]


async def test_tokens_are_counted_by_the_model_that_is_named() -> None:
    said = [{"role": "user", "content": "hello"}]

    async def counts(model: str) -> list[int]:
        found = []
        for path, body, field in (
            ("messages/count_tokens", {"model": model, "messages": said}, "input_tokens"),
            ("responses/input_tokens", {"model": model, "input": said}, "input_tokens"),
            (f"models/{model}:countTokens", {"contents": {"parts": [{"text": "hello"}]}}, "totalTokens"),
        ):
            answer = await proxy.http.post(f"/a/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            found.append(answer.json()[field])
        return found

    actor, judge = CountingParrot(7, name="actor"), CountingParrot(11, name=JUDGE, policy="frozen")
    async with running(worker=False) as proxy:
        async with serving(actor, proxy):
            async with serving(judge, proxy):
                assert [await counts(name) for name in (JUDGE, "actor", "gpt-5")] == [[11] * 3, [7] * 3, [7] * 3]
            refused = await proxy.http.post("/a/v1/messages/count_tokens", json={"model": JUDGE, "messages": said})
            assert refused.status_code == 503 and f"no worker serves the model '{JUDGE}'" in refused.text
        async with serving(judge, proxy):
            assert await counts(JUDGE) == [11] * 3, "the other model is away, and nobody asks for it"
