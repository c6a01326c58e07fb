"""Rows made by hand, where a test needs no recording behind them."""

from __future__ import annotations

import torch

from steno_trainer.data.rows import TrainingRow
from steno_trainer.data.staleness import StalenessVerdict


def row(trial_id: str, tokens: int, trained: list[int], *, group_id: str = "g", seed: int = 0) -> TrainingRow:
    """trained: positions."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[trained] = True
    return TrainingRow(
        trial_id=trial_id, group_id=group_id,
        token_ids_T=torch.randint(0, 50, (tokens,), generator=generator), loss_mask_T=mask,
        sampling_logprobs_T=torch.where(mask, -torch.rand(tokens, generator=generator), torch.nan),
        temperatures_T=torch.ones(tokens), version_T=torch.where(mask, 0, -1), versions=("a/0",), verdict=StalenessVerdict(None),
    )  # fmt: skip
