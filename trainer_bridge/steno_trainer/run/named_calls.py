"""Whether the calls that are trained are there at all: names in `train_models` that no call asks for would use up all groups."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from steno.contracts.errors import ConfigError
from steno_trainer.data.record_file import shown_names

log = logging.getLogger(__name__)

MOST_STEPS = 3
"""After so many steps without a call by one of the names the run ends, if no such call is known yet."""


class NamedCalls:
    """Args: models: `train_models`. found: a call by one of them is known. to_the_end: raise only once all groups have
    been looked at: all of them exist already, in any order."""

    def __init__(self, models: Sequence[str], *, found: bool, to_the_end: bool) -> None:
        self._models = models
        self.found = found
        self._to_the_end = to_the_end
        self._steps = 0
        self._others: set[str] = set()

    def look(self, named: bool, others: Sequence[str]) -> None:
        """At a step, before its groups count as used. Args: as in `AssembledStep`.

        Raises: ConfigError: as `check`, after so many steps.
        """
        self.found = self.found or named
        if named or not others:
            return
        self._steps += 1
        self._others.update(others)
        if self._steps >= MOST_STEPS and not self._to_the_end:
            self.check()
        log.warning(
            "nothing of this step is trained: train_models: got %s; its calls asked for %s",
            ", ".join(self._models), shown_names(others),
        )  # fmt: skip

    def check(self) -> None:
        """Raises: ConfigError: no call was by one of these names so far."""
        if self._steps and not self.found:
            raise ConfigError(
                f"train_models: got {', '.join(self._models)}; all calls so far asked for {shown_names(self._others)}",
                field="train_models",
            )
