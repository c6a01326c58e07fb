"""Queue of turns that wait for a worker: bounded, each with a deadline, fair across trials.

Trials take turns: one that asks for a hundred completions at once delays another's single one by one. What waits because its
worker was lost (I9) goes first. Owns no places and chooses no worker: each waiter brings a function that takes a place, or says
why there is none yet. Single-threaded; nothing here costs anything while nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from steno.contracts.errors import StenoError, TooManyRequests
from steno_proxy.workers.placement import WorkersAway

T = TypeVar("T")
NOT_YET = (TooManyRequests, WorkersAway)
"""What a waiter's function raises while there is no place. Anything else ends the wait."""


@dataclass(eq=False, slots=True)
class _Waiter(Generic[T]):
    """route: what it needs; where it is refused, all of the same route are. refusal: the last one, for its deadline."""

    route: Hashable
    take: Callable[[], T]
    placed: asyncio.Future[T]
    refusal: StenoError


class WaitQueue(Generic[T]):
    """Requests that wait for a worker with a place for them; trials take turns.

    Args: most: how many may wait; urgent ones are not counted. unwanted: gives back what was taken for one that has left.
    """

    def __init__(self, most: int, unwanted: Callable[[T], None]) -> None:
        self._most = most
        self._unwanted = unwanted
        self._urgent: deque[_Waiter[T]] = deque()
        self._trials: OrderedDict[str, deque[_Waiter[T]]] = OrderedDict()
        self._routes: Counter[Hashable] = Counter()
        self._count = 0
        self._serving = False

    def __len__(self) -> int:
        return self._count + len(self._urgent)

    def ahead(self, route: Hashable) -> bool:
        """Whether others wait for the same."""
        return self._routes[route] > 0

    async def wait(
        self, trial_id: str, route: Hashable, take: Callable[[], T], refusal: StenoError, *, timeout_s: float,
        urgent: bool = False,
    ) -> T:  # fmt: skip
        """Wait until `take` gives something. Cancel-safe: what was taken in the same moment is given to `unwanted`.

        Raises: TooManyRequests: too many wait already. At the deadline, the last refusal. What else `take` raises.
        """
        if not urgent and self._count >= self._most:
            raise TooManyRequests("every worker is busy, and the queue is full (max_waiting)")
        placed: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(route, take, placed, refusal)
        self._add(trial_id, waiter, urgent)
        try:
            await asyncio.wait({waiter.placed}, timeout=timeout_s)
        except asyncio.CancelledError:
            if waiter.placed.done() and waiter.placed.exception() is None:
                self._unwanted(waiter.placed.result())
            raise
        finally:
            self._remove(trial_id, waiter)
        if waiter.placed.done():
            return waiter.placed.result()
        raise waiter.refusal

    def dismiss(self, why: Callable[[], StenoError]) -> None:
        """Nobody but those who are urgent gets a place any more: who waits is told why."""
        for waiters in self._trials.values():
            for waiter in waiters:
                if not waiter.placed.done():
                    waiter.placed.set_exception(why())

    def wake(self) -> None:
        """There may be a place. Tried soon, once for all that happens in this turn of the event loop."""
        if not self._serving and (self._trials or self._urgent):
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
            placed = False
            for trial_id in list(self._trials):
                if refused >= self._routes.keys():
                    return
                waiters = self._trials[trial_id]
                if waiters[0].route not in refused and self._try(waiters[0], refused):
                    placed = True
                    self._pop(trial_id)

    def _try(self, waiter: _Waiter[T], refused: set[Hashable]) -> bool:
        """Whether this waiter's wait is over."""
        if waiter.placed.done():
            return True
        try:
            waiter.placed.set_result(waiter.take())
        except NOT_YET as refusal:
            waiter.refusal = refusal
            refused.add(waiter.route)
            return False
        except StenoError as error:
            waiter.placed.set_exception(error)
        return True

    def _add(self, trial_id: str, waiter: _Waiter[T], urgent: bool) -> None:
        if urgent:
            self._urgent.append(waiter)
            return
        self._trials.setdefault(trial_id, deque()).append(waiter)
        self._routes[waiter.route] += 1
        self._count += 1

    def _pop(self, trial_id: str) -> None:
        """The first of this trial has had its turn; the next one comes after all others'."""
        self._forget(trial_id, self._trials[trial_id].popleft())
        if trial_id in self._trials:
            self._trials.move_to_end(trial_id)

    def _remove(self, trial_id: str, waiter: _Waiter[T]) -> None:
        if waiter in self._urgent:
            self._urgent.remove(waiter)
        elif (waiters := self._trials.get(trial_id)) and waiter in waiters:
            waiters.remove(waiter)
            self._forget(trial_id, waiter)

    def _forget(self, trial_id: str, waiter: _Waiter[T]) -> None:
        self._count -= 1
        self._routes[waiter.route] -= 1
        if not self._routes[waiter.route]:
            del self._routes[waiter.route]
        if not self._trials[trial_id]:
            del self._trials[trial_id]
