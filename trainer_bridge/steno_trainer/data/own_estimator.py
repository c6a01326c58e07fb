"""From the setting `estimator` to what makes advantages of a group's rewards: one of ours, or a function of a user's file.

A user's is `function(group: GroupRewards) -> list[float]`, one advantage for each trial, in their order. It is tried on a few
groups before anything is loaded: what would end a run hours later is said at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steno.config.plugins import load_function
from steno.contracts.errors import ConfigError
from steno_trainer.data.advantages import GDPO, AnyEstimator, Estimator, Gdpo, GroupRewards
from steno_trainer.errors import BadBatch

TRIED = (
    GroupRewards((0.0, 1.0), (10, 20)),
    GroupRewards((1.0, 0.25, -1.0), (300, 1, 40)),
    GroupRewards((1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0), (7, 7, 100, 9, 30, 2000, 8, 64)),
    GroupRewards((0.0, 1.0, 1.0), (0, 12, 5)),
    GroupRewards((0.5, 0.5), (8, 16)),
)
"""Groups to try a function on: of two trials and of more; with a trial that sampled nothing, since it failed before its first
call; with rewards that a length penalty has made equal."""


def estimator_named(name: str, gdpo_weights: Mapping[str, float] | None = None) -> AnyEstimator:
    """Args: gdpo_weights: of the metrics that `gdpo` takes for rewards.

    Raises: ConfigError: names `estimator`: no such one; or a file or function that is none, or gives no advantages."""
    if name == GDPO:
        return Gdpo(gdpo_weights or {})
    if name in list(Estimator):
        return Estimator(name)
    own = OwnEstimator(name, load_function(name, "estimator"))
    for group in TRIED:
        try:
            own(group)
        except BadBatch as error:
            raise ConfigError(error.message, field="estimator") from error
    return own


@dataclass(frozen=True)
class OwnEstimator:
    name: str
    function: Callable[[GroupRewards], Any]

    def __call__(self, group: GroupRewards) -> Sequence[float]:
        """Raises: BadBatch: what the function returned, or raised, for which rewards."""
        try:
            found = self.function(group)
            found = list(found) if isinstance(found, Iterable) else found  # what yields them may raise, too
        except Exception as error:
            raise self._refused(group, f"raised {type(error).__name__}: {error}") from error
        try:
            values = [float(value) for value in found]
        except (TypeError, ValueError, OverflowError):
            raise self._refused(group, f"returned {found!r}, must be a list of numbers, one for each trial") from None
        if len(values) != len(group.rewards):
            raise self._refused(
                group, f"returned {len(values)} values, must be {len(group.rewards)}, one for each trial"
            )
        if not all(map(math.isfinite, values)):
            raise self._refused(group, f"returned {values}, must be finite")
        return values

    def _refused(self, group: GroupRewards, what: str) -> BadBatch:
        return BadBatch(f"estimator {self.name}: for rewards {list(group.rewards)} it {what}")
