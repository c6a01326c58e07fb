"""More requests than the workers run at once: they wait in turn, not for ever, and are refused before any byte."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from steno.contracts.errors import StoreUnavailable
from steno.contracts.rest import Completion
from steno.contracts.wire.frames import Generate
from steno_proxy.store.memory.store import MemoryStore
from steno_worker.config import WorkerSettings
from steno_worker.main import Worker
from steno_worker.metrics import WorkerMetrics
from tests.integration.http.conftest import Proxy, running
from tests.support.records.tokens import counters
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

KINDS = ("received", "completion", "unrecorded", "late")
AT_ONCE = 2  # of a worker that runs one: the next is at hand


class Gated(ParrotEngine):
    """Every completion waits until the test lets it go. begun: trials, in order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = asyncio.Event()
        super().__init__(self._say)

    def _say(self, request: Generate) -> Say:
        self.begun.append(request.trial_id)
        return Say("ab", gates={0: self.gate})


@contextlib.asynccontextmanager
async def busy(*, streams: int = 1, **settings: Any) -> AsyncIterator[tuple[Proxy, Gated]]:
    """A proxy with a worker that runs so many turns at a time."""
    engine = Gated()
    async with running(engine, worker=False, **settings) as proxy:
        given = WorkerSettings(proxy=[f"ws://127.0.0.1:{proxy.port}"], max_streams=streams)
        worker = Worker(given, engine, WorkerMetrics(CollectorRegistry()))
        task = asyncio.create_task(worker.run())
        await until(lambda: proxy.app.state.hub.cards())
        try:
            yield proxy, engine
        finally:
            engine.gate.set()
            worker.stop()
            worker.stop()
            await task


def ask(proxy: Proxy, trial: str, **fields: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(proxy.chat(trial, "hello", **fields))


def waiting(proxy: Proxy) -> int:
    return len(proxy.app.state.hub.waiting)


async def test_who_waits_is_known_to_its_session_however_little_is_remembered_of_others() -> None:
    async with busy() as (proxy, engine):
        gates = {trial: asyncio.Event() for trial in ("first", "t", "other")}

        def say(request: Generate) -> Say:
            engine.begun.append(request.trial_id)
            return Say("ab", gates={0: gates[request.trial_id]})

        engine.script = say
        proxy.app.state.turns.recorder._cache_bytes = 1
        first = [ask(proxy, "first") for _ in range(AT_ONCE)]
        await until(lambda: len(engine.begun) == AT_ONCE)
        late = ask(proxy, "t")
        await until(lambda: waiting(proxy) == 1)
        other = ask(proxy, "other")
        await until(lambda: waiting(proxy) == 2)
        gates["first"].set()
        await until(lambda: "t" in engine.begun)
        await proxy.http.post("/sessions/t/complete", json={"reward": 1.0})
        assert (await late).status_code == 410, "it is told, and does not go on to its end"
        gates["other"].set()
        assert {answer.status_code for answer in await asyncio.gather(*first, other)} == {200}


async def test_those_that_waited_have_no_more_turns_than_their_trial_may() -> None:
    async with busy(streams=6) as (proxy, engine):
        await proxy.http.post("/sessions/t", json={"limits": {"max_turns": 2}})
        gates = {trial: asyncio.Event() for trial in ("first", "t")}
        engine.script = lambda request: Say("ab", gates={0: gates[request.trial_id]})
        first = [ask(proxy, "first") for _ in range(20)]
        await until(lambda: waiting(proxy) > 0)
        late = [ask(proxy, "t") for _ in range(10)]
        await until(lambda: waiting(proxy) > 10)
        gates["first"].set()
        done, running = await asyncio.wait(late, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        while len(running) > 2:
            done, running = await asyncio.wait(running, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert done, "more than two run"
        gates["t"].set()
        assert Counter([answer.status_code for answer in await asyncio.gather(*late)])[200] == 2
        await asyncio.gather(*first)
        assert len(await proxy.turns("t")) == 2


async def test_a_trial_that_waits_for_a_place_is_not_idle() -> None:
    async with busy() as (proxy, engine):
        await proxy.http.post("/sessions/t", json={"limits": {"max_idle_s": 1000.0}})
        engine.script = lambda request: Say("ab")
        await proxy.chat("t", "idle time counts from a first turn")
        engine.script = engine._say
        first = [ask(proxy, "first") for _ in range(AT_ONCE)]
        await until(lambda: len(engine.begun) == AT_ONCE)
        late = ask(proxy, "t")
        await until(lambda: waiting(proxy) == 1)
        recorder = proxy.app.state.turns.recorder
        recorder._clock = lambda: time.time() + 2000.0
        assert await recorder.end_timed_out() == 0
        engine.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*first, late)} == {200}


async def test_they_wait_at_the_proxy_and_trials_take_turns() -> None:
    async with busy() as (proxy, engine):
        first = [ask(proxy, "first") for _ in range(AT_ONCE)]
        await until(lambda: len(engine.begun) == AT_ONCE)
        many = [ask(proxy, "many") for _ in range(4)]
        await until(lambda: waiting(proxy) == 4)
        one = ask(proxy, "one")
        await until(lambda: waiting(proxy) == 5)
        engine.gate.set()
        answers = await asyncio.gather(*first, *many, one)
        assert {answer.status_code for answer in answers} == {200}
        assert engine.begun[AT_ONCE : AT_ONCE + 2] == ["many", "one"]
        assert waiting(proxy) == 0
        assert len(await proxy.turns("many")) == 4


async def test_at_the_deadline_it_is_429_with_retry_after_and_nothing_on_record() -> None:
    async with busy(queue_s=0.1) as (proxy, engine):
        running_now = [ask(proxy, "a") for _ in range(AT_ONCE)]
        await until(lambda: len(engine.begun) == AT_ONCE)
        late = await ask(proxy, "late", stream=True)
        assert late.status_code == 429 and int(late.headers["retry-after"]) >= 1
        assert late.json()["error"]["code"] == "rate_limited"
        engine.gate.set()
        await asyncio.gather(*running_now)
        assert (await ask(proxy, "late")).status_code == 200
        [turn] = await proxy.turns("late")
        assert turn.fork_reason is None


async def test_more_than_may_wait_are_refused_at_once() -> None:
    async with busy(max_waiting=1) as (proxy, engine):
        tasks = [ask(proxy, "a") for _ in range(AT_ONCE)]
        await until(lambda: len(engine.begun) == AT_ONCE)
        tasks.append(ask(proxy, "b"))
        await until(lambda: waiting(proxy) == 1)
        assert (await ask(proxy, "c")).status_code == 429
        engine.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}


async def test_a_client_that_leaves_while_it_waits_takes_no_place() -> None:
    async with busy() as (proxy, engine):
        tasks = [ask(proxy, "a") for _ in range(AT_ONCE)]
        await until(lambda: len(engine.begun) == AT_ONCE)
        gone = ask(proxy, "gone")
        await until(lambda: waiting(proxy) == 1)
        gone.cancel()
        await until(lambda: waiting(proxy) == 0)
        engine.gate.set()
        await asyncio.gather(*tasks)
        assert "gone" not in engine.begun and not proxy.app.state.turns._running


async def test_the_retry_of_a_client_that_left_while_it_waited_is_no_retry_of_its_siblings() -> None:
    async with busy() as (proxy, engine):
        engine.script = lambda request: Say("one")
        assert (await ask(proxy, "t")).status_code == 200
        engine.script = engine._say
        others = [ask(proxy, "a") for _ in range(AT_ONCE)]
        await until(lambda: len(engine.begun) == AT_ONCE)
        gone = ask(proxy, "t")
        await until(lambda: waiting(proxy) == 1)
        gone.cancel()
        await until(lambda: not waiting(proxy))
        engine.gate.set()
        await asyncio.gather(*others)
        proxy.http.headers["x-stainless-retry-count"] = "1"
        assert (await ask(proxy, "t")).json()["choices"][0]["message"]["content"] == "ab"
        turns = await proxy.turns("t")
        assert [(turn.superseded_by, turn.retry_of) for turn in turns] == [(None, None)] * 2


async def test_a_request_for_a_model_that_is_away_holds_up_no_other_request() -> None:
    """I8: any agent may name a model that some worker has served."""
    store = MemoryStore()
    await store.policies.keep_names({"judge": "frozen"})
    async with busy(queue_s=300, store=store) as (proxy, engine):
        await until(lambda: "judge" in proxy.app.state.services.policies.names.all())
        first = [ask(proxy, "first") for _ in range(AT_ONCE)]
        await until(lambda: len(engine.begun) == AT_ONCE)
        stuck = ask(proxy, "t", model="judge")
        await until(lambda: waiting(proxy) == 1)
        behind = [ask(proxy, "t"), ask(proxy, "other")]
        await until(lambda: waiting(proxy) == 3)
        engine.gate.set()
        answers = await asyncio.wait_for(asyncio.gather(*first, *behind, ask(proxy, "late")), 60)
        assert {answer.status_code for answer in answers} == {200} and waiting(proxy) == 1
        stuck.cancel()
        await until(lambda: not waiting(proxy))


async def test_a_session_that_ends_while_its_request_waits_ends_the_request() -> None:
    async with busy() as (proxy, engine):
        tasks = [ask(proxy, "a") for _ in range(AT_ONCE)]
        await until(lambda: len(engine.begun) == AT_ONCE)
        queued = ask(proxy, "b")
        await until(lambda: waiting(proxy) == 1)
        await proxy.steno.complete("b", Completion(reward=1.0))
        engine.gate.set()
        assert (await queued).status_code == 410
        await asyncio.gather(*tasks)
        assert await proxy.turns("b") == []


async def test_all_choices_of_a_request_go_with_the_first() -> None:
    async with busy() as (proxy, engine):
        task = ask(proxy, "n", n=5)
        await until(lambda: len(engine.begun) == 5)
        engine.gate.set()
        assert len((await task).json()["choices"]) == 5


async def test_with_no_worker_at_all_it_is_503_at_once_and_one_that_is_away_is_waited_for() -> None:
    async with running(worker=False) as proxy:
        assert (await proxy.chat("t", "hello")).status_code == 503
    async with busy(queue_s=60) as (proxy, engine):
        hub = proxy.app.state.hub
        [worker] = hub._workers.values()
        engine.gate.set()
        worker.link.close(1001, "cut")  # its socket, not its channel: it comes back
        await until(lambda: not worker.eligible)
        assert (await proxy.chat("t", "hello")).status_code == 200


async def test_who_waits_at_a_proxy_that_is_told_to_stop_may_ask_another_one_at_once() -> None:
    async with busy(queue_s=300) as (proxy, engine):
        begun = [ask(proxy, f"begun-{number}") for number in range(AT_ONCE)]
        await until(lambda: len(engine.begun) == AT_ONCE)
        waiting = [ask(proxy, f"waits-{number}") for number in range(3)]
        await until(lambda: len(proxy.app.state.hub.waiting) == 3)
        draining = asyncio.create_task(proxy.app.state.turns.drain(60))
        refused = await asyncio.wait_for(asyncio.gather(*waiting), 60)
        assert {(one.status_code, one.json()["error"]["code"]) for one in refused} == {(503, "proxy_stopped")}
        assert all("retry-after" in one.headers for one in refused)
        engine.gate.set()
        assert [(await one).status_code for one in begun] == [200] * AT_ONCE, "what had begun goes on"
        await draining


class Slow(MemoryStore):
    """Once it is `slow`, answers nobody before the test says so. asked: how many wait."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.asked, self.gate = False, 0, asyncio.Event()

    async def tail(self, *args: Any, **kwargs: Any) -> Any:
        if self.slow:
            self.asked += 1
            await self.gate.wait()
        return await super().tail(*args, **kwargs)


async def test_who_has_got_its_place_and_asks_the_store_when_the_proxy_is_told_to_stop_is_not_begun_and_cut() -> None:
    store = Slow()
    async with busy(queue_s=300, store=store) as (proxy, engine):
        begun = [ask(proxy, f"begun-{number}") for number in range(AT_ONCE)]
        await until(lambda: len(engine.begun) == AT_ONCE)
        waits = ask(proxy, "waits")
        await until(lambda: waiting(proxy) == 1)
        store.slow = True
        engine.gate.set()
        assert [(await one).status_code for one in begun] == [200] * AT_ONCE
        await until(lambda: store.asked == 1)
        await proxy.app.state.turns.drain(60)
        store.gate.set()
        refused = await waits
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "proxy_stopped")
        assert await proxy.turns("waits") == []
        await until(lambda: [worker.in_flight for worker in proxy.app.state.hub.workers()] == [0])


class Forgetful(MemoryStore):
    """Answers nobody once it is `away`, and waits before it says so for `until` to be true."""

    away = False

    async def tail(self, *args: Any, **kwargs: Any) -> Any:
        if self.away:
            await until(self.until)
            raise StoreUnavailable("the store is away")
        return await super().tail(*args, **kwargs)

    def until(self) -> bool:
        return True


async def test_what_came_for_a_request_that_is_refused_once_it_has_its_place_is_counted_as_late() -> None:
    """I4."""
    store = Forgetful()
    async with busy(queue_s=300, store=store) as (proxy, engine):
        before = await asyncio.to_thread(counters, proxy.url + "/metrics")
        begun = [ask(proxy, f"begun-{number}") for number in range(AT_ONCE)]
        await until(lambda: len(engine.begun) == AT_ONCE)
        waiting = ask(proxy, "waits")
        await until(lambda: len(proxy.app.state.hub.waiting) == 1)
        store.away, store.until = True, lambda: proxy.app.state.hub.counts.tokens == 3 * (AT_ONCE + 1)
        engine.gate.set()
        assert (await waiting).status_code == 503
        assert [(await one).status_code for one in begun] == [200] * AT_ONCE
        after = await asyncio.to_thread(counters, proxy.url + "/metrics")
    grown = {kind: after[name] - before[name] for kind in KINDS for name in [f"steno_proxy_{kind}_tokens_total"]}
    assert grown == {"received": 9, "completion": 6, "unrecorded": 0, "late": 3}
