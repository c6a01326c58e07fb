"""Attention over packed tries: each token sees what leads to it and itself, and nothing of this costs [tokens, tokens].

A segment's queries are its own tokens; its keys and values are gathered along its path (`paths`), from the start of its samples
to its end. So a call has as many queries as keys, or fewer, and each query sees the keys up to its own, counted from the end
("causal, aligned to the lower right"). Where nothing is shared nothing is gathered.

transformers' own attention takes packed samples by a mask of [S, S], which for 32,768 tokens is a gigabyte per layer and rules
out the kernels that need none. So this function is registered with it under a name of its own and told where samples start.

With sequence parallelism (Ulysses, arXiv:2309.14509) a rank holds S / P consecutive tokens of a micro-batch; around attention
ranks swap tokens for heads, so that each computes whole samples for 1 / P of the heads. Everything else in a transformer is per
token.

Shapes: S packed tokens (on this rank), K tokens of all segments' paths, themselves included, P ranks that share a micro-batch,
Q segments, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from steno_trainer.errors import BadBatch
from steno_trainer.model.paths import Made, Paths, Range, forgotten

NAME = "steno_packed"
TILE = 256
"""Queries of a call that needs a mask: masks are [TILE, keys], and half a tile of keys is computed for nothing."""


@dataclass(frozen=True)
class Segments:
    """Which tokens see which. starts: where each segment starts, from 0 on, and last the S of all ranks; starts_Q1: the same as
    int32 on the device. paths: for each segment the ranges of S that lead to it. group: the process group of the ranks that share
    the micro-batch; None: it is not cut. windows: a list that gets the sliding window of each call of attention (None: no
    window); None: nothing is noted."""

    starts: tuple[int, ...]
    starts_Q1: Tensor
    paths: tuple[tuple[Range, ...], ...]
    group: Any = None
    windows: list[int | None] | None = None

    @property
    def branches(self) -> bool:
        """Whether anything is shared."""
        return any(self.paths)

    @cached_property
    def key_starts(self) -> tuple[int, ...]:
        """Where each segment's path starts among the K; K last."""
        lengths = (sum(end - start for start, end in pieces) for pieces in self.whole_paths)
        return (0, *accumulate(lengths))

    @cached_property
    def key_starts_Q1(self) -> Tensor:
        if not self.branches:
            return self.starts_Q1
        return torch.tensor(self.key_starts, dtype=torch.int32, device=self.starts_Q1.device)

    @cached_property
    def pieces(self) -> list[Range]:
        """The ranges of S of which the K consist, in order."""
        return [piece for path in self.whole_paths for piece in path]

    @cached_property
    def whole_paths(self) -> list[list[Range]]:
        """For each segment the ranges of its path, itself included."""
        return [[*path, own] for path, own in zip(self.paths, pairwise(self.starts), strict=True)]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest path."""
        return max(end - start for start, end in pairwise(self.key_starts))

    @property
    def longest_own(self) -> int:
        """Tokens of the longest segment."""
        return max(end - start for start, end in pairwise(self.starts))

    def for_kernels(self) -> dict[str, Any]:
        """Where segments start, under the names by which transformers' layers pass it to kernels of recurrent layers and
        convolutions. These kernels use it where installed; torch fallbacks ignore it. Empty if ranks or samples share tokens."""
        if self.group is not None or self.branches:
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
    pieces = segments.pieces
    made = [Paths(x).along(pieces) if segments.branches else Made(x) for x in (key_GSD, value_GSD)]
    q, k, v = (x.transpose(0, 1) for x in (query_HSD, *(one.tensor for one in made)))
    with forgotten(*made):
        out = variable_lengths(
            q, k, v, segments.starts_Q1, segments.key_starts_Q1, segments.longest_own, segments.longest, scaling, window
        )
    return out.transpose(0, 1)


def variable_lengths(
    query_SHD: Tensor, key_KGD: Tensor, value_KGD: Tensor, starts_Q1: Tensor, key_starts_Q1: Tensor, longest_own: int,
    longest: int, scaling: float | None, window: int | None,
) -> Tensor:  # fmt: skip
    """torch's variable-length FlashAttention, on CUDA, in bfloat16 or float16: the one place that calls it. Its documentation
    does not say how fewer queries than keys are aligned: `sharing` asks the kernel itself before anything is shared."""
    from torch.nn.attention.varlen import varlen_attn

    seen = (-1 if window is None else window - 1, 0)  # of those before a token, and of those after it
    grouped = key_KGD.shape[1] != query_SHD.shape[1]
    out = varlen_attn(
        query_SHD, key_KGD, value_KGD, starts_Q1, key_starts_Q1, longest_own, longest, scale=scaling, window_size=seen,
        enable_gqa=grouped,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _one_by_one(
    query_HSD: Tensor, key_GSD: Tensor, value_GSD: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    # Heads are repeated here: given grouped ones, kernels for float32 and for CPUs fall back to one that makes [tokens, tokens].
    repeats = len(query_HSD) // len(key_GSD)
    readers = [(_along if segments.branches else _apart)(x, segments, repeats) for x in (key_GSD, value_GSD)]
    parts: list[Tensor] = []
    own, whole = ([end - start for start, end in pairwise(s)] for s in (segments.starts, segments.key_starts))
    for number, q_HTD in enumerate(torch.split(query_HSD, own, 1)):
        before = whole[number] - own[number]
        plain = not before and (window is None or window >= own[number])
        last = before
        for tile in torch.split(q_HTD[None], own[number] if plain else window or TILE, 2):
            first, last = last, last + tile.shape[2]
            reached = 0 if window is None else max(0, first - window + 1)
            keys, values = (read(number, reached, last) for read in readers)
            seen = None if plain else Made.of(partial(_mask, first, last, reached, window, tile))
            with forgotten(keys, values, *([seen] if seen is not None else [])):
                found = F.scaled_dot_product_attention(
                    tile, keys.tensor[None], values.tensor[None], attn_mask=None if seen is None else seen.tensor,
                    is_causal=plain, scale=scaling,
                )  # fmt: skip
            parts.append(found[0])
    return torch.cat(parts, 1)


Reader = Callable[[int, int, int], Made]
"""(segment number, first, last) -> keys or values of the tokens [first, last) of that segment's path: [H, K, D]."""


def _along(x_GSD: Tensor, segments: Segments, repeats: int) -> Reader:
    paths = Paths(x_GSD)
    return lambda number, first, last: paths.along(between(segments.whole_paths[number], first, last), repeats)


def _apart(x_GSD: Tensor, segments: Segments, repeats: int) -> Reader:
    """Where nothing is shared: nothing is gathered."""
    x_HSD = x_GSD.repeat_interleave(repeats, 0) if repeats > 1 else x_GSD
    parts = torch.split(x_HSD, [end - start for start, end in pairwise(segments.starts)], 1)

    def read(number: int, first: int, last: int) -> Made:
        whole = parts[number]
        return Made(whole if last - first == whole.shape[1] else whole[:, first:last])

    return read


def between(path: Sequence[Range], first: int, last: int) -> list[Range]:
    """The tokens of a path from `first` to before `last`, as ranges."""
    found: list[Range] = []
    at = 0
    for start, end in path:
        low, high = max(start, start + first - at), min(end, start + last - at)
        if low < high:
            found.append((low, high))
        at += end - start
    return found


def _mask(first: int, last: int, reached: int, window: int | None, like: Tensor) -> Tensor:
    """For queries first … last of a path and its keys from `reached` on: 0 where one is seen, -inf elsewhere. [T, K]"""
    own = torch.arange(first, last, device=like.device)
    away = own[:, None] - torch.arange(reached, last, device=like.device)
    unseen = (away < 0) if window is None else (away < 0) | (away >= window)
    return torch.zeros(unseen.shape, dtype=like.dtype, device=like.device).masked_fill_(unseen, -torch.inf)


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
