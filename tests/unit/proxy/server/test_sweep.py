"""What the proxy sees to by itself: one thing that fails, or never ends, keeps nothing else from being done."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from steno.contracts.errors import StoreUnavailable
from steno.contracts.records import Limits, Timings
from steno_proxy.config.settings import ProxySettings
from steno_proxy.server.sweep import TIGHT_S, Sweeper
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.store_capacity import StoreCapacity
from steno_proxy.store.memory.store import MemoryStore
from tests.support.contracts.list import ALL
from tests.support.records.recordings import row, session, turn
from tests.support.waiting import until

STEPS = ["look", "close_due", "expire", "end_timed_out"]
UNREADABLE = ValueError("a record that can't be read")


class Parts:
    """Store, runs, recorder, capacity and archiver in one. done: what was asked of them. failing: what each raises."""

    def __init__(self, **failing: Exception) -> None:
        self.done: list[str] = []
        self.told: dict[str, Any] = {}
        self.failing = failing
        self.runs = self
        self.tight = False
        self.hangs = asyncio.Event()

    async def _do(self, name: str) -> int:
        self.done.append(name)
        if name in self.failing:
            raise self.failing[name]
        return 0

    async def look(self) -> None:
        await self._do("look")

    async def close_due(self) -> int:
        return await self._do("close_due")

    async def expire(self, *, now: float, retention_s: float) -> int:
        self.told["expire"] = retention_s
        return await self._do("expire")

    async def earliest(self) -> float:
        return time.time()

    async def end_timed_out(self, *, now: float) -> int:
        return await self._do("end_timed_out")

    async def round(self, *, now: float, retention_s: float, early_s: float | None = None) -> int:
        self.told["round"] = retention_s, early_s
        await self._do("round")
        await self.hangs.wait()
        return 0

    def sweeper(self, archiver: bool = False, **settings: Any) -> Sweeper:
        part = cast(Any, self)
        return Sweeper(part, part, ProxySettings(**settings), part, part if archiver else None)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [UNREADABLE, StoreUnavailable("the store is away")], ids=["surprise", "expected"])
async def test_a_step_that_fails_stops_no_other_and_is_tried_again(
    step: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    parts = Parts(**{step: error})
    sweeper = parts.sweeper()
    await sweeper.sweep()
    await sweeper.sweep()
    assert parts.done == STEPS * 2
    assert len(caplog.records) == 2 and all(str(error) in caplog.text for _ in caplog.records)
    assert [record.exc_info is not None for record in caplog.records] == [error is UNREADABLE] * 2, "with its traceback"


async def test_it_goes_on_for_as_long_as_the_proxy_runs_whatever_fails() -> None:
    parts = Parts(**dict.fromkeys([*STEPS, "round"], UNREADABLE))
    tasks = parts.sweeper(archiver=True, sweep_s=0.001).start()
    await until(lambda: min(parts.done.count(name) for name in [*STEPS, "round"]) >= 3)
    assert not any(task.done() for task in tasks)
    await ended(tasks)


async def test_an_archive_whose_calls_never_return_holds_up_neither_the_sweep_nor_its_end() -> None:
    parts = Parts()
    tasks = parts.sweeper(archiver=True, sweep_s=0.001).start()
    await until(lambda: parts.done.count("end_timed_out") >= 3 and "round" in parts.done)
    assert parts.done.count("round") == 1, "it hangs"
    await ended(tasks)


async def ended(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=60)
    assert all(task.cancelled() for task in tasks)


async def test_what_is_past_its_retention_is_deleted_only_where_there_is_no_archive() -> None:
    for settings, archiver, deleted, archived in (
        ({}, False, float("inf"), None),
        ({"retention_s": 5.0}, False, 5.0, None),
        ({}, True, float("inf"), 86400.0),
        ({"retention_s": 3600.0}, True, float("inf"), 3600.0),
    ):
        parts = Parts()
        parts.hangs.set()
        sweeper = parts.sweeper(archiver, **settings)
        await sweeper.sweep()
        assert parts.told == {"expire": deleted}
        if archiver:
            await sweeper.archive()
            assert parts.told["round"] == (archived, None)
            parts.tight = True
            await sweeper.archive()
            assert parts.told["round"] == (archived, TIGHT_S)


@pytest.mark.parametrize(("here_s", "store_s"), [(172_800.0, 0.0), (0.0, 172_800.0)], ids=["ours", "the store's"])
async def test_a_clock_that_is_ahead_deletes_nothing_and_this_machines_ends_nothing(
    here_s: float, store_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    class Ahead(MemoryStore):
        async def now(self) -> float:
            return time.time() + store_s

    store, now = Ahead(), time.time()
    recorder = Recorder(store, cache_bytes=10**6, implicit=False)
    for trial_id in ("ended", "open"):
        await store.register(session(trial_id, created_at=now, limits=Limits(max_wall_s=3600.0)))
        one = turn(0, timings=Timings(queued=now))
        await store.commit(trial_id, one, row(one), now=now)
    await store.complete("ended", status="completed", reward=1.0, end_reason="", metrics={}, now=now)
    settings = ProxySettings(retention_s=86_400.0)
    ahead = Sweeper(store, recorder, settings, StoreCapacity(store), None, clock=lambda: time.time() + here_s)
    await ahead.sweep()
    assert (await store.session("ended")).status == "completed"
    assert (await store.session("open")).status == ("completed" if store_s else "open"), "time limits are the store's"
    assert "clock of this process is 172800 s" in caplog.text
    later = Sweeper(store, recorder, settings, StoreCapacity(store), None, clock=lambda: now + 172_800.0)
    store.now = lambda: asyncio.sleep(0, now + 172_800.0)  # type: ignore[method-assign]
    await later.sweep()
    left = [found.trial_id for found in (await store.list_sessions(**ALL)).items]
    assert left == ([] if store_s else ["open"])
    if not store_s:
        assert (await store.session("open")).end_reason == "limit:max_wall_s"
