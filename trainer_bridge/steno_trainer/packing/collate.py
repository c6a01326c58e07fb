"""Rows into the tensors of one micro-batch, packed: segments of tries end to end without padding, as the plan says.

A token that several rows begin with is there once, whoever sampled it. A segment is what a row brings that those before it (in
the forest's order) have not; it sees itself and the path that leads to it. What shares nothing is a segment of its own that
nothing leads to, and a row that goes on where the one before it ends is of the same segment.

A causal model's state at position p predicts the token at p + 1, so what the head must look at are the positions before the
trained tokens, and only those: everything that a loss needs is a list of N trained tokens, not a mask over all of them.

Two rows may train the same token, each with its own advantage: it is then twice in that list, at one position.

Shapes: 1 batch, S packed tokens, N trained tokens, Q segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from steno_trainer.data.rows import TrainingRow
from steno_trainer.errors import BadBatch
from steno_trainer.objective.ratios import RatioLevel
from steno_trainer.packing.forest import Forest

DUMMY_TOKENS = 2
"""Length of an empty micro-batch: the least that has a position before another one."""


Range = tuple[int, int]
"""Of positions in S: the first, and the one after the last."""


@dataclass(frozen=True)
class PackedBatch:
    """input_ids_1S int64; position_ids_1S int64, counted from the start of the samples that a token is of; starts_Q1 int32: where
    each segment starts, and S last (what variable-length attention asks for: samples must not see each other). paths: of each
    segment, what leads to its first token, in order; none: nothing does.

    Of the trained tokens, in the order of rows: predictor_N int64, the position in S whose state predicts it; targets_N int64;
    sampling_logprobs_N, temperatures_N, advantages_N, weights_N float32. All finite. N is
    0 in a dummy. sequence_N int64: which of `sequences` a token is of (what has one importance ratio); sequence_tokens_N int64:
    of how many.
    """

    input_ids_1S: Tensor
    position_ids_1S: Tensor
    starts_Q1: Tensor
    paths: tuple[tuple[Range, ...], ...]
    predictor_N: Tensor
    targets_N: Tensor
    sampling_logprobs_N: Tensor
    temperatures_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    sequence_N: Tensor
    sequence_tokens_N: Tensor
    sequences: int

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
    *,
    share: bool = False,
) -> PackedBatch:
    """One micro-batch. No rows: a dummy, which runs like any other and trains nothing.

    Args: advantages: by trial id, of every row's trial. weights: of the rows, from `aggregation.token_weights`. level: what has
        one importance ratio. share: compute what rows begin alike with once; else each row is a segment.
    Raises: BadBatch: a row whose trial has no advantage; not as many weights as rows.
    """
    if len(weights) != len(rows):
        raise BadBatch(f"got {len(weights)} weights for {len(rows)} rows")
    missing = sorted({row.trial_id for row in rows} - advantages.keys())
    if missing:
        raise BadBatch(f"no advantage for trial {', '.join(missing)}")
    starts = [0, *accumulate(row.tokens for row in rows)]
    trie = _trie(rows, share)
    trained = [row.loss_mask_T.nonzero()[:, 0] for row in rows]
    counts = [len(positions) for positions in trained]

    def picked(name: str, dtype: torch.dtype) -> Tensor:
        parts = [getattr(row, name)[where] for row, where in zip(rows, trained, strict=True)]
        return torch.cat([*parts, torch.empty(0)]).to(dtype) if dtype.is_floating_point else _cat(parts)

    def spread(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(counts, dtype=torch.int64))

    numbers_N = _sequences(rows, trained, starts, level)
    _, sequence_N, tokens_Q = torch.unique_consecutive(numbers_N, return_inverse=True, return_counts=True)
    return PackedBatch(
        input_ids_1S=_cat(trie.ids)[None],
        position_ids_1S=_cat(trie.positions)[None],
        starts_Q1=torch.tensor(trie.starts, dtype=torch.int32),
        paths=tuple(trie.paths),
        predictor_N=_cat([found[where - 1] for found, where in zip(trie.found, trained, strict=True)]),
        targets_N=picked("token_ids_T", torch.int64),
        sampling_logprobs_N=picked("sampling_logprobs_T", torch.float32),
        temperatures_N=picked("temperatures_T", torch.float32),
        advantages_N=spread([advantages[row.trial_id] for row in rows]),
        weights_N=spread(weights),
        sequence_N=sequence_N,
        sequence_tokens_N=tokens_Q[sequence_N],
        sequences=len(tokens_Q),
    )


@dataclass
class _Trie:
    """Segments, as they are laid out. found: of each row, int64 [T], where in S its tokens are."""

    ids: list[Tensor]
    positions: list[Tensor]
    starts: list[int]
    paths: list[tuple[Range, ...]]
    found: list[Tensor]


def _trie(rows: Sequence[TrainingRow], share: bool) -> _Trie:
    if not rows:
        empty = torch.zeros(DUMMY_TOKENS, dtype=torch.int64)
        return _Trie([empty], [torch.arange(DUMMY_TOKENS)], [0, DUMMY_TOKENS], [()], [])
    forest = Forest.of([row.token_ids_T.numpy() for row in rows]) if share else Forest.apart(len(rows))
    made = _Trie([], [], [0], [], [torch.empty(0)] * len(rows))
    last = torch.empty(0, dtype=torch.int64)  # where the tokens of the row before are
    path: list[Range] = []  # the same as ranges
    for i, shared in zip(forest.order, forest.shared, strict=True):
        row, end = rows[i], made.starts[-1]
        new = row.tokens - shared
        goes_on = 0 < shared == len(last)  # the row before is a part of this one
        made.found[i] = last = torch.cat([last[:shared], torch.arange(end, end + new)])
        path = _first(path, shared)
        if new:
            made.ids.append(row.token_ids_T[shared:])
            made.positions.append(torch.arange(shared, row.tokens))
            if goes_on and path[-1][1] == end:
                made.starts[-1] = end + new
                path = [*path[:-1], (path[-1][0], end + new)]
            else:
                made.starts.append(end + new)
                made.paths.append(tuple(path))
                path = [*path, (end, end + new)]
    return made


def _first(path: Sequence[Range], tokens: int) -> list[Range]:
    """Of a path its first tokens."""
    found: list[Range] = []
    for start, end in path:
        if tokens > 0:
            found.append((start, min(end, start + tokens)))
        tokens -= end - start
    return found


def _sequences(
    rows: Sequence[TrainingRow], trained: Sequence[Tensor], starts: Sequence[int], level: RatioLevel
) -> Tensor:
    """For each trained token, a number of its sequence: where it starts if all rows lie end to end, unshared. int64 [N]"""

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
