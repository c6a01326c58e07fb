"""Rows into the tensors of one micro-batch, packed: samples end to end without padding, as the plan says.

A causal model's state at position p predicts the token at p + 1, so what the head must look at are the positions before the
trained tokens, and only those: everything that a loss needs is a list of N trained tokens, not a mask over all of them.

Shapes: 1 batch, S packed tokens, N trained tokens, Q samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from steno_trainer.data.ledger import Ledger, Reason
from steno_trainer.data.rows import TrainingRow
from steno_trainer.errors import BadBatch
from steno_trainer.objective.ratios import RatioLevel

DUMMY_TOKENS = 2
"""Length of an empty micro-batch: the least that has a position before another one."""


@dataclass(frozen=True)
class PackedBatch:
    """input_ids_1S int64; position_ids_1S int64, starting from 0 in each sample; starts_Q1 int32: where each sample starts, and
    S last (what variable-length attention asks for: samples must not see each other).

    Of the trained tokens: predictor_N int64, the position in S whose state predicts it; targets_N int64; sampling_logprobs_N,
    temperatures_N, advantages_N, weights_N float32; version_N int64, index into `versions`. All finite. N is 0 in a dummy.
    sequence_N int64: which of `sequences` a token is of (what has one importance ratio); sequence_tokens_N int64: of how many.
    """

    input_ids_1S: Tensor
    position_ids_1S: Tensor
    starts_Q1: Tensor
    predictor_N: Tensor
    targets_N: Tensor
    sampling_logprobs_N: Tensor
    temperatures_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    version_N: Tensor
    sequence_N: Tensor
    sequence_tokens_N: Tensor
    sequences: int
    versions: tuple[str, ...]

    @property
    def loss_mask_N(self) -> Tensor:
        """All True: only trained tokens are here."""
        return torch.ones_like(self.targets_N, dtype=torch.bool)

    def to(self, device: torch.device | str) -> PackedBatch:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def collate(
    rows: Sequence[TrainingRow],
    advantages: Mapping[str, float],
    weights: Sequence[float],
    level: RatioLevel = RatioLevel.TOKEN,
) -> PackedBatch:
    """One micro-batch. No rows: a dummy, which runs like any other and trains nothing.

    Args: advantages: by trial id, of every row's trial. weights: of the rows, from `aggregation.token_weights`. level: what has
        one importance ratio.
    Raises: BadBatch: a row whose trial has no advantage; not as many weights as rows.
    """
    if len(weights) != len(rows):
        raise BadBatch(f"got {len(weights)} weights for {len(rows)} rows")
    missing = sorted({row.trial_id for row in rows} - advantages.keys())
    if missing:
        raise BadBatch(f"no advantage for trial {', '.join(missing)}")
    lengths = [row.tokens for row in rows] or [DUMMY_TOKENS]
    starts = [0, *accumulate(lengths)]
    versions = tuple(sorted({version for row in rows for version in row.versions}))
    trained = [row.loss_mask_T.nonzero()[:, 0] for row in rows]
    counts = [len(positions) for positions in trained]

    def picked(name: str, dtype: torch.dtype) -> Tensor:
        parts = [getattr(row, name)[where] for row, where in zip(rows, trained, strict=True)]
        return torch.cat([*parts, torch.empty(0)]).to(dtype) if dtype.is_floating_point else _cat(parts)

    def spread(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(counts, dtype=torch.int64))

    numbers_N = _sequences(rows, trained, starts, level)
    _, sequence_N, tokens_Q = torch.unique_consecutive(numbers_N, return_inverse=True, return_counts=True)
    renumbered = [torch.tensor([versions.index(version) for version in row.versions]) for row in rows]
    return PackedBatch(
        input_ids_1S=_cat([row.token_ids_T for row in rows] or [torch.zeros(DUMMY_TOKENS, dtype=torch.int64)])[None],
        position_ids_1S=_cat([torch.arange(length) for length in lengths])[None],
        starts_Q1=torch.tensor(starts, dtype=torch.int32),
        predictor_N=_cat([where - 1 + start for where, start in zip(trained, starts, strict=False)]),
        targets_N=picked("token_ids_T", torch.int64),
        sampling_logprobs_N=picked("sampling_logprobs_T", torch.float32),
        temperatures_N=picked("temperatures_T", torch.float32),
        advantages_N=spread([advantages[row.trial_id] for row in rows]),
        weights_N=spread(weights),
        version_N=_cat([new[row.version_T[where]] for new, row, where in zip(renumbered, rows, trained, strict=True)]),
        sequence_N=sequence_N,
        sequence_tokens_N=tokens_Q[sequence_N],
        sequences=len(tokens_Q),
        versions=versions,
    )


def book(packed: PackedBatch, mismatch_masked_N: Tensor, ledger: Ledger) -> None:
    """Book a micro-batch that was trained: its tokens as trained, but for those that the mismatch correction took out."""
    for i, version in enumerate(packed.versions):
        here_N = packed.version_N == i
        masked = int((here_N & mismatch_masked_N).sum())
        ledger.trained(version, int(here_N.sum()) - masked)
        ledger.untrained(version, Reason.MISMATCH, masked)


def _sequences(
    rows: Sequence[TrainingRow], trained: Sequence[Tensor], starts: Sequence[int], level: RatioLevel
) -> Tensor:
    """Of each trained token, the position in S at which its sequence starts. int64 [N]"""

    def begins(row: TrainingRow, where: Tensor) -> Tensor:
        match level:
            case RatioLevel.TOKEN:
                return where
            case RatioLevel.COMPLETION:
                edges = torch.tensor(row.completion_starts)
                return edges[torch.searchsorted(edges, where, right=True) - 1]
            case RatioLevel.SEQUENCE:
                return torch.zeros_like(where)

    return _cat([begins(row, where) + start for row, where, start in zip(rows, trained, starts, strict=False)])


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts, torch.empty(0, dtype=torch.int64)])
