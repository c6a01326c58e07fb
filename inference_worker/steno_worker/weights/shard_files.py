"""A file checked byte by byte as it comes: its digest, and of a safetensors shard each tensor's name, dtype, shape and digest.

Fed from a file or from a socket, in pieces of any size; holds one header and two hashes, never a tensor. Needs neither torch nor
safetensors, so that engines without either take updates too. What it can't vouch for it refuses, naming the entry (I10).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from steno.contracts.errors import WeightsRefused
from steno.contracts.policy import Manifest, ShardEntry, TensorEntry

MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
"""safetensors' names -> torch's."""


class FileCheck:
    """One file of an update, fed in order: its size and its digest, whatever it holds.

    Args:
        digest: whether its own is known; if not, only what it holds is checked.
    """

    def __init__(self, shard: ShardEntry, *, digest: bool = True) -> None:
        self.shard = shard
        self.fed = 0
        self._hash = blake2b(digest_size=16) if digest else None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Raises: WeightsRefused: more bytes than the manifest says."""
        if self.fed + len(data) > self.shard.size:
            raise self._refusal(f"has more than the {self.shard.size} bytes that the manifest says (size)")
        if self._hash is not None:
            self._hash.update(data)
        self.fed += len(data)

    def finish(self) -> None:
        """All has been fed. Raises: WeightsRefused: too little, or another digest."""
        if self.fed != self.shard.size:
            raise self._refusal(f"has {self.fed} bytes, the manifest says {self.shard.size} (size)")
        digest = self._hash.hexdigest() if self._hash is not None else self.shard.digest
        if digest != self.shard.digest:
            raise self._refusal(f"has digest {digest}, the manifest says {self.shard.digest} (digest)")

    def _refusal(self, what: str) -> WeightsRefused:
        return file_refusal(self.shard.name, what)


class ShardCheck(FileCheck):
    """One shard. `tensors` are the names it has turned out to hold, once it is `finish`ed.

    Args:
        expected: the whole manifest's tensors by name.
    """

    def __init__(self, shard: ShardEntry, expected: dict[str, TensorEntry], *, digest: bool = True) -> None:
        super().__init__(shard, digest=digest)
        self.tensors: list[str] = []
        self._expected = expected
        self._head = bytearray()
        self._parts: list[tuple[int, TensorEntry]] | None = None  # (end in the file, entry), in the file's order
        self._index = 0
        self._tensor_hash = blake2b(digest_size=16)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Raises: WeightsRefused: a header, or a tensor, that is not what the manifest says; more bytes than it says."""
        position, view = self.fed, memoryview(data)
        super().feed(data)
        if self._parts is None:
            position, view = self._read_header(view)
        if self._parts is not None:
            self._read_tensors(position, view)

    def finish(self) -> None:
        """All has been fed. Raises: WeightsRefused: too little, or another digest."""
        super().finish()
        if self._parts is None or self._index != len(self._parts):
            raise self._refusal("ends before its last tensor")

    def _read_header(self, view: memoryview) -> tuple[int, memoryview]:
        """Take bytes until the header is whole. Returns: where the rest begins in the file, and the rest."""
        start = len(self._head)
        self._head += view[: max(0, 8 - start)]
        if len(self._head) < 8:
            return self.fed, memoryview(b"")
        size = int.from_bytes(self._head[:8], "little")
        if not 2 <= size <= min(MAX_HEADER_BYTES, self.shard.size - 8):
            raise self._refusal(f"is no safetensors file: its header would have {size} bytes")
        taken = len(self._head) - start
        more = min(8 + size - len(self._head), len(view) - taken)
        self._head += view[taken : taken + more]
        if len(self._head) < 8 + size:
            return self.fed, memoryview(b"")
        self._parts = self._laid_out(bytes(self._head[8:]), 8 + size)
        self._head = bytearray()
        self._skip_empty(8 + size)
        return 8 + size, view[taken + more :]

    def _laid_out(self, header: bytes, data_start: int) -> list[tuple[int, TensorEntry]]:
        try:
            entries = json.loads(header)
            found = [
                (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]), name, entry)
                for name, entry in entries.items()
                if name != "__metadata__"
            ]
        except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
            raise self._refusal(f"has a header that can't be read: {type(error).__name__}") from error
        found.sort(key=lambda item: item[:3])
        parts, end = [], 0
        for begin, after, name, entry in found:
            if begin != end or after < begin:
                raise self._refusal(f"has bytes between its tensors, or tensors over each other, at {name!r}")
            parts.append((data_start + after, self._matched(name, entry)))
            end = after
        if data_start + end != self.shard.size:
            raise self._refusal(f"says that its tensors end at byte {data_start + end} of {self.shard.size}")
        self.tensors = [name for _, _, name, _ in found]
        return parts

    def _matched(self, name: str, entry: dict[str, Any]) -> TensorEntry:
        expected = self._expected.get(name)
        if expected is None:
            raise self._refusal(f"holds tensor {name!r}, which the manifest does not name")
        dtype = DTYPES.get(str(entry.get("dtype")), str(entry.get("dtype")))
        if dtype != expected.dtype:
            raise self._refusal(f"holds tensor {name!r} as {dtype}, the manifest says {expected.dtype} (dtype)")
        if entry.get("shape") != expected.shape:
            raise self._refusal(
                f"holds tensor {name!r} of shape {entry.get('shape')}, the manifest says {expected.shape} (shape)"
            )
        return expected

    def _read_tensors(self, position: int, view: memoryview) -> None:
        assert self._parts is not None
        while len(view):
            end, _ = self._parts[self._index]
            taken = min(end - position, len(view))
            self._tensor_hash.update(view[:taken])
            position += taken
            view = view[taken:]
            self._skip_empty(position)

    def _skip_empty(self, position: int) -> None:
        """Close every tensor that ends here; one without elements ends where it begins."""
        assert self._parts is not None
        while self._index < len(self._parts) and self._parts[self._index][0] == position:
            entry = self._parts[self._index][1]
            digest = self._tensor_hash.hexdigest()
            if digest != entry.digest:
                raise self._refusal(
                    f"holds tensor {entry.name!r} with digest {digest}, the manifest says {entry.digest} (digest)"
                )
            self._tensor_hash = blake2b(digest_size=16)
            self._index += 1


def check_complete(manifest: Manifest, checks: Iterable[ShardCheck]) -> None:
    """Every tensor of the manifest lies in exactly one of its shards. Raises: WeightsRefused naming one that does not."""
    places: dict[str, str] = {}
    for check in checks:
        for name in check.tensors:
            if name in places:
                raise _tensor_refusal(name, f"is in shards {places[name]} and {check.shard.name}")
            places[name] = check.shard.name
    for entry in manifest.tensors:
        if entry.name not in places:
            raise _tensor_refusal(entry.name, "is in none of the shards")


def check_manifest(manifest: Manifest) -> None:
    """What can be said of a manifest alone. Raises: WeightsRefused: a name that is there twice."""
    for kind, names in (("tensors", [t.name for t in manifest.tensors]), ("shards", [f.name for f in manifest.files])):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise WeightsRefused(f"manifest.{kind} names {name!r} twice", field=f"manifest.{kind}.{name}")
            seen.add(name)


def file_refusal(name: str, what: str) -> WeightsRefused:
    """Of one file of an update, by its name."""
    return WeightsRefused(f"shard {name} {what}", field=f"manifest.shards.{name}")


def _tensor_refusal(name: str, what: str) -> WeightsRefused:
    return WeightsRefused(f"tensor {name!r} {what}", field=f"manifest.tensors.{name}")
