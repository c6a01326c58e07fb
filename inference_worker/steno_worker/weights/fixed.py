"""Refuses weight updates, for engines behind an API."""

from __future__ import annotations

from pathlib import Path

from steno.contracts.errors import WeightsRefused
from steno_worker.interfaces import StagedUpdate


def refusal() -> WeightsRefused:
    return WeightsRefused("policy: weights of an upstream can't be updated", field="policy")


class FixedWeights:
    """The part of `Engine` that has to do with weights, for engines behind an API. Such an engine is asked for nothing:
    `UpdateRunner` refuses before anything is staged."""

    def checkpoint(self) -> Path | None:
        return None

    async def load_weights(self, update: StagedUpdate) -> float:
        """Raises: WeightsRefused."""
        raise refusal()

    async def score(self, token_ids: list[int]) -> list[float]:
        """Raises: WeightsRefused."""
        raise WeightsRefused("probe: an upstream can't score a probe", field="probe")
