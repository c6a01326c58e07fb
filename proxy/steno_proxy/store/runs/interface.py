"""What the proxy asks of its memory about runs and leases: the `RunStore` protocol, and how those who wait for a group are woken.

Both stores keep it; one suite tests both. Methods raise `NotFound`, `Conflict` (`Superseded`, `TrainerAlive`) or
`StoreUnavailable` and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from steno.contracts.errors import Superseded, TrainerAlive
from steno.contracts.runs.leases import ALIVE_S, GroupPlace, Lease, LeaseRequest, RunView, Tenure
from steno.contracts.runs.training_steps import TrainingStep


class GrantedLeases(NamedTuple):
    """The answer to a request for leases. waited_s: of each lease, seconds since its group got ready. next_in_s: seconds until
    something may get ready by itself (a deadline, the end of a lease); None: nothing is known to."""

    leases: list[Lease]
    waited_s: list[float]
    next_in_s: float | None


class GroupsInHand(NamedTuple):
    """How many training groups of all runs are in which state."""

    running: int
    ready: int
    leased: int


class RunStore(Protocol):
    """What is remembered of runs and leases. Times are Unix seconds. `now`: None, as in all but tests: what the store itself
    takes it for, so that a lease lasts as long whichever replica of the proxy granted it, and however wrong its clock is."""

    async def lease(
        self, request: LeaseRequest, *, at_least: int, epoch: int | None = None, now: float | None = None
    ) -> GrantedLeases:
        """Grant up to `max_groups` of a run's ready groups, oldest ready first; none, where fewer than `at_least` are. A
        request_id that was answered in the last five minutes is answered with what is still held of the same. Does not wait.

        epoch: of a registered trainer, and of its leases. Raises: Superseded: another trainer has taken over.
        """
        ...

    async def acknowledge(self, lease_id: str, *, now: float | None = None) -> float | None:
        """The group is done with. The same again changes nothing. Returns how long it was held, in seconds; None: done before.

        Raises: Superseded: another trainer has taken over since the lease was granted. Conflict: it is not held under this lease
            any more. NotFound: it never was, or is long forgotten.
        """
        ...

    async def release(self, lease_id: str, *, now: float | None = None) -> None:
        """The group is served again, at once. The same again changes nothing. Raises: as `acknowledge`."""
        ...

    async def extend(self, lease_id: str, ttl_s: float, *, used: bool = False, now: float | None = None) -> float:
        """A lease lasts `ttl_s` from now; also one that is past its time, if its group has not been leased again. used: its
        group is not in hand any more, as long as this grant holds. Returns when it ends. Raises: as `acknowledge`."""
        ...

    async def take_over(
        self, run_id: str | None, trainer: str, *, force: bool = False, now: float | None = None
    ) -> Tenure:
        """A trainer takes the run: the epoch is one more, and what is leased under older epochs can be leased again at once. The
        same trainer again, while it has the run, changes nothing. Raises: TrainerAlive, unless `force`."""
        ...

    async def heartbeat(
        self, run_id: str | None, trainer: str, epoch: int, *, leaving: bool = False, now: float | None = None
    ) -> None:
        """The trainer of this epoch lives, or leaves. A store that has lost its memory learns of it. Raises: Superseded."""
        ...

    async def check_epoch(self, run_id: str | None, epoch: int) -> None:
        """Whether a trainer still has its run. Raises: Superseded."""
        ...

    async def view(self, run_id: str | None, *, now: float | None = None, ledger: bool = True) -> RunView:
        """A run that nobody knows has nothing. ledger: False: tokens are not asked for; there is a number for each policy version
        and reason, for good."""
        ...

    async def groups(self, run_id: str | None, *, now: float | None = None) -> list[GroupPlace]:
        """Its groups, newest first, without their records."""
        ...

    async def keep_step(self, run_id: str | None, step: TrainingStep) -> TrainingStep:
        """A step's numbers, laid over what is on record of it. Of a run the newest `MOST_STEPS` are kept. Returns what is on
        record now."""
        ...

    async def steps(self, run_id: str | None, *, start: int, limit: int) -> list[TrainingStep]:
        """Steps on record from this number on, in order."""
        ...

    async def newest(self, limit: int) -> list[tuple[str | None, float]]:
        """The `limit` runs with the newest groups, newest first, each with the time its last group was made: also runs whose
        groups are gone."""
        ...

    async def set_rollouts_over(self, run_id: str | None, over: bool) -> None:
        """The launcher says whether no more training groups come (`RunView.rollouts_over`). A new training group sets this to
        False again."""
        ...

    async def close_due(self, *, now: float | None = None) -> None:
        """Serve the groups of all runs that are past their deadline. `lease` does it for its run."""
        ...

    async def in_hand(self, *, now: float | None = None) -> GroupsInHand: ...

    def watch(self, run_id: str | None) -> contextlib.AbstractContextManager[asyncio.Event]:
        """An event that is set when a group of this run may have got ready. A hint: it may be set for nothing, and with several
        replicas a wake-up may be lost, so that whoever waits looks again by itself every few seconds."""
        ...


def new_grant(epoch: int | None) -> str:
    """What the fencing tokens of one request's grants begin with (`LeaseName.grant`)."""
    return ("" if epoch is None else f"{epoch}.") + secrets.token_hex(8)


def superseded(run_id: str | None, epoch: int) -> Superseded:
    """The error for a trainer whose run has another one. Args: epoch: the run's."""
    return Superseded(f"run {run_id}: another trainer has taken over (epoch {epoch})")


def alive(run_id: str | None, trainer: str, left_s: float) -> TrainerAlive:
    """The error for a trainer that may not take over yet. left_s: seconds until it may."""
    return TrainerAlive(
        f"run {run_id}: its trainer {trainer} was heard of {max(0.0, ALIVE_S - left_s):.0f} s ago and may still be running; "
        f"it can be taken over {ALIVE_S:.0f} s after its last heartbeat, or at once with take_over",
        field="take_over", retry_after_s=left_s,
    )  # fmt: skip


class LeaseWaiters:
    """The requests of this process that wait for a group, by run."""

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
