"""What the proxy asks of its memory about runs and leases: the `RunStore` protocol, and how those who wait for a group are woken.

Both stores keep it; one suite tests both. Methods raise `NotFound`, `Conflict` or `StoreUnavailable` and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from proxy.contracts.leases import Lease, LeaseRequest, RunView


class Granted(NamedTuple):
    """waited_s: of each lease, seconds since its group got ready. next_in_s: seconds until something may get ready by itself
    (a deadline, the end of a lease); None: nothing is known to."""

    leases: list[Lease]
    waited_s: list[float]
    next_in_s: float | None


class InHand(NamedTuple):
    """Training groups of all runs."""

    running: int
    ready: int
    leased: int


class RunStore(Protocol):
    """Times are Unix seconds. `now`: None, as in all but tests: what the store itself takes it for, so that a lease lasts as long
    whichever replica of the proxy granted it, and however wrong its clock is."""

    async def lease(self, request: LeaseRequest, *, at_least: int, now: float | None = None) -> Granted:
        """Grant up to `max_groups` of a run's ready groups, oldest ready first; none, where fewer than `at_least` are. A
        request_id that was answered in the last five minutes is answered with what is still held of the same. Does not wait."""
        ...

    async def acknowledge(self, lease_id: str, *, now: float | None = None) -> float | None:
        """The group is done with. The same again changes nothing. Returns how long it was held, in seconds; None: done before.

        Raises: Conflict: it is not held under this lease any more. NotFound: it never was, or is long forgotten.
        """
        ...

    async def release(self, lease_id: str, *, now: float | None = None) -> None:
        """The group is served again, at once. The same again changes nothing. Raises: as `acknowledge`."""
        ...

    async def extend(self, lease_id: str, ttl_s: float, *, used: bool = False, now: float | None = None) -> float:
        """A lease lasts `ttl_s` from now; also one that is past its time, if its group has not been leased again. used: its
        group is not in hand any more, as long as this grant holds. Returns when it ends. Raises: as `acknowledge`."""
        ...

    async def view(self, run_id: str | None, *, now: float | None = None) -> RunView:
        """A run that nobody knows has nothing."""
        ...

    async def close_due(self, *, now: float | None = None) -> None:
        """Serve the groups of all runs that are past their deadline. `lease` does it for its run."""
        ...

    async def in_hand(self, *, now: float | None = None) -> InHand: ...

    def watch(self, run_id: str | None) -> contextlib.AbstractContextManager[asyncio.Event]:
        """An event that is set when a group of this run may have got ready. A hint: it may be set for nothing, and with several
        replicas a wake-up may be lost, so that whoever waits looks again by itself every few seconds."""
        ...


class Waiters:
    """Who waits in this process, by run."""

    def __init__(self) -> None:
        self._events: dict[str | None, set[asyncio.Event]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._events.values()))

    @contextlib.contextmanager
    def watch(self, run_id: str | None) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._events.setdefault(run_id, set()).add(event)
        try:
            yield event
        finally:
            events = self._events[run_id]
            events.discard(event)
            if not events:
                del self._events[run_id]

    def wake(self, run_id: str | None) -> None:
        for event in self._events.get(run_id, ()):
            event.set()
