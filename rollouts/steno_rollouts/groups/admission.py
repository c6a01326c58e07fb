"""Limits the groups in hand, so that none is too stale when it is trained (`steno_trainer/data/staleness.py`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from steno.contracts.errors import ConfigError
from steno.contracts.runs.leases import RunView

InHand = Callable[[], Awaitable[int]]
"""Groups of the run that are registered and neither given up nor trained into weights that a worker serves."""


def trainer_of(view: RunView) -> str:
    """Who trains the run, for people, and what to do if nobody does."""
    trainer, run = view.trainer, f"run {view.run_id}"
    start = f"start it: steno train --run {view.run_id}"
    if trainer is None:
        taken = view.groups.leased + view.groups.used + view.groups.acknowledged
        if taken:
            return f"a trainer that does not register has taken {taken} groups of {run}"
        return f"no trainer of {run} has been seen: {start}"
    if trainer.heard_s is None:
        return f"the trainer {trainer.name} has ended: {start}"
    if not trainer.alive:
        return f"the trainer {trainer.name} sent its last heartbeat {trainer.heard_s:.0f} s ago: look at its log, or {start}"
    return f"the trainer {trainer.name} is running (last heartbeat {trainer.heard_s:.0f} s ago)"


@dataclass(frozen=True)
class Admission:
    """At most `groups_per_step * (max_staleness_steps + 1)` groups in hand. Without `groups_per_step`: no bound.

    ask_again_s: between two looks at what is in hand, while no group is admitted. A step takes seconds at least.
    """

    groups_per_step: int | None = None
    max_staleness_steps: int = 1
    ask_again_s: float = 0.5

    def __post_init__(self) -> None:
        if self.groups_per_step is not None and self.groups_per_step < 1:
            raise ConfigError(
                f"groups_per_step: got {self.groups_per_step}, must be at least 1", field="groups_per_step"
            )
        if self.max_staleness_steps < 0:
            raise ConfigError(
                f"max_staleness_steps: got {self.max_staleness_steps}, must be at least 0", field="max_staleness_steps"
            )

    def waits_for(self, view: RunView) -> str:
        """Why no group is admitted now, for people: what is in hand, who should take it, and what to do if nobody does."""
        groups = view.groups
        text = (
            f"{groups.in_hand} groups are started and not yet trained ({groups.running} running, {groups.ready} ready, "
            f"{groups.leased} leased); --groups-per-step {self.groups_per_step} "
            f"--max-staleness-steps {self.max_staleness_steps} admit no more"
        )
        return (
            f"{text}; {trainer_of(view)}" if groups.ready or groups.leased else f"{text}: running trials must end first"
        )

    @property
    def bounded(self) -> bool:
        return self.groups_per_step is not None

    async def admits(self, in_hand: InHand) -> bool:
        """Whether one more group may be started now."""
        if self.groups_per_step is None:
            return True
        free = admissible_groups(
            in_hand=await in_hand(),
            groups_per_step=self.groups_per_step,
            max_staleness_steps=self.max_staleness_steps,
        )
        return free > 0


def admissible_groups(*, in_hand: int, groups_per_step: int, max_staleness_steps: int) -> int:
    """How many groups may be started now, so that none is stale when its turn comes.

    A group that the weights of step i begin to sample behind `in_hand` others is trained at step
    i + floor(in_hand / groups_per_step), if groups are taken in the order they were started. That must not exceed the bound, so
    at most groups_per_step x (max_staleness_steps + 1) groups are in hand at any time; a bound of 0 is training on-policy.

    Args: in_hand: groups started and neither given up nor trained into weights that are served: running, waiting to be trained,
        or trained by a step whose weights are still on their way.
    Source: AReaL's staleness-aware training, arXiv:2505.24298: floor((started - 1) / groups_per_step) <= i + bound.
    """
    return max(0, groups_per_step * (max_staleness_steps + 1) - in_hand)
