"""Waiting for groups: at once when there are enough, at the end with what there is, and asleep in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from steno.contracts.runs.leases import LeaseRequest
from steno_proxy.api import lease_wait
from steno_proxy.store.memory.store import MemoryStore
from tests.support.records.groups import RUN, end, finished, group, speak


class Counting(MemoryStore):
    """Counts how often somebody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        lease = self.runs.lease

        async def counted(*args: Any, **options: Any) -> Any:
            self.looks += 1
            return await lease(*args, **options)

        self.runs.lease = counted  # type: ignore[method-assign]


@pytest.fixture
def store() -> Iterator[Counting]:
    yield Counting()


async def stays() -> bool:
    return False


async def lease(
    store: MemoryStore,
    *,
    gone: Any = stays,
    clock: Any = lambda: 20.0,
    stopping: asyncio.Event | None = None,
    **fields: Any,
) -> list[str]:
    request = LeaseRequest(run_id=RUN, consumer="t", **fields)
    return [one.group.group_id for one in await lease_wait.lease(store.runs, request, gone, clock, stopping)]


async def test_enough_are_answered_at_once(store: Counting) -> None:
    await finished(store, "a")
    await finished(store, "b")
    assert await lease(store, max_groups=2, wait_s=60) == ["a", "b"]
    assert await lease(store) == []
    assert store.looks == 2


async def test_fewer_are_answered_after_the_wait(store: Counting) -> None:
    await finished(store, "a")
    assert await lease(store, max_groups=2, wait_s=0.01) == ["a"]


async def test_who_waits_sleeps_until_a_group_gets_ready(store: Counting) -> None:
    await group(store, "g", 1)
    await speak(store, "g.0", 5)
    waiting = [asyncio.ensure_future(lease(store, wait_s=60)) for _ in range(3)]
    while store.looks < 3:
        await asyncio.sleep(0)
    await end(store, "g.0")
    done, still = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    assert [task.result() for task in done] == [["g"]]
    assert store.looks <= 6
    for task in still:
        task.cancel()
    await asyncio.wait(still)
    with store.runs.watch(RUN):
        assert len(store.runs._waiters) == 1, "who gave up is forgotten"


async def test_a_deadline_wakes_without_anybodys_doing(store: Counting) -> None:
    await group(store, "g", 2, deadline_s=30.0)
    await speak(store, "g.0", 5)
    await end(store, "g.0")
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await lease(store, wait_s=60, clock=lambda: 36.9 + loop.time() - began) == ["g"]


async def test_nothing_is_granted_to_a_caller_that_has_left(store: Counting) -> None:
    async def gone() -> bool:
        return True

    waiting = asyncio.ensure_future(lease(store, wait_s=60, gone=gone))
    while not store.looks:
        await asyncio.sleep(0)
    await finished(store, "g")
    assert await asyncio.wait_for(waiting, 30) == []
    assert await lease(store) == ["g"]


async def test_a_proxy_that_stops_answers_who_waits_with_what_there_is(store: Counting) -> None:
    await finished(store, "a")
    stopping = asyncio.Event()
    waiting = asyncio.create_task(lease(store, max_groups=2, wait_s=60, stopping=stopping))
    while not store.looks:
        await asyncio.sleep(0)
    stopping.set()
    assert await asyncio.wait_for(waiting, 30) == ["a"]
    assert await asyncio.wait_for(lease(store, wait_s=60, stopping=stopping), 30) == []
