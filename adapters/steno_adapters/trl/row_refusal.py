"""Why a row that has come can't be trained now, and which of TRL's versions sampled it. Pure; no TRL."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from steno_adapters.rows import TrainableRow

if TYPE_CHECKING:
    from steno_adapters.trl.version_count import VersionCount


class Judgement(NamedTuple):
    """reason: why the row is not trained; None: it is trained. why: details, if later rows with the same settings will be refused
    too. number: TRL's `model_version` of the oldest weights that sampled a trained token; None: not known."""

    reason: str | None
    why: str = ""
    number: int | None = None


def judged(
    row: TrainableRow,
    *,
    temperature: float,
    token_budget: int,
    max_staleness: int,
    model_version: int,
    versions: VersionCount,
) -> Judgement:
    """Checks temperatures and versions of trained tokens only: what another policy or older weights said before is context, like
    a prompt. The token budget is for the whole row."""
    sampled_at = row.temperatures[row.response_mask]
    if not np.allclose(sampled_at, temperature):
        sampled = sorted({round(float(each), 4) for each in sampled_at})
        return Judgement("temperature", f"sampled at {sampled}, temperature is {temperature}")
    if 0 < token_budget < len(row):
        return Judgement("too_long", f"{len(row)} tokens, token_budget is {token_budget}")
    of_trained = np.unique(row.version_index[row.response_mask]).tolist()
    numbers = [versions.number(row.versions[index]) if index >= 0 else None for index in of_trained]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return Judgement("orphaned")
    oldest = min(known)
    return Judgement("stale" if model_version - oldest > max_staleness else None, number=oldest)
