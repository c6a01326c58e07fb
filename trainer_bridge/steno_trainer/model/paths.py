"""Keys and values along the paths of a trie: gathered for one call of attention, forgotten after it.

A path lies in several ranges of a micro-batch's tokens, and kernels want it in a row. All paths together are several times as
long as the micro-batch, so nobody holds them all: what a call needs is copied together for it, autograd keeps how to copy it
instead of the copy, and the backward pass copies it again. The gradients of all calls are added up, range by range, in float32.

Shapes: S tokens of a micro-batch, K of the path of a call, G key and value heads, R query heads of each, D head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Range = tuple[int, int]
"""Of S: the first token, and the one after the last."""


@dataclass(frozen=True)
class Made:
    """A tensor, and how to make it again: the same values in the same layout, without a gradient. None: it is kept."""

    tensor: Tensor
    again: Callable[[], Tensor] | None = None

    @classmethod
    def of(cls, make: Callable[[], Tensor]) -> Made:
        return cls(make(), make)


@contextlib.contextmanager
def forgotten(*made: Made) -> Iterator[None]:
    """In this context autograd keeps no tensor of `made` that has an `again`, and no view of it: the backward pass calls that."""
    ways = {one.tensor.untyped_storage().data_ptr(): one.again for one in made if one.again is not None}

    def pack(tensor: Tensor) -> Any:
        again = ways.get(tensor.untyped_storage().data_ptr())
        if again is None:
            return tensor
        return again, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        again, *layout = kept
        found: Tensor = again().as_strided(*layout)
        return found

    if not ways:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class Paths:
    """Gathers one tensor [G, S, D] along paths, and adds up its gradient."""

    def __init__(self, x_GSD: Tensor) -> None:
        self._x_GSD = x_GSD.detach()
        self._sums = _PathGradient(x_GSD.shape)
        self._tie: Tensor = _Collected.apply(x_GSD, self._sums)  # type: ignore[no-untyped-call]

    def along(self, pieces: Sequence[Range], repeats: int = 1) -> Made:
        """Ranges of tokens one after the other, which may overlap those of other calls, each head R times in a row:
        [G R, K, D], for `forgotten`."""

        def make() -> Tensor:
            found_GKD = torch.cat([self._x_GSD[:, start:end] for start, end in pieces], 1)
            return found_GKD.repeat_interleave(repeats, 0) if repeats > 1 else found_GKD

        return Made(_Along.apply(self._tie, make, self._sums, pieces, repeats), make)  # type: ignore[no-untyped-call]


@dataclass
class _PathGradient:
    """The gradient of a tensor of this shape, summed over all calls so far. None: no call has added to it."""

    shape: torch.Size
    grad_GSD: Tensor | None = None


class _Collected(torch.autograd.Function):
    """Returns an empty tensor that every call depends on: so autograd asks for this gradient after those of all calls."""

    @staticmethod
    def forward(ctx: Any, x_GSD: Tensor, sums: _PathGradient) -> Tensor:
        ctx.sums = sums
        return x_GSD.new_empty(0)

    @staticmethod
    @once_differentiable  # keys and values are made again without a graph
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor, None]:
        sums_GSD, ctx.sums.grad_GSD = ctx.sums.grad_GSD, None
        return nothing.new_zeros(ctx.sums.shape) if sums_GSD is None else sums_GSD.to(nothing.dtype), None


class _Along(torch.autograd.Function):
    # Not indexing: its gradient is added up token by token, on CPUs one call each, and in bfloat16 rounded once per branch. Nor a
    # tensor [G, S, D] for each call, which autograd would add up.

    @staticmethod
    def forward(
        ctx: Any, tie: Tensor, make: Callable[[], Tensor], sums: _PathGradient, pieces: Sequence[Range], repeats: int
    ) -> Tensor:
        ctx.sums, ctx.pieces, ctx.repeats = sums, pieces, repeats
        return make()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        wide = torch.promote_types(grad.dtype, torch.float32)
        if ctx.repeats > 1:
            grad = grad.reshape(-1, ctx.repeats, *grad.shape[1:]).sum(1, dtype=wide)
        if ctx.sums.grad_GSD is None:
            ctx.sums.grad_GSD = grad.new_zeros(ctx.sums.shape, dtype=wide)
        at = 0
        for start, end in ctx.pieces:
            ctx.sums.grad_GSD[:, start:end] += grad[:, at : at + end - start]
            at += end - start
        return grad.new_empty(0), None, None, None, None
