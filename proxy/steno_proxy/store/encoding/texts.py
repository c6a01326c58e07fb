"""Stored texts: JSON, named by the digest of its bytes, compressed if that is smaller.

A packed text says itself what it is: JSON of a list or an object begins with `[` or `{`, a zstd frame with the byte 0x28.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import zstandard

DIGEST_BYTES = 16
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MIN_BYTES = 64  # shorter texts do not shrink: a zstd frame costs 9 bytes and finds no repetition
_LEVEL = 1  # 3 saves another 3 % on agents' transcripts and costs twice the time

_encode = msgspec.json.Encoder().encode
_compressor = zstandard.ZstdCompressor(level=_LEVEL)
_decompressor = zstandard.ZstdDecompressor()


class StoredText(NamedTuple):
    """A text on its way to rest: 16-byte blake2b of `raw`, and the JSON itself."""

    digest: bytes
    raw: bytes


def text(value: Any) -> StoredText:
    """Any JSON list or object -> its text. Equal values with keys in another order are different texts."""
    raw = to_json(value)
    return StoredText(blake2b(raw, digest_size=DIGEST_BYTES).digest(), raw)


def to_json(value: Any) -> bytes:
    """JSON in UTF-8; a lone surrogate, which a client's JSON may escape but UTF-8 cannot carry, stays an escape."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def from_json(raw: bytes) -> Any:
    """The value of a JSON text that `to_json` wrote."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return json.loads(raw)


def pack(raw: bytes) -> bytes:
    """JSON -> what rests. Not for concurrent threads (one compressor)."""
    if len(raw) < _MIN_BYTES:
        return raw
    packed = _compressor.compress(raw)
    return packed if len(packed) < len(raw) else raw


def unpack(packed: bytes) -> Any:
    """What rests -> the value."""
    return from_json(_decompressor.decompress(packed) if packed.startswith(_ZSTD_MAGIC) else packed)
