"""The clock of one replica is ahead of the store's: it ends no trial whose time is not over by the other."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from steno.contracts.errors import BudgetSpent, StenoError, StoreUnavailable
from steno.contracts.records import Limits, Session, Timings
from steno_proxy.dialects.openai.chat import ChatDialect
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.turns.request import Request
from tests.support.records.choices import Said
from tests.support.records.recordings import row, session, turn
from tests.unit.proxy.turns.test_answer_log import Reader

LIMITS = [Limits(max_wall_s=600.0), Limits(max_idle_s=600.0)]
AHEAD_S = 3600.0


class Timed(MemoryStore):
    """Its clock says `at`, and was set forward by `set_by_s`. asked: how often it was asked."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.at, self.set_by_s, self.asked = at, 0.0, 0

    async def now(self) -> float:
        self.asked += 1
        return self.at

    async def earliest(self) -> float:
        return await self.now() - self.set_by_s


async def begun(limits: Limits, at: float) -> Timed:
    store = Timed(at)
    await store.register(session("t", created_at=at, limits=limits))
    one = turn(0, timings=Timings(queued=at))
    await store.commit("t", one, row(one), now=at)
    return store


def recorder(store: Timed, ahead_s: float = 0.0) -> Recorder:
    return Recorder(store, cache_bytes=10**6, implicit=False, clock=lambda: store.at + ahead_s)


@pytest.mark.parametrize("limits", LIMITS, ids=["wall", "idle"])
async def test_a_replica_whose_clock_is_ahead_ends_no_trial_at_its_next_request(limits: Limits) -> None:
    store = await begun(limits, 1000.0)
    ahead = recorder(store, AHEAD_S)
    await ahead.enter("t")
    assert (await store.session("t")).status == "open" and store.asked == 1
    store.at += 600.0
    with pytest.raises(BudgetSpent):
        await ahead.enter("t")
    assert (await store.session("t")).status == "completed"
    await ahead.close()


async def test_nor_one_that_the_store_is_ahead_of_and_it_asks_only_where_time_seems_to_be_over() -> None:
    store = await begun(LIMITS[0], 1000.0)
    behind = recorder(store, -AHEAD_S)
    store.at += 700.0
    await behind.enter("t")
    assert (await store.session("t")).status == "open" and store.asked == 0


@pytest.mark.parametrize("limits", LIMITS, ids=["wall", "idle"])
async def test_nor_one_whose_stores_clock_was_set_forward(limits: Limits) -> None:
    """Or another Redis took over, whose clock is ahead."""
    store = await begun(limits, 1000.0)
    replica = recorder(store)
    store.set_by_s = AHEAD_S
    store.at += AHEAD_S
    await replica.enter("t")
    assert (await store.session("t")).status == "open" and await replica.end_timed_out(now=await store.earliest()) == 0
    store.at += 600.0
    with pytest.raises(BudgetSpent):
        await replica.enter("t")
    await replica.close()


class Runner(SimpleNamespace):
    """What a request needs of its service. ended: what it has ended. times: what its store's clock will say."""

    def __init__(self, *times: float | StenoError, clock: float = 10.0) -> None:
        super().__init__(recorder=self, store=self, clock=lambda: clock, times=list(times), ended=[])

    async def earliest(self) -> float:
        now = self.times.pop(0)
        if isinstance(now, StenoError):
            raise now
        return float(now)

    async def end(self, trial_id: str, spent: str) -> BudgetSpent:
        self.ended.append(spent)
        return BudgetSpent(spent)


async def running(runner: Runner, first_turn_at: float | None) -> Request:
    """A request that came at 10 s, of a trial that may take 10 s."""
    said = await Said.begin()
    found = Request(runner, said.choice._recording, ChatDialect(), said.choice.plan)  # type: ignore[arg-type]
    found.choices = [said.choice]
    found.recording.session = Session(
        trial_id="t", created_at=0.0, updated_at=0.0, first_turn_at=first_turn_at, limits=Limits(max_wall_s=10.0)
    )
    found.begin(Reader(), 10.0)
    return found


async def until_it_has_asked(found: Request) -> None:
    before = time.monotonic()
    while found._ending is None:
        assert time.monotonic() < before + 60
        await asyncio.sleep(0)
    ending, found._ending = found._ending, None
    await ending


async def test_the_wall_time_of_a_turn_that_runs_is_over_by_both_clocks() -> None:
    runner = Runner(9.98, 10.01)
    found = await running(runner, first_turn_at=0.001)
    await until_it_has_asked(found)
    assert runner.ended == [] and found._failure is None and runner.times == [10.01]
    await until_it_has_asked(found)
    assert runner.ended == ["max_wall_s"] and isinstance(found._failure, BudgetSpent)


async def test_a_request_that_has_ended_meanwhile_is_looked_at_no_more() -> None:
    runner = Runner(4.0)
    found = await running(runner, first_turn_at=0.001)
    timer = found._clock
    found.done.set()
    await until_it_has_asked(found)
    assert runner.ended == [] and found._clock is timer


async def test_a_first_turn_is_timed_from_its_request_on_whatever_any_clock_says() -> None:
    runner = Runner(clock=19.99)
    found = await running(runner, first_turn_at=None)
    await until_it_has_asked(found)
    assert runner.ended == ["max_wall_s"]


async def test_a_store_that_does_not_say_its_time_ends_the_request_alone() -> None:
    told: Any = StoreUnavailable("the store is away")
    runner = Runner(told)
    found = await running(runner, first_turn_at=0.001)
    await until_it_has_asked(found)
    assert runner.ended == [] and found._failure is told
