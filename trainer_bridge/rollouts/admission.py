"""How many groups may be in hand, so that none is too old for the trainer when its turn comes. The mathematics: `staleness`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from proxy.contracts.errors import ConfigError
from trainer_bridge.staleness import admissible_groups

InHand = Callable[[], Awaitable[int]]
"""Groups of the run that are registered and neither given up nor trained into weights that a worker serves."""


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
            raise ConfigError(f"groups_per_step is {self.groups_per_step}", field="groups_per_step")
        if self.max_staleness_steps < 0:
            raise ConfigError(f"max_staleness_steps is {self.max_staleness_steps}", field="max_staleness_steps")

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
