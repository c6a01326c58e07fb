"""Weights as an update carries them, written by hand: raw safetensors files with their manifest. No torch."""

from __future__ import annotations

import json
import math
from hashlib import blake2b
from pathlib import Path

from steno.contracts.policy import Manifest, ShardEntry, TensorEntry, UpdateSpec

SIZES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "int64": ("I64", 8)}
Tensor = tuple[str, list[int], bytes]
"""dtype, shape, bytes"""


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def tensor(shape: list[int], fill: int = 0, dtype: str = "float32") -> Tensor:
    """Bytes that differ from each other, and by `fill`."""
    count = math.prod(shape) * SIZES[dtype][1]
    return dtype, shape, bytes((i * 7 + fill) % 251 for i in range(count))


def shard_bytes(tensors: dict[str, Tensor]) -> bytes:
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": SIZES[dtype][0], "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def manifest_of(shards: dict[str, dict[str, Tensor]]) -> Manifest:
    files = {name: shard_bytes(tensors) for name, tensors in shards.items()}
    return Manifest(
        tensors=[
            TensorEntry(name=name, dtype=dtype, shape=shape, digest=digest(data))
            for tensors in shards.values()
            for name, (dtype, shape, data) in tensors.items()
        ],
        shards=[ShardEntry(name=name, size=len(data), digest=digest(data)) for name, data in files.items()],
    )


def write(folder: Path, shards: dict[str, dict[str, Tensor]]) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        (folder / name).write_bytes(shard_bytes(tensors))
    return manifest_of(shards)


def two_shards(fill: int = 0) -> dict[str, dict[str, Tensor]]:
    return {
        "a.safetensors": {"x": tensor([30, 40], fill), "empty": tensor([0], fill), "n": tensor([7], fill, "int64")},
        "b.safetensors": {"y": tensor([11, 3], fill, "bfloat16")},
    }


def spec(manifest: Manifest, step: int = 1, **fields: object) -> UpdateSpec:
    given: dict[str, object] = {"lineage": "run", "step": step, "transport": "stream", "manifest": manifest}
    return UpdateSpec.model_validate(given | fields)
