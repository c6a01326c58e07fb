"""Engines whose weights are somebody else's: updates are refused."""

from __future__ import annotations

from pathlib import Path

from inference_worker.engines.base import StagedUpdate
from proxy.contracts.errors import WeightsRefused


class FixedWeights:
    """The part of `Engine` that has to do with weights, for engines behind an API."""

    def checkpoint(self) -> Path | None:
        return None

    async def load_weights(self, update: StagedUpdate) -> float:
        """Raises: WeightsRefused."""
        raise WeightsRefused(
            "policy: this worker's engine is an upstream, whose weights can't be updated", field="policy"
        )

    async def score(self, token_ids: list[int]) -> list[float]:
        """Raises: WeightsRefused."""
        raise WeightsRefused("probe: this worker's engine is an upstream, which scores nothing", field="probe")
