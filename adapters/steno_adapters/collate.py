"""Rows as tensors of a batch, padded or packed. Advantages are the caller's: one number per row.

Shapes: B rows, L tokens of the longest one, T tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steno.contracts.errors import BadRequest
from steno_adapters.rows import TrainableRow


@dataclass(frozen=True)
class PaddedRows:
    """[B, L] each, a row's tokens at the left. token_ids int64; attention_mask bool; loss_mask bool, never at position 0;
    logprobs, advantages, temperatures float32. Outside the loss mask logprobs and advantages are 0 and mean nothing."""

    token_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor


@dataclass(frozen=True)
class PackedRows:
    """[1, T] each, one row after the other; as `PaddedRows`. position_ids int64 begin at 0 with each row: by them transformers'
    attention keeps rows apart (see docs/other-trainers.md for which models it does). cu_seqlens int32 [B + 1]: where rows begin
    and end. The loss mask is never set at a row's first position."""

    token_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor


def padded(rows: Sequence[TrainableRow], advantages: Sequence[float], *, pad_token_id: int = 0) -> PaddedRows:
    """Args: advantages: one per row, in their order. Raises: BadRequest: another number of them; no row."""
    columns = _columns(rows, advantages)
    longest = max(map(len, rows))
    fill = {"token_ids": pad_token_id, "temperatures": 1.0}

    def together(name: str) -> Tensor:
        parts = columns[name]
        whole = np.full((len(rows), longest), fill.get(name, 0), parts[0].dtype)
        for place, part in zip(whole, parts, strict=True):
            place[: len(part)] = part
        return torch.from_numpy(whole)

    lengths = torch.tensor([len(row) for row in rows])
    return PaddedRows(
        attention_mask=torch.arange(longest)[None] < lengths[:, None], **{name: together(name) for name in columns}
    )


def packed(rows: Sequence[TrainableRow], advantages: Sequence[float]) -> PackedRows:
    """Args: advantages: one per row, in their order. Raises: BadRequest: another number of them; no row."""
    columns = _columns(rows, advantages)
    lengths = [len(row) for row in rows]
    return PackedRows(
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        **{name: torch.from_numpy(np.concatenate(parts))[None] for name, parts in columns.items()},
    )


def _columns(rows: Sequence[TrainableRow], advantages: Sequence[float]) -> dict[str, list[NDArray[np.generic]]]:
    """Per row, prompt and response together."""
    if len(advantages) != len(rows) or not rows:
        raise BadRequest(
            f"advantages: got {len(advantages)} for {len(rows)} rows, must be one per row, of at least one row",
            field="advantages",
        )

    def whole(row: TrainableRow, response: NDArray[np.generic], before: float) -> NDArray[np.generic]:
        return np.concatenate([np.full(len(row.prompt_ids), before, response.dtype), response])

    masks = [whole(row, row.response_mask, False) for row in rows]
    return {
        "token_ids": [row.token_ids.astype(np.int64) for row in rows],
        "loss_mask": masks,
        # A product with what stands outside the mask must not be NaN.
        "logprobs": [whole(row, np.where(row.response_mask, row.logprobs, np.float32(0)), 0.0) for row in rows],
        "advantages": [
            np.where(mask, np.float32(value), np.float32(0)) for mask, value in zip(masks, advantages, strict=True)
        ],
        "temperatures": [whole(row, row.temperatures, 1.0) for row in rows],
    }
