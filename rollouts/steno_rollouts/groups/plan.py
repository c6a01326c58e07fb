"""Groups that rollouts are asked to run: which task in which round, how each is registered, and who is told."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from steno.contracts.records import ForkOf, Limits, SamplingPolicy
from steno.contracts.rest import GroupSpec, GroupTrials
from steno_rollouts.outcome import TrialResult
from steno_rollouts.tasks.task import Task, kept_on_record
from steno_rollouts.trials.runner import FailedTrial


@dataclass(frozen=True)
class Planned:
    """A task in one round of a run."""

    task: Task
    round: str


@dataclass(frozen=True)
class GroupOptions:
    """What groups are registered with. resumable: trials that had not begun stay open when the rollouts are cancelled.
    stop_after_failures: in a row, before a first turn (`first_turns.py`); 0: none stop the rollouts. fork_of: what every trial
    begins with. needed: trials of a group that must have a reward; then its other trials are ended (`spare.py`). None: each runs
    to its end."""

    run_id: str
    size: int
    purpose: Literal["train", "eval"] = "train"
    in_flight: int = 8
    sequential: bool = False
    sampling: SamplingPolicy = field(default_factory=SamplingPolicy)
    limits: Limits = field(default_factory=Limits)
    deadline_s: float | None = None
    resumable: bool = True
    stop_after_failures: int = 0
    fork_of: ForkOf | None = None
    needed: int | None = None

    def spec(self, task: Task, group_id: str) -> GroupSpec:
        """What a group of this task is registered with."""
        withheld = kept_on_record(task.hidden)
        return GroupSpec(
            group_id=group_id,
            run_id=self.run_id,
            task=dict(task.fields),
            size=self.size,
            deadline_s=self.deadline_s,
            purpose=self.purpose,
            sampling=self.sampling,
            limits=self.limits,
            # Not said where there is none: a proxy of an older release refuses what it does not know.
            **({"fork_of": self.fork_of} if self.fork_of is not None else {}),
            **({"withheld": withheld} if withheld else {}),
        )


class Observer(Protocol):
    """Who is told. Called on the event loop; must not wait."""

    def group_started(self, group: GroupTrials) -> None: ...
    def trial_started(self, trial_id: str) -> None: ...
    def trial_waits(self, result: TrialResult) -> None:
        """It has ended, and is scored with its group; `trial_ended` follows."""

    def trial_ended(self, result: TrialResult) -> None: ...
    def trial_failed(self, failed: FailedTrial) -> None:
        """Before its first turn; `trial_ended` follows if it is given up and not run again."""

    def held_back(self, why: str | None) -> None:
        """Why no group can be made now (staleness bound, full store), again from time to time; None: groups are made again."""


def epochs(tasks: Sequence[Task], count: int, shuffle_seed: int | None = None) -> Iterator[Planned]:
    """Each task once per epoch. Shuffled: the same seed gives the same order, so that a resumed run goes on in it."""
    for epoch in range(count):
        order = list(tasks)
        if shuffle_seed is not None:
            random.Random(f"{shuffle_seed}:{epoch}").shuffle(order)
        yield from (Planned(task, f"epoch-{epoch}") for task in order)
