"""A model's weights under the names its checkpoint has for them, bucket by bucket, plain or partitioned by ZeRO-3.

Gathering a partitioned parameter is a collective: all ranks iterate in the same order and to the end, or the others wait for
ever. So the order and the cut into buckets come from names and shapes alone, which are the same everywhere. At most one bucket is
gathered at a time; a tensor larger than a bucket is a bucket of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from steno_trainer.errors import WeightsUnavailable

DEFAULT_BUCKET_BYTES = 256 << 20
"""A 7B model in bf16 is 60 of them; large enough for the network, small beside what an optimiser step needs."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor as it leaves: its checkpoint's name, the dtype it is sent in, its full shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class WeightSource(Protocol):
    """What transports read. `plan` is free; `buckets` is a collective of all ranks, and yields what `plan` said."""

    def plan(self) -> list[list[TensorMeta]]:
        """Every tensor, once, by bucket. The same on all ranks."""
        ...

    def buckets(self) -> Iterator[dict[str, Tensor]]:
        """The buckets of `plan`, in its order. Tensors are valid until the next bucket is asked for."""
        ...


@dataclass(frozen=True)
class _Unit:
    """One tensor of the module and the tensors that the checkpoint makes of it (one, but for fused experts and their like)."""

    key: str
    tensor: Tensor
    metas: tuple[TensorMeta, ...]
    nbytes: int  # gathered, in the module's own dtype, or as sent, whichever is more


class ModelWeights:
    """The `WeightSource` of a torch module: parameters and persistent buffers, tied ones once.

    Where the module is a transformers model that was converted while it was loaded (renamed, experts fused), its tensors are
    converted back, so that any engine that loads the checkpoint loads these.
    """

    def __init__(
        self, module: nn.Module, *, dtype: torch.dtype | None = None, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        """
        Args:
            module: the model itself, not DeepSpeed's engine around it.
            dtype: of floating-point tensors as they are sent; None: as they are.
            bucket_bytes: of gathered tensors at a time.
        Raises: WeightsUnavailable: two tensors of the same name, or one that can't be converted to its checkpoint's form.
        """
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes: {bucket_bytes} is less than 1")
        self._module = module
        self._dtype = dtype
        self._converts = _converts(module)
        self._buckets = _cut([self._unit(key, tensor) for key, tensor in self._tensors(module)], bucket_bytes)
        names = [meta.name for bucket in self.plan() for meta in bucket]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise WeightsUnavailable(f"{twice}: two tensors of the model have this name in its checkpoint")

    def _tensors(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """By name, in the order in which they leave."""
        return named_tensors(module)

    def plan(self) -> list[list[TensorMeta]]:
        return [[meta for unit in bucket for meta in unit.metas] for bucket in self._buckets]

    def buckets(self) -> Iterator[dict[str, Tensor]]:
        for bucket in self._buckets:
            with (
                gathered([tensor for unit in bucket for tensor in self._needed(unit.key, unit.tensor)]),
                torch.no_grad(),
            ):
                yield {name: tensor for unit in bucket for name, tensor in self._sent(unit)}

    def _needed(self, key: str, tensor: Tensor) -> list[Tensor]:
        """What is gathered to send a tensor."""
        return [tensor]

    def _whole(self, key: str, tensor: Tensor) -> Tensor:
        """What is sent for a tensor that has been gathered."""
        return tensor.detach()

    def _sent(self, unit: _Unit) -> Iterator[tuple[str, Tensor]]:
        tensors = self._in_checkpoint(unit.key, self._whole(unit.key, unit.tensor))
        for meta in unit.metas:
            tensor = tensors[meta.name]
            if tuple(tensor.shape) != meta.shape:
                raise WeightsUnavailable(f"{meta.name}: shape {tuple(tensor.shape)} where {meta.shape} was announced")
            yield meta.name, tensor.to(meta.dtype).contiguous()

    def _unit(self, key: str, tensor: Tensor) -> _Unit:
        full = torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta")
        metas = tuple(
            TensorMeta(name, self._sent_dtype(made.dtype), tuple(made.shape))
            for name, made in self._in_checkpoint(key, full).items()
        )
        gathered = full.numel() * full.dtype.itemsize
        return _Unit(key, tensor, metas, max(gathered, sum(meta.nbytes for meta in metas)))

    def _in_checkpoint(self, key: str, tensor: Tensor) -> dict[str, Tensor]:
        if not self._converts:
            return {key: tensor}
        from transformers.core_model_loading import revert_weight_conversion

        try:
            return dict(revert_weight_conversion(self._module, {key: tensor}))
        except (KeyError, ValueError, RuntimeError, IndexError) as error:
            raise WeightsUnavailable(f"{key}: can't be converted to its checkpoint format: {error}") from error

    def _sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype


def full_shape(tensor: Tensor) -> tuple[int, ...]:
    """Of a parameter that may be partitioned: ZeRO-3 leaves an empty tensor in its place and notes the shape beside it."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers in the module's order, tied ones under the name that its checkpoint keeps."""
    tied = getattr(module, "_tied_weights_keys", None) or {}
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        known = first.get(id(tensor))
        if known is None or (known[0] in tied and name not in tied):
            first[id(tensor)] = (name, tensor)
    return list(first.values())


def _converts(module: nn.Module) -> bool:
    """Whether the model's tensors differ from its checkpoint's. `_weight_conversions` is what transformers' loader leaves."""
    if not hasattr(module, "base_model_prefix"):  # no transformers model
        return False
    conversions = getattr(module, "_weight_conversions", None)
    if conversions is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions = get_model_conversion_mapping(module, add_legacy=False)
    return bool(conversions)


def _cut(units: list[_Unit], bucket_bytes: int) -> list[list[_Unit]]:
    buckets: list[list[_Unit]] = []
    room = 0
    for unit in units:
        if not buckets or unit.nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(unit)
        room -= unit.nbytes
    return buckets


def gathered(tensors: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Whole on every rank inside the block, partitioned again after it."""
    partitioned = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not partitioned:
        return contextlib.nullcontext()
    import deepspeed

    context: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(partitioned)
    return context
