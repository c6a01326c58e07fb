"""Attention over packed samples: each token sees its own sample up to itself, and nothing of this costs [tokens, tokens].

transformers' own attention takes packed samples by a mask of [S, S], which for 32,768 tokens is a gigabyte per layer and rules
out the kernels that need none. So this function is registered with it under a name of its own and told where samples start.

With sequence parallelism (Ulysses, arXiv:2309.14509) a rank holds S / P consecutive tokens of a micro-batch; around attention
ranks swap tokens for heads, so that each computes whole samples for 1 / P of the heads. Everything else in a transformer is per
token.

Shapes: S packed tokens (on this rank), P ranks that share them, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from steno_trainer.errors import BadBatch

NAME = "steno_packed"


@dataclass(frozen=True)
class Segments:
    """Where samples start. starts: cumulative, from 0 to the S of all ranks; starts_Q1: the same as int32 on the device. group:
    of the ranks that share the micro-batch; None: it is whole. windows: filled with the sliding window that attention is told of
    in each of its calls (None: of none), where somebody wants to know."""

    starts: tuple[int, ...]
    starts_Q1: Tensor
    group: Any = None
    windows: list[int | None] | None = None

    @property
    def longest(self) -> int:
        return max(end - start for start, end in pairwise(self.starts))

    def for_kernels(self) -> dict[str, Any]:
        """The same under the names by which transformers' layers hand it on to kernels of recurrent layers and convolutions.
        Those heed it where they are installed, and torch fallbacks drop it. Empty where ranks share tokens."""
        if self.group is not None:
            return {}
        lengths = self.starts_Q1.diff().long()
        numbers_1S = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device).repeat_interleave(lengths)[
            None
        ]
        edges = {"cu_seq_lens_q": self.starts_Q1, "cu_seq_lens_k": self.starts_Q1}
        return edges | {"max_length_q": self.longest, "max_length_k": self.longest, "seq_idx": numbers_1S}


def register() -> None:
    """Make `NAME` known to transformers. Without a mask function of that name it makes no masks at all, which is what we want."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: nn.Module,
    query_1HSD: Tensor,
    key_1GSD: Tensor,
    value_1GSD: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls its attention functions. Returns: [1, S, H, D].

    sliding_window: a token sees itself and those before it, so many in all; None: all of its sample.

    Raises: BadBatch: the model does not hand `segments` on, or asks for what is not covered (dropout, a soft cap, sinks): wrong
        probabilities would be the alternative.
    """
    if segments is None:
        raise BadBatch(
            f"{type(module).__name__} does not pass its keyword arguments on to attention; this model is not supported"
        )
    asked = {"dropout": bool(dropout), "a soft cap": bool(softcap), "sinks": s_aux is not None}
    if any(asked.values()):
        named = " and ".join(what for what, there in asked.items() if there)
        raise BadBatch(f"{type(module).__name__}: attention with {named} is not supported")
    if segments.windows is not None:
        segments.windows.append(sliding_window)
    window = sliding_window if sliding_window is not None and sliding_window < segments.longest else None
    group = segments.group
    query_HSD, key_GSD, value_GSD = query_1HSD[0], key_1GSD[0], value_1GSD[0]
    if group is not None:
        ranks = dist.get_world_size(group)
        repeats = max(1, ranks // len(key_GSD))  # fewer key heads than ranks: each goes to several
        key_GSD, value_GSD = (x.repeat_interleave(repeats, 0) if repeats > 1 else x for x in (key_GSD, value_GSD))
        query_HSD, key_GSD, value_GSD = (heads_for_tokens(x, group) for x in (query_HSD, key_GSD, value_GSD))
    if query_HSD.is_cuda and query_HSD.dtype in (torch.bfloat16, torch.float16):
        out_HSD = _one_kernel(query_HSD, key_GSD, value_GSD, segments, scaling, window)
    else:
        out_HSD = _one_by_one(query_HSD, key_GSD, value_GSD, segments, scaling, window)
    if group is not None:
        out_HSD = tokens_for_heads(out_HSD, group)
    return out_HSD.transpose(0, 1)[None].contiguous(), None


def _one_kernel(
    query_HSD: Tensor, key_GSD: Tensor, value_GSD: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x.transpose(0, 1) for x in (query_HSD, key_GSD, value_GSD))
    starts, longest = segments.starts_Q1, segments.longest
    grouped = len(key_GSD) != len(query_HSD)
    seen = (-1 if window is None else window - 1, 0)  # of those before a token, and of those after it
    out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=seen, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)


def _one_by_one(
    query_HSD: Tensor, key_GSD: Tensor, value_GSD: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    # Heads are repeated here: given grouped ones, kernels for float32 and for CPUs fall back to one that makes [tokens, tokens].
    repeats = len(query_HSD) // len(key_GSD)
    key_HSD, value_HSD = (x.repeat_interleave(repeats, 0) if repeats > 1 else x for x in (key_GSD, value_GSD))
    parts = []
    for start, end in pairwise(segments.starts):
        q, k, v = (x[None, :, start:end] for x in (query_HSD, key_HSD, value_HSD))
        if window is None or window >= end - start:
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)[0])
        else:
            parts.extend(_through_window(q, k, v, scaling, window))
    return torch.cat(parts, 1)


def _through_window(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int) -> Iterator[Tensor]:
    """Of one sample, [1, H, T, D], a window of tokens at a time: each costs [window, 2 window], and not [T, T]."""
    tokens = q.shape[2]
    for first in range(0, tokens, window):
        last, reached = min(first + window, tokens), max(0, first - window + 1)
        away = torch.arange(first, last, device=q.device)[:, None] - torch.arange(reached, last, device=q.device)
        mask = (away >= 0) & (away < window)
        keys, values = k[:, :, reached:last], v[:, :, reached:last]
        yield F.scaled_dot_product_attention(q[:, :, first:last], keys, values, attn_mask=mask, scale=scaling)[0]


def heads_for_tokens(x_HSD: Tensor, group: Any) -> Tensor:
    """[H, S, D] of this rank's tokens and all heads -> [H / P, P S, D] of all tokens and this rank's heads. A collective."""
    ranks = dist.get_world_size(group)
    received = _Swap.apply(x_HSD.contiguous(), group)  # type: ignore[no-untyped-call]
    heads, tokens, size = x_HSD.shape
    swapped: Tensor = (
        received.view(ranks, heads // ranks, tokens, size).transpose(0, 1).reshape(heads // ranks, ranks * tokens, size)
    )
    return swapped


def tokens_for_heads(x_HSD: Tensor, group: Any) -> Tensor:
    """The way back: [H, S, D] -> [P H, S / P, D]. A collective."""
    ranks = dist.get_world_size(group)
    heads, tokens, size = x_HSD.shape
    by_rank = x_HSD.view(heads, ranks, tokens // ranks, size).transpose(0, 1).contiguous()
    received: Tensor = _Swap.apply(by_rank, group)  # type: ignore[no-untyped-call]
    return received.view(ranks * heads, tokens // ranks, size)


class _Swap(torch.autograd.Function):
    """The i-th part of the first dimension goes to rank i; what comes back is in the order of ranks. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()  # before empty_like, which would take over its strides
        sent = torch.empty_like(grad)
        dist.all_to_all_single(sent, grad, group=ctx.group)
        return sent, None
