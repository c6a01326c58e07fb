"""Safetensors shards with their digests, written in one pass.

A shard is one bucket of the source. What a worker checks (contracts/policy.py) is computed from the very bytes that go to the
file: blake2b of each tensor and of the whole file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from steno.contracts.policy import ShardEntry, TensorEntry
from steno_trainer.errors import WeightsUnavailable
from steno_trainer.weights.source import TensorMeta

DIGEST_BYTES = 16
WRITE_BYTES = 4 << 20
"""At a time: hashed while it is in the processor's cache, and small enough that other threads get their turn."""
PART_ELEMENTS = 1 << 24
"""How many elements of a tensor are checked for NaN and infinity in one go."""
SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def shard_name(index: int, count: int) -> str:
    """As transformers names them, counted from 1."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> tuple[ShardEntry, list[TensorEntry]]:
    """One file. It is not synced to the disk: nobody reads it after a power cut without checking its digest.

    Args: tensors: on the CPU, contiguous.
    Returns: what the manifest says of it; tensors in the order of the argument.
    Raises: OSError; WeightsUnavailable: a dtype that safetensors does not know, or values that are no numbers.
    """
    for name, tensor in tensors.items():
        check_numbers(name, tensor)
    # Widest first: readers map the file, and torch wants each tensor at a multiple of its element's size.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header, size = _header(order, tensors)
    whole = blake2b(header, digest_size=DIGEST_BYTES)
    digests: dict[str, str] = {}
    with path.open("wb") as file:
        file.write(header)
        for name in order:
            one = blake2b(digest_size=DIGEST_BYTES)
            raw = tensor_bytes(tensors[name])
            for start in range(0, len(raw), WRITE_BYTES):
                piece = raw[start : start + WRITE_BYTES]
                one.update(piece)
                whole.update(piece)
                file.write(piece)
            digests[name] = one.hexdigest()
    entries = [tensor_entry(name, tensor, digests[name]) for name, tensor in tensors.items()]
    return ShardEntry(name=path.name, size=len(header) + size, digest=whole.hexdigest()), entries


def tensor_entry(name: str, tensor: Tensor, digest: str) -> TensorEntry:
    """What the manifest says of it."""
    return TensorEntry(name=name, dtype=_meta(name, tensor).dtype_name, shape=list(tensor.shape), digest=digest)


def check_numbers(name: str, tensor: Tensor) -> None:
    """Raises: WeightsUnavailable: NaN or infinite values."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    for part in torch.split(tensor.detach().flatten(), PART_ELEMENTS):
        # One pass and no copy: NaN comes through minimum and maximum. The narrowest types have neither.
        least, most = (part.float() if part.dtype.itemsize == 1 else part).aminmax()
        if not (least.isfinite() and most.isfinite()):
            raise WeightsUnavailable(f"{name} has NaN or infinite values: the weights are not sent")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor of the CPU as its bytes, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _meta(name: str, tensor: Tensor) -> TensorMeta:
    return TensorMeta(name, tensor.dtype, tuple(tensor.shape))


def _header(order: list[str], tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """(length and JSON, bytes of data that follow). https://github.com/huggingface/safetensors#format"""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise WeightsUnavailable(f"{name}: safetensors has no {tensor.dtype}")
        end = offset + _meta(name, tensor).nbytes
        fields[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offset
