"""Turns that wait for a place: in turn by trial, bounded, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from steno.contracts.errors import BadRequest, NoWorker, TooManyRequests
from steno_proxy.workers.placement import WorkersAway
from steno_proxy.workers.queue import WaitQueue

FULL = TooManyRequests("full")


class Places:
    """So many free places by route; what was taken, in order."""

    def __init__(self, **free: int) -> None:
        self.free = free
        self.taken: list[str] = []
        self.given_back: list[str] = []
        self.queue: WaitQueue[str] = WaitQueue(100, self.given_back.append)

    def take(self, name: str, route: str) -> Callable[[], str]:
        def take() -> str:
            if not self.free.get(route):
                raise FULL
            self.free[route] -= 1
            self.taken.append(name)
            return name

        return take

    def wait(self, name: str, route: str = "r", *, timeout_s: float = 60, urgent: bool = False) -> asyncio.Task[str]:
        """name: trial and number, `a1`."""
        waits = self.queue.wait(name[0], route, self.take(name, route), FULL, timeout_s=timeout_s, urgent=urgent)
        return asyncio.create_task(waits)

    async def let_in(self, count: int = 1, route: str = "r") -> None:
        for _ in range(count):
            self.free[route] = self.free.get(route, 0) + 1
            self.queue.wake()
            await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_trials_take_turns_however_many_each_has() -> None:
    places = Places()
    tasks = [places.wait(name) for name in ("a1", "a2", "a3", "a4", "b1", "c1", "c2")]
    await settle()
    await places.let_in(7)
    assert places.taken == ["a1", "b1", "c1", "a2", "c2", "a3", "a4"]
    assert await asyncio.gather(*tasks) == ["a1", "a2", "a3", "a4", "b1", "c1", "c2"]
    assert not places.queue


async def test_several_places_at_once_go_round_too() -> None:
    places = Places()
    tasks = [places.wait(name) for name in ("a1", "a2", "b1")]
    await settle()
    places.free["r"] = 2
    places.queue.wake()
    await settle()
    assert places.taken == ["a1", "b1"]
    await places.let_in()
    await asyncio.gather(*tasks)


async def test_what_was_begun_goes_first() -> None:
    places = Places()
    tasks = [places.wait("a1"), places.wait("z1", urgent=True)]
    await settle()
    await places.let_in(2)
    assert places.taken == ["z1", "a1"]
    await asyncio.gather(*tasks)


async def test_a_full_model_holds_up_nobody_who_wants_another() -> None:
    places = Places()
    tasks = [places.wait("a1", "full"), places.wait("b1", "full"), places.wait("c1", "free")]
    await settle()
    assert places.queue.ahead("free") and not places.queue.ahead("other")
    await places.let_in(route="free")
    assert places.taken == ["c1"] and not places.queue.ahead("free")
    await places.let_in(2, route="full")
    assert await asyncio.gather(*tasks) == ["a1", "b1", "c1"]


async def test_at_the_deadline_it_is_told_the_last_reason() -> None:
    queue: WaitQueue[str] = WaitQueue(1, lambda taken: None)
    reasons = [WorkersAway("no worker is there"), WorkersAway("still none")]

    def take() -> str:
        raise reasons.pop(0)

    task = asyncio.create_task(queue.wait("a", "r", take, FULL, timeout_s=1.0))
    await settle()
    queue.wake()
    with pytest.raises(NoWorker, match="no worker is there"):
        await task
    assert not queue and not queue.ahead("r")


async def test_more_than_may_wait_are_refused_at_once_but_for_what_was_begun() -> None:
    queue: WaitQueue[str] = WaitQueue(1, lambda taken: None)

    def never() -> str:
        raise FULL

    first = asyncio.create_task(queue.wait("a", "r", never, FULL, timeout_s=60))
    await settle()
    with pytest.raises(TooManyRequests, match="the queue is full"):
        await queue.wait("b", "r", never, FULL, timeout_s=60)
    begun = asyncio.create_task(queue.wait("b", "r", never, FULL, timeout_s=60, urgent=True))
    await settle()
    assert len(queue) == 2
    for task in (first, begun):
        task.cancel()
    await asyncio.gather(first, begun, return_exceptions=True)
    assert not queue


async def test_another_error_ends_the_wait_and_nobody_elses() -> None:
    places = Places()

    def refuse() -> str:
        raise BadRequest("too long")

    task = asyncio.create_task(places.queue.wait("a", "r", refuse, FULL, timeout_s=60))
    other = places.wait("b1")
    await settle()
    await places.let_in()
    with pytest.raises(BadRequest):
        await task
    assert await other == "b1"


async def test_one_that_leaves_gives_back_what_it_was_given_in_the_same_moment() -> None:
    places = Places()
    task = places.wait("a1")
    await settle()
    places.free["r"] = 1
    places.queue.wake()
    await asyncio.sleep(0)  # served, and not yet resumed
    assert places.taken == ["a1"]
    task.cancel()
    await settle()
    assert task.cancelled() and places.given_back == ["a1"]
    gone = places.wait("b1")
    await settle()
    gone.cancel()
    await settle()
    await places.let_in()
    assert places.taken == ["a1"] and not places.queue
