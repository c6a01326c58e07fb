"""Patches: how the bits of one shard's tensors become those of the next version. A file's layout, and its arithmetic; no I/O.

    8 bytes, little-endian: length of the header    JSON: a `PatchHeader`    the parts of its blocks, in its order

Tensors are cut into blocks of BLOCK_ELEMENTS, and elements are unsigned integers of the tensor's width, whatever they mean: so
NaN, -0.0 and every float are what they are, bit for bit. A block in which nothing changed is not in the file. Of the others:

    sparse   places, and the difference at each    where fewer than a quarter of the elements changed
    dense    the difference of every element

A place is stored as its distance from the place before, in 32 bits. A difference is that of the unsigned integers (modulo
2 ** bits); it is near zero for a float that moved by a few rounding steps. Of both, all lowest bytes are stored, then all bytes
of the next significance, …, so that the zeros lie together, and zstd compresses them. A difference that is added twice, or to
other weights, gives a wrong result, so the worker that applies a patch checks the digests of the result.

Needs numpy and zstandard, which the worker and the trainer have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import zstandard
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Bits = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
"""Elements as unsigned integers, one dimension."""
BLOCK_ELEMENTS: Literal[4194304] = 4194304
"""Compared, packed and applied in one go: 8 MiB in bfloat16."""
DENSE_FROM = 0.25
"""Of a block's elements: where more changed, places cost more than they save."""
LEVEL = 1
"""Of zstd. What there is to gain is in the planes: level 3 takes up to twice as long, and its files are as large."""
MAX_HEADER_BYTES = 100_000_000
WIDTHS = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "uint64": 8, "int64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip
"""Bytes of an element, by torch's names of dtypes."""


class PatchDamaged(ValueError):
    """It is no patch, or one that contradicts itself."""


class PatchBlock(BaseModel):
    """One block that changed. index: of the tensor's blocks. changed: elements. places, differences: bytes of the parts, as they
    are in the file."""

    model_config = ConfigDict(extra="forbid")
    index: int = Field(ge=0)
    kind: Literal["sparse", "dense"]
    changed: int = Field(ge=1, le=BLOCK_ELEMENTS)
    places: int = Field(ge=0)
    differences: int = Field(ge=1)


class PatchedTensor(BaseModel):
    """One tensor that changed. width: bytes of an element."""

    model_config = ConfigDict(extra="forbid")
    name: str
    width: Literal[1, 2, 4, 8]
    elements: int = Field(ge=1)
    blocks: list[PatchBlock] = Field(min_length=1)


class PatchHeader(BaseModel):
    """What a file consists of: the tensors of one shard that changed, each with its blocks by index."""

    model_config = ConfigDict(extra="forbid")
    format: Literal[1] = 1
    block_elements: Literal[4194304] = BLOCK_ELEMENTS
    tensors: list[PatchedTensor] = Field(default_factory=list)


class PackedBlock(NamedTuple):
    """A block as it is in the file: its entry in the header, and its two parts."""

    about: PatchBlock
    places: bytes
    differences: bytes


def bits_of(data: bytes | bytearray | memoryview, width: int) -> Bits:
    """Bytes of elements as integers, without a copy; writable where the bytes are."""
    return np.frombuffer(data, dtype=f"<u{width}")


def blocks_of(elements: int) -> Iterator[tuple[int, int, int]]:
    """(index, first element, one beyond the last) of each block."""
    for index, start in enumerate(range(0, elements, BLOCK_ELEMENTS)):
        yield index, start, min(start + BLOCK_ELEMENTS, elements)


# -- the trainer's side ------------------------------------------------------------------------------------------------------


def pack_block(index: int, before: Bits, now: Bits) -> PackedBlock | None:
    """What makes `now` of `before`. Args: of one length, at most BLOCK_ELEMENTS, and one width. Returns: None: they are equal."""
    places = np.flatnonzero(before != now)
    if not len(places):
        return None
    if len(places) < DENSE_FROM * len(now):
        gaps = np.diff(places, prepend=0).astype("<u4")
        packed = _squeezed(gaps)
        before, now = before[places], now[places]
    else:
        packed = b""
    differences = _squeezed(_folded(now - before))
    kind: Literal["sparse", "dense"] = "sparse" if packed else "dense"
    about = PatchBlock(index=index, kind=kind, changed=len(places), places=len(packed), differences=len(differences))
    return PackedBlock(about, packed, differences)


def header_bytes(header: PatchHeader) -> bytes:
    """Returns: the first bytes of a patch file: the header's length (8 bytes, little-endian), then the header as JSON."""
    text = header.model_dump_json().encode()
    return len(text).to_bytes(8, "little") + text


# -- the worker's side -------------------------------------------------------------------------------------------------------


def header_size(first: bytes, size: int) -> int:
    """Bytes of the header of a file of `size` bytes that begins with these 8. Raises: PatchDamaged."""
    length = int.from_bytes(first, "little")
    if len(first) != 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise PatchDamaged(f"is no patch: its header would have {length} bytes")
    return length


def read_header(text: bytes, payload: int) -> PatchHeader:
    """Args: payload: bytes of the file behind the header. Raises: PatchDamaged."""
    try:
        header = PatchHeader.model_validate(json.loads(text))
    except (ValueError, ValidationError, RecursionError) as error:
        raise PatchDamaged(f"has a header that can't be read: {type(error).__name__}") from error
    told = 0
    for tensor in header.tensors:
        last = -1
        for block in tensor.blocks:
            if block.index <= last or block.index * BLOCK_ELEMENTS >= tensor.elements:
                raise PatchDamaged(f"has block {block.index} of {tensor.name!r} out of its place")
            last = block.index
            told += block.places + block.differences
    if len({tensor.name for tensor in header.tensors}) != len(header.tensors):
        raise PatchDamaged("names a tensor twice")
    if told != payload:
        raise PatchDamaged(f"has {payload} bytes behind its header, which says {told}")
    return header


def apply_block(onto: Bits, packed: PackedBlock) -> None:
    """Change the elements of one block, in place. Raises: PatchDamaged: it does not fit; `onto` may have changed then."""
    about = packed.about
    if about.kind == "dense":
        if about.places:
            raise PatchDamaged("has places in a dense block")
        onto += _unfolded(_spread(packed.differences, len(onto), onto.dtype))
        return
    places = np.cumsum(_spread(packed.places, about.changed, np.dtype("<u4")), dtype=np.uint64)
    if places[-1] >= len(onto) or (about.changed > 1 and not (places[1:] > places[:-1]).all()):
        raise PatchDamaged("has places out of order, or beyond its block")
    onto[places] += _unfolded(_spread(packed.differences, about.changed, onto.dtype))


# -- arithmetic --------------------------------------------------------------------------------------------------------------


def _folded(differences: Bits) -> Bits:
    """Signs to the lowest bit: 0, -1, 1, -2, … become 0, 1, 2, 3, …"""
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * differences.itemsize - 1))).view(differences.dtype)


def _unfolded(folded: Bits) -> Bits:
    # Modulo 2 ** bits, the second operand is all ones or all zeros.
    values: Bits = np.bitwise_xor(folded >> 1, np.negative(folded & 1))
    return values


def _squeezed(values: Bits) -> bytes:
    """All lowest bytes, then all of the next significance, …: compressed."""
    planes = values.view(np.uint8).reshape(-1, values.itemsize).T
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(planes).tobytes())


def _spread(packed: bytes, count: int, dtype: np.dtype[Any]) -> Bits:
    """Raises: PatchDamaged: not so many values."""
    size = count * dtype.itemsize
    try:
        if zstandard.frame_content_size(packed) != size:
            raise PatchDamaged(f"has a part that is not of {size} bytes")
        planes = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
    except zstandard.ZstdError as error:
        raise PatchDamaged(f"has a part that can't be decompressed: {error}") from error
    together = np.frombuffer(planes, dtype=np.uint8).reshape(dtype.itemsize, count)
    return np.ascontiguousarray(together.T).view(dtype).reshape(-1)
