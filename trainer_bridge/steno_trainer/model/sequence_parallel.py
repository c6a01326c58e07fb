"""One micro-batch, cut by tokens for the ranks that share it (Ulysses sequence parallelism). Pure.

Shapes: S packed tokens, P ranks, N trained tokens; S / P tokens are a rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from steno_trainer.model.attention import Segments
from steno_trainer.packing.collate import PackedBatch

BY_TOKEN = [field.name for field in fields(PackedBatch) if field.name.endswith("_N") and field.name != "predictor_N"]
"""Fields that a rank takes unchanged for its trained tokens. `predictor_N` is not one: it counts from the rank's first token."""


@dataclass(frozen=True)
class RankShare:
    """A rank's part of a micro-batch. packed: its tokens, and the trained tokens that these predict; its starts are those of
    the whole. segments: of the whole micro-batch, padded. chosen: which of the micro-batch's trained tokens these are, int64."""

    packed: PackedBatch
    segments: Segments
    chosen: Tensor


def take_share(packed: PackedBatch, *, ranks: int = 1, rank: int = 0, group: Any = None) -> RankShare:
    """The part of the rank-th of `ranks`. The end is padded with a sample of its own, so that parts are equally long."""
    starts_Q1, ids_1S, positions_1S = packed.starts_Q1, packed.input_ids_1S, packed.position_ids_1S
    paths = packed.paths
    missing = -ids_1S.shape[1] % ranks
    if missing:
        ids_1S = F.pad(ids_1S, (0, missing))
        positions_1S = torch.cat([positions_1S, torch.arange(missing, device=ids_1S.device)[None]], 1)
        starts_Q1 = torch.cat([starts_Q1, starts_Q1[-1:] + missing])
        paths = (*paths, ())
    segments = Segments(tuple(starts_Q1.tolist()), starts_Q1, paths, group)
    length = ids_1S.shape[1] // ranks
    first = rank * length
    chosen = ((packed.predictor_N >= first) & (packed.predictor_N < first + length)).nonzero()[:, 0]
    mine = replace(
        packed,
        input_ids_1S=ids_1S[:, first : first + length],
        position_ids_1S=positions_1S[:, first : first + length],
        starts_Q1=starts_Q1,
        paths=paths,
        predictor_N=packed.predictor_N[chosen] - first,
        **{name: getattr(packed, name)[chosen] for name in BY_TOKEN},
    )
    return RankShare(mine, segments, chosen)
