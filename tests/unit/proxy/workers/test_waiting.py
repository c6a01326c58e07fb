"""Turns that wait for a place: in turn by trial, bounded, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from steno.contracts.errors import BadRequest, NoWorker, TooManyRequests
from steno_proxy.workers.placement import WorkersAway
from steno_proxy.workers.queue import MOST_LANES, WaitQueue

FULL = TooManyRequests("full")


class Places:
    """So many free places by route; what was taken, in order."""

    def __init__(self, **free: int) -> None:
        self.free = free
        self.taken: list[str] = []
        self.given_back: list[str] = []
        self.asked = 0  # times that a place was asked for
        self.queue: WaitQueue[str] = WaitQueue(100, self.given_back.append)

    def take(self, name: str, route: str) -> Callable[[], str]:
        def take() -> str:
            self.asked += 1
            if not self.free.get(route):
                raise FULL
            self.free[route] -= 1
            self.taken.append(name)
            return name

        return take

    def wait(self, name: str, route: str = "r", needs: str = "", **options: bool) -> asyncio.Task[str]:
        """name: trial and number, `a1`. needs: makes another route of it, to the same places."""
        waits = self.queue.wait(name[0], route + needs, self.take(name, route), FULL, timeout_s=60, **options)
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


async def test_what_a_trial_can_not_have_holds_up_nothing_else_of_it_nor_of_others() -> None:
    places = Places()
    stuck = places.wait("a1", "away")
    await settle()
    tasks = [places.wait("a2", "judge"), places.wait("b1", "judge")]
    await settle()
    await places.let_in(2, route="judge")
    assert places.taken == ["a2", "b1"] and not places.queue.ahead("judge")
    late = places.wait("a3", "judge", tried=False)
    await places.let_in(route="judge")
    assert await asyncio.gather(*tasks, late) == ["a2", "b1", "a3"] and not stuck.done()
    await places.let_in(route="away")
    assert await stuck == "a1"


async def test_who_comes_behind_others_untried_is_tried() -> None:
    """Whatever was free when it came and was not heard of: nothing else may wake it for seconds."""
    places = Places()
    tasks = [places.wait("a1")]
    await settle()
    places.free["r"] = 2
    tasks.append(places.wait("b1", tried=False))
    await settle()
    assert await asyncio.gather(*tasks) == places.taken == ["a1", "b1"]


async def test_one_that_leaves_lets_those_behind_it_be_tried() -> None:
    places = Places(r=1)

    def refuse() -> str:
        raise FULL  # for a reason of its own: it avoids the worker that is free, say

    first = asyncio.create_task(places.queue.wait("a", "r", refuse, FULL, timeout_s=60))
    await settle()
    second = places.wait("b1", tried=False)
    await settle()
    assert not places.taken, "where one is refused, all of the same route are"
    first.cancel()
    await settle()
    assert await second == "b1"


async def test_what_a_trial_was_given_is_no_turn_of_it_where_that_was_of_no_use() -> None:
    """Else one that asks much of one model would never get its turn at another."""
    places = Places()
    tasks = [places.wait("a1", "busy"), places.wait("b1", "busy"), places.wait("a2", "idle"), places.wait("a3", "idle")]
    await settle()
    await places.let_in(2, route="idle")
    await places.let_in(2, route="busy")
    assert places.taken == ["a2", "a3", "a1", "b1"]
    await asyncio.gather(*tasks)


async def test_a_trial_that_needs_many_things_gets_no_more_turns_than_others() -> None:
    places = Places()
    names = [("a1", "x"), ("b1", "x"), ("a2", "y"), ("c1", "x"), ("a3", "z"), ("a4", "x"), ("b2", "x")]
    tasks = [places.wait(name, needs=needs) for name, needs in names]
    await settle()
    await places.let_in(3)
    places.free["r"] = 4
    places.queue.wake()
    await settle()
    assert places.taken == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"], "and each trial's own as they came"
    await asyncio.gather(*tasks)
    assert not places.queue and not places.queue.ahead("rx")


async def test_a_look_at_the_queue_asks_little_whatever_a_trial_asked_for() -> None:
    """I8: what an agent asks for is its own to choose."""
    places = Places()
    tasks = [places.wait("a1", f"route-{number}") for number in range(50)]
    tasks += [places.wait("b1"), places.wait("c1"), places.wait("d1")]
    await settle()
    places.queue.wake()
    await settle()
    assert places.asked == MOST_LANES + 2, "each lane's first, and one of the route that three trials wait for"
    for number in reversed(range(50)):
        await places.let_in(route=f"route-{number}")
    await places.let_in(3)
    assert all(task.done() for task in tasks) and not places.queue


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


async def test_and_so_are_all_who_waited_for_the_same() -> None:
    """The only worker of their model is away: of those that wait, the first alone is tried at each look."""
    queue: WaitQueue[str] = WaitQueue(100, lambda taken: None)

    def away() -> str:
        raise WorkersAway("no worker is there")

    def busy() -> str:
        raise FULL

    tasks = [
        asyncio.create_task(queue.wait(trial, route, take, FULL, timeout_s=0.2, tried=number == 0))
        for number, (trial, route, take) in enumerate([(t, "away", away) for t in "aabcd"] + [("e", "busy", busy)])
    ]
    await settle()
    queue.wake()
    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert [(type(one), str(one)) for one in told[:-1]] == [(WorkersAway, "no worker is there")] * 5
    assert isinstance(told[-1], TooManyRequests) and len({id(one) for one in told}) == 6, "each an error of its own"
    assert not queue and not queue._refusals


async def test_more_than_may_wait_are_refused_at_once_but_for_what_was_begun() -> None:
    queue: WaitQueue[str] = WaitQueue(1, lambda taken: None)

    def never() -> str:
        raise FULL

    first = asyncio.create_task(queue.wait("a", "r", never, FULL, timeout_s=60))
    await settle()
    with pytest.raises(TooManyRequests, match="the queue is full: max_waiting is 1"):
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
