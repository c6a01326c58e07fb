"""Groups of exported samples on their way to a step, in place of leased ones (`lease_feed.py`): each once, in the file's order.

Nobody else knows what has been trained of a file, so the run's state does: a group whose step is in the checkpoint is left out
when the same run goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableSet, Sequence
from pathlib import Path
from typing import Self

from steno.contracts.records import Counts, Group, Sample, Session
from steno.contracts.runs.leases import Lease, RunGroups, RunView
from steno_trainer.data.lease_feed import LeasedGroup
from steno_trainer.data.ledger import Ledger
from steno_trainer.data.record_file import RecordedGroup, RecordFile
from steno_trainer.data.rows import claimed

logger = logging.getLogger(__name__)

NEVER = 2.0**53
"""When the lease of a recorded group ends. Unix seconds."""


class RecordFeed:
    """As `LeaseFeed`, over a file of samples. Use as a context manager.

    trained: groups whose step is in the run's state: left out. counts: as in `LeaseFeed`.
    Raises: ConfigError: as `RecordFile.open`.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        trained: MutableSet[str],
        counts: Callable[[Lease], bool] = lambda lease: True,
    ) -> None:
        self._file = RecordFile.open(path)
        self._run_id, self._counts = run_id, counts
        self._left = [group for group in self._file.groups.values() if group.group_id not in trained]
        self._left.reverse()
        self._kept: list[LeasedGroup] = []  # that count, and wait for others that do
        self._held: set[str] = set()
        logger.info("%s: %d groups, %d of them not trained yet", path, len(self._file.groups), len(self._left))
        if self._file.ungrouped:
            logger.warning("%s: %d samples are in no group, and are not trained", path, self._file.ungrouped)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._file.close()

    @property
    def waiting(self) -> int:
        """Groups that could be taken now."""
        return len(self._left) + len(self._kept)

    @property
    def held(self) -> int:
        """Groups that were taken, and whose step is not durable."""
        return len(self._held)

    @property
    def settled(self) -> bool:
        return True

    async def no_more(self) -> None:
        """Does nothing: all groups of a file are here from the start."""

    async def take(self, groups: int, *, at_least: int | None = None, wait_s: float | None = None) -> list[LeasedGroup]:
        """The next `groups` groups that count, or all that are left, and those between them that do not count. If `groups` that
        do not count come first, those alone. Empty: the file has no more.

        Raises: ConfigError: as `RecordFile.samples`.
        """
        taken = await asyncio.to_thread(self._next, groups)
        self._held.update(leased.group_id for leased in taken)
        return taken

    def _next(self, groups: int) -> list[LeasedGroup]:
        taken, self._kept = self._kept, []
        counted = len(taken)
        while self._left and counted < groups and len(taken) - counted < groups:
            group = self._left.pop()
            leased = recorded_group(group, self._file.samples(group), self._run_id)
            counted += self._counts(leased.lease)
            taken.append(leased)
        if self._left and counted < groups:
            self._kept = [leased for leased in taken if self._counts(leased.lease)]
            taken = [leased for leased in taken if not self._counts(leased.lease)]
        return taken

    async def acknowledge(self, group_ids: Iterable[str]) -> None:
        """The steps that used these groups are durable."""
        self._held.difference_update(group_ids)

    async def used(self, group_ids: Iterable[str]) -> None:
        """Does nothing: no rollouts wait until groups are used."""

    async def run(self, run_id: str, *, ledger: bool = True) -> RunView:
        """How far this feed is, in the form in which the proxy describes a run; without token counts, whatever `ledger` is."""
        done = len(self._file.groups) - self.waiting - len(self._held)
        groups = RunGroups(ready=self.waiting, leased=len(self._held), acknowledged=done)
        return RunView(run_id=run_id, groups=groups, rollouts_over=True)


def recorded_group(group: RecordedGroup, samples: Sequence[Sample], run_id: str) -> LeasedGroup:
    """Samples of one group as if they had been leased. Only tokens that samples hold count as sampled: other tokens of a session,
    such as those of superseded turns, are not in the file."""
    trials = list(_trials(group.group_id, samples))
    books = Ledger()
    tokens: dict[str, Counter[str]] = {trial.trial_id: Counter() for trial in trials}
    for sample in samples:
        tokens[sample.trial_id] += claimed(sample)
    for counted in tokens.values():
        for version, count in counted.items():
            books.sampled(version, count)
    lease = Lease(
        lease_id=group.group_id,
        group=Group(group_id=group.group_id, run_id=run_id, size=len(trials), created_at=0.0),
        trials=trials,
        tokens={trial_id: dict(counted) for trial_id, counted in tokens.items()},
        expires_at=NEVER,
    )
    return LeasedGroup(lease, list(samples), books)


def _trials(group_id: str, samples: Sequence[Sample]) -> Iterator[Session]:
    by_trial: dict[str, list[Sample]] = {}
    for sample in samples:
        by_trial.setdefault(sample.trial_id, []).append(sample)
    for trial_id, held in by_trial.items():
        turns = {turn_id for sample in held for turn_id in sample.turn_ids}
        yield Session(
            trial_id=trial_id, group_id=group_id, status="completed", reward=held[0].reward, counts=Counts(turns=len(turns)),
            created_at=0.0, updated_at=0.0,
        )  # fmt: skip
