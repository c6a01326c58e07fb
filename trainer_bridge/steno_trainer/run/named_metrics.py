"""Whether trials have the metrics that are their rewards: names in `gdpo_metrics` that no trial has would use up all groups."""

from __future__ import annotations

from collections.abc import Sequence

from steno.contracts.errors import ConfigError

MOST_STEPS = 3
"""Steps in a row in which no trial has one of the metrics, after which the run ends with an error."""


class NamedMetrics:
    """Args: given: `gdpo_metrics`."""

    def __init__(self, given: Sequence[str]) -> None:
        self._given = given
        self._found = False
        self._lacking: Sequence[str] = ()
        self._steps = 0

    def look(self, lacking: Sequence[str] | None) -> None:
        """At a step, before its groups count as used. Args: as in `AssembledStep`.

        Raises: ConfigError: so many steps in a row lack a metric.
        """
        if lacking is None:
            return
        self._found = self._found or not lacking
        self._lacking = lacking
        self._steps = self._steps + 1 if lacking else 0
        if self._steps >= MOST_STEPS:
            raise self._error()

    def check(self) -> None:
        """Raises: ConfigError: no step so far had all of the metrics."""
        if self._lacking and not self._found:
            raise self._error()

    def _error(self) -> ConfigError:
        names = ", ".join(self._lacking)
        return ConfigError(
            f"gdpo_metrics: got {', '.join(self._given)}; of the last {self._steps} steps no trial with a reward has {names}",
            field="gdpo_metrics",
        )
