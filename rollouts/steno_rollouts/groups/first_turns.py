"""Handles trials that fail before their first turn: a missing command, an agent that can't start, a wrong address.

Such a failure says nothing of the policy, and the next trial would mostly fail in the same way. So the first trial runs alone
until it has a turn on record. A trial that failed before its first turn is held: it stays open at the proxy. It is given up once
a trial that began later has come further (then the fault was its own), if no trial can begin before it is given up, or if none
begins any more. If too many fail in a row, a resumable run keeps the held ones for its next start. Bookkeeping only: `TrialPool`
does what is said here.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import NamedTuple

from steno_rollouts.trials.runner import FailedTrial


class Begun(NamedTuple):
    """number: trials are numbered as they begin. alone: no other trial begins until `over`: it has had its first turn, or has
    ended."""

    number: int
    alone: bool


class FirstTurns:
    """Args: stop_after: so many trials that failed before their first turn, in a row, stop the rollouts; 0: none do, and the
    first trial does not run alone either.

    Attributes:
        stopped: the failure that stopped the rollouts; None: nothing has.
        proven: a trial has had its first turn, or has ended well without.
        in_a_row: how many have failed without a trial that began later and came further.
        held: those of them that are not given up yet, by number.
    """

    def __init__(self, stop_after: int) -> None:
        self.stop_after = stop_after
        self.stopped: FailedTrial | None = None
        self.held: dict[int, FailedTrial] = {}
        self.proven = stop_after == 0
        self._given_up = 0
        self._alone = asyncio.Lock()
        self._alone_now: int | None = None
        self._numbers = itertools.count()

    async def begin(self) -> Begun:
        """Wait until a trial may begin."""
        if not self.proven:
            await self._alone.acquire()
            if not self.proven:
                self._alone_now = next(self._numbers)
                return Begun(self._alone_now, True)
            self._alone.release()
        return Begun(next(self._numbers), False)

    def over(self, begun: Begun) -> None:
        """Let other trials begin, if this one ran alone. Idempotent."""
        if self._alone_now == begun.number:
            self._alone_now = None
            self._alone.release()

    @property
    def in_a_row(self) -> int:
        return self._given_up + len(self.held)

    def reached(self, number: int) -> list[FailedTrial]:
        """The trial of this number has had its first turn, or has ended well without. Returns: those held that began before it,
        to be given up."""
        self.proven = True
        self._given_up = 0
        return [self.held.pop(earlier) for earlier in sorted(self.held) if earlier < number]

    def failed(self, number: int, failed: FailedTrial) -> bool:
        """Hold a failed trial. Returns: whether the rollouts must stop (`stop`), unless a trial that runs and began later has had
        a turn."""
        self.held[number] = failed
        return self.too_many

    @property
    def too_many(self) -> bool:
        return self.in_a_row >= self.stop_after

    def let_go(self) -> list[FailedTrial]:
        """Called if no trial can begin before the held ones are given up, or none begins any more. Returns: the held ones; they
        still count as failed in a row."""
        self._given_up += len(self.held)
        return [self.held.pop(number) for number in sorted(self.held)]

    def stop(self) -> None:
        self.stopped = self.stopped or self.held[max(self.held)]
