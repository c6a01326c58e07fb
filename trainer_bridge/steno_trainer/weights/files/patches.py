"""What changed in one shard since it was last pushed, as a file (`steno/contracts/weight_patch.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from torch import Tensor

from steno.contracts import weight_patch
from steno.contracts.policy import ShardEntry, TensorEntry
from steno.contracts.weight_patch import PackedBlock, PatchedTensor, PatchHeader
from steno_trainer.weights.files.shards import DIGEST_BYTES, check_numbers, tensor_bytes, tensor_entry


def patch_name(number: int, index: int, count: int) -> str:
    """number: of the patch since the full copy, from 1; the rest as `shard_name` has it."""
    return f"patch-{number:03d}-{index + 1:05d}-of-{count:05d}.patch"


def write_patch(
    path: Path, before: Mapping[str, Tensor], now: Mapping[str, Tensor]
) -> tuple[ShardEntry, list[TensorEntry]]:
    """What makes `now` of `before`, bit for bit. In memory: the file, which is small, and no copy of a tensor.

    Args: both on the CPU, contiguous, with the same names, dtypes and shapes.
    Returns: what the manifest says of the file, and of `now`, in its order.
    Raises: OSError; WeightsUnavailable: values that are no numbers.
    """
    header, parts, entries = PatchHeader(), list[bytes](), list[TensorEntry]()
    for name, tensor in now.items():
        check_numbers(name, tensor)
        raw = tensor_bytes(tensor)
        entries.append(tensor_entry(name, tensor, blake2b(raw, digest_size=DIGEST_BYTES).hexdigest()))
        width = tensor.dtype.itemsize
        blocks = _blocks(weight_patch.bits_of(tensor_bytes(before[name]), width), weight_patch.bits_of(raw, width))
        if blocks:
            about = [block.about for block in blocks]
            header.tensors.append(PatchedTensor(name=name, width=width, elements=tensor.numel(), blocks=about))
            parts += [part for block in blocks for part in (block.places, block.differences)]
    digest, size = blake2b(digest_size=DIGEST_BYTES), 0
    with path.open("wb") as file:
        for part in (weight_patch.header_bytes(header), *parts):
            digest.update(part)
            size += file.write(part)
    return ShardEntry(name=path.name, size=size, digest=digest.hexdigest()), entries


def _blocks(before: weight_patch.Bits, now: weight_patch.Bits) -> list[PackedBlock]:
    packed = (
        weight_patch.pack_block(index, before[start:stop], now[start:stop])
        for index, start, stop in weight_patch.blocks_of(len(now))
    )
    return [block for block in packed if block is not None]
