"""Which weights a checkpoint in Hugging Face's layout has: two of the same digest are the same model, however they are cut into
files. Reads files, and needs neither torch nor safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
READ_BYTES = 4 << 20
"""At a time."""


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model; there may be others beside them. Raises: OSError, ValueError, KeyError: an
    index that is none."""
    if (folder / INDEX).is_file():
        names = json.loads((folder / INDEX).read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    return [folder / WHOLE]


def checkpoint_digest(folder: Path) -> str:
    """Of every tensor's name, type, shape and bytes: 32 hexadecimal digits. Reads all files, about 1 GB a second.

    Raises: ValueError: a file that is no safetensors file, or no such folder; it is named.
    """
    try:
        lines = sorted(line for path in checkpoint_files(folder) for line in _tensors(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: can't read its weights, which must be safetensors files: {error}") from error
    return blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _tensors(path: Path) -> Iterator[str]:
    """https://github.com/huggingface/safetensors#format"""
    with path.open("rb", buffering=0) as file:
        data_start = 8 + int.from_bytes(file.read(8), "little")
        if data_start > path.stat().st_size:
            raise ValueError(f"{path.name} is no safetensors file")
        header: dict[str, Any] = json.loads(file.read(data_start - 8))
        for name, about in header.items():
            if name == "__metadata__":
                continue
            start, end = about["data_offsets"]
            file.seek(data_start + start)
            digest, left = blake2b(digest_size=16), end - start
            while left:
                piece = file.read(min(left, READ_BYTES))
                if not piece:
                    raise ValueError(f"{path.name} ends before tensor {name!r} does")
                digest.update(piece)
                left -= len(piece)
            yield f"{name}\0{about['dtype']}\0{about['shape']}\0{digest.hexdigest()}"
