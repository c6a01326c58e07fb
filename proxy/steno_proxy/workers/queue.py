"""Queue of turns that wait for a worker: bounded, each with a deadline, fair across trials.

Trials take turns: a trial that asks for a hundred completions at once delays a single one of another trial by one. A request
that can't be placed holds up neither its trial's requests for other routes nor other trials. Turns whose worker was lost (I9) go
first. This module owns no places and chooses no worker: each waiter brings a function that takes a place, or says why there is
none yet. Single-threaded; costs nothing while nobody waits. A pass over the queue tries each route once, and once more for each
place that it gives.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from steno.contracts.errors import StenoError, TooManyRequests
from steno_proxy.workers.placement import WorkersAway

T = TypeVar("T")
NOT_YET = (TooManyRequests, WorkersAway)
"""What a waiter's function raises while there is no place. Anything else ends the wait."""
MOST_LANES = 8
"""Lanes of one trial, one for each route. Requests for more routes share one more lane, of which only the first is tried: each
route makes every pass over the queue longer, and an agent may ask for as many as it likes (I8)."""
_OTHERS = object()
"""Key of that lane."""


@dataclass(eq=False, slots=True)
class _Waiter(Generic[T]):
    """route: what it needs of a worker; if one waiter is refused, so are all of its route. refusal: its own last refusal.
    number: how many waiters came before. lane: None for an urgent one."""

    route: Hashable
    take: Callable[[], T]
    placed: asyncio.Future[T]
    refusal: StenoError
    number: int
    lane: _Lane[T] | None = None


@dataclass(eq=False, slots=True)
class _Lane(Generic[T]):
    """The waiters of one trial with one route, the oldest first; never empty. key: this route; _OTHERS: the lane is shared."""

    trial_id: str
    key: Hashable
    waiters: deque[_Waiter[T]] = field(default_factory=deque)


class WaitQueue(Generic[T]):
    """Requests that wait for a worker with a place for them; trials take turns.

    Args: most: how many may wait; urgent ones are not counted. unwanted: gives back what was taken for one that has left.
    """

    def __init__(self, most: int, unwanted: Callable[[T], None]) -> None:
        self._most = most
        self._unwanted = unwanted
        self._urgent: deque[_Waiter[T]] = deque()
        self._lanes: OrderedDict[_Lane[T], None] = OrderedDict()  # in the order of their turns
        self._trials: dict[str, dict[Hashable, _Lane[T]]] = {}
        self._routes: Counter[Hashable] = Counter()
        self._refusals: dict[Hashable, StenoError] = {}  # the last of each route, told to all who wait for it
        self._numbers = itertools.count()
        self._count = 0
        self._serving = False

    def __len__(self) -> int:
        return self._count + len(self._urgent)

    def ahead(self, route: Hashable) -> bool:
        """Whether requests that are not urgent wait for this route."""
        return self._routes[route] > 0

    async def wait(
        self, trial_id: str, route: Hashable, take: Callable[[], T], refusal: StenoError, *, timeout_s: float,
        urgent: bool = False, tried: bool = True,
    ) -> T:  # fmt: skip
        """Wait until `take` gives something. Cancel-safe: what was taken in the same moment is given to `unwanted`.

        Args: tried: `take` was called just now, and raised `refusal`. Else it is called soon, in its turn.
        Raises: TooManyRequests: too many wait already. At the deadline, the last refusal of its route. What else `take` raises.
        """
        if not urgent and self._count >= self._most:
            raise TooManyRequests(f"every worker is busy, and the queue is full: max_waiting is {self._most}")
        placed: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(route, take, placed, refusal, next(self._numbers))
        self._add(trial_id, waiter, urgent)
        if not tried:
            self.wake()
        elif not urgent:
            self._refusals[route] = copy.copy(refusal)
        try:
            await asyncio.wait({waiter.placed}, timeout=timeout_s)
        except asyncio.CancelledError:
            if waiter.placed.done() and waiter.placed.exception() is None:
                self._unwanted(waiter.placed.result())
            raise
        finally:
            told = waiter.refusal if urgent else self._refusals.get(route, waiter.refusal)
            self._remove(waiter)
        if waiter.placed.done():
            return waiter.placed.result()
        raise copy.copy(told)

    def dismiss(self, why: Callable[[], StenoError]) -> None:
        """End the wait of every request that waits now and is not urgent, with the error that `why` makes."""
        for lane in self._lanes:
            for waiter in lane.waiters:
                if not waiter.placed.done():
                    waiter.placed.set_exception(why())

    def wake(self) -> None:
        """Say that there may be a place. Waiters are tried soon, once for all calls in this turn of the event loop."""
        if not self._serving and (self._lanes or self._urgent):
            self._serving = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._serving = False
        refused: set[Hashable] = set()
        for waiter in list(self._urgent):
            if self._try(waiter, set()):  # what they need is their own: a refusal says nothing of others
                self._urgent.remove(waiter)
        placed = True
        while placed:
            served: set[str] = set()
            for lane in list(self._lanes):
                if refused >= self._routes.keys():
                    return
                if lane.trial_id in served or lane.waiters[0].route in refused:
                    continue
                if self._try(lane.waiters[0], refused):
                    served.add(lane.trial_id)
                    self._pop(lane, refused)
            placed = bool(served)

    def _try(self, waiter: _Waiter[T], refused: set[Hashable]) -> bool:
        """Whether this waiter's wait is over."""
        if waiter.placed.done():
            return True
        try:
            waiter.placed.set_result(waiter.take())
        except NOT_YET as refusal:
            if waiter.lane is None:
                waiter.refusal = refusal
            else:
                self._refusals[waiter.route] = copy.copy(refusal)  # without the frames of this one's request
            refused.add(waiter.route)
            return False
        except StenoError as error:
            waiter.placed.set_exception(error)
        return True

    def _add(self, trial_id: str, waiter: _Waiter[T], urgent: bool) -> None:
        if urgent:
            self._urgent.append(waiter)
            return
        lanes = self._trials.setdefault(trial_id, {})
        key = waiter.route if waiter.route in lanes or len(lanes) < MOST_LANES else _OTHERS
        if key not in lanes:
            lanes[key] = _Lane(trial_id, key)
            self._lanes[lanes[key]] = None
        waiter.lane = lanes[key]
        waiter.lane.waiters.append(waiter)
        self._routes[waiter.route] += 1
        self._count += 1

    def _pop(self, lane: _Lane[T], refused: set[Hashable]) -> None:
        """Remove the first of this lane, which has had its trial's turn. The trial's lanes go behind those of all other trials,
        the oldest first. Lanes whose route was refused keep their turn: they could not have used the free place."""
        self._forget(lane, lane.waiters[0])
        left = [one for one in self._trials.get(lane.trial_id, {}).values() if one.waiters[0].route not in refused]
        for one in sorted(left, key=lambda one: one.waiters[0].number):
            self._lanes.move_to_end(one)

    def _remove(self, waiter: _Waiter[T]) -> None:
        if waiter.lane is None:
            if waiter in self._urgent:
                self._urgent.remove(waiter)
        elif waiter in waiter.lane.waiters:
            self._forget(waiter.lane, waiter)
            self.wake()  # what was refused may have been so for this one's sake

    def _forget(self, lane: _Lane[T], waiter: _Waiter[T]) -> None:
        lane.waiters.remove(waiter)
        self._count -= 1
        self._routes[waiter.route] -= 1
        if not self._routes[waiter.route]:
            del self._routes[waiter.route]
            self._refusals.pop(waiter.route, None)
        if not lane.waiters:
            del self._lanes[lane]
            del self._trials[lane.trial_id][lane.key]
            if not self._trials[lane.trial_id]:
                del self._trials[lane.trial_id]
