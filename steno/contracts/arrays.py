"""Token arrays as fields of records: raw little-endian bytes in Python and msgpack, lists in JSON, both ways.

A record's `model_dump_json()`, its JSON schema and what the REST API answers all come of the types here, so they say the same.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

if TYPE_CHECKING:
    import numpy


def ids_to_bytes(ids: list[int] | array[int]) -> bytes:
    """Token ids -> raw int32 LE."""
    return _little(array("i", ids)).tobytes()


def bytes_to_ids(raw: bytes) -> array[int]:
    """Raw int32 LE -> array('i'); supports `len`, indexing, slicing and `.tolist()`."""
    return _little(array("i", raw))


def floats_to_bytes(values: list[float] | array[float]) -> bytes:
    """Floats -> raw float32 LE."""
    return _little(array("f", values)).tobytes()


def bytes_to_floats(raw: bytes) -> array[float]:
    """Raw float32 LE -> array('f')."""
    return _little(array("f", raw))


def halves_to_bytes(values: Sequence[float]) -> bytes:
    """Floats -> raw float16 LE; one that float16 has no room for becomes infinite."""
    return b"".join(map(_half, values))


def _half(value: float) -> bytes:
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", math.copysign(math.inf, value))


def bytes_to_halves(raw: bytes) -> tuple[float, ...]:
    """Raw float16 LE -> floats."""
    return struct.unpack(f"<{len(raw) // 2}e", raw)


def numpy_array(raw: bytes, dtype: str) -> numpy.ndarray[Any, Any]:
    """A read-only view on the bytes. Raises: ImportError: numpy is not installed (Steno's client does without it)."""
    try:
        import numpy
    except ImportError as error:
        raise ImportError("to_numpy() needs numpy, which is not installed: pip install numpy") from error
    return numpy.frombuffer(raw, dtype)


def _little(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _read(parse: Callable[[Any], bytes]) -> BeforeValidator:
    """Lists as JSON has them become bytes; bytes stay. What is neither is refused by pydantic's own check for bytes."""

    def parsed(value: Any) -> Any:
        if isinstance(value, bytes):
            return value
        try:
            return parse(value)
        except (TypeError, OverflowError, struct.error) as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(parsed)


def _write(show: Callable[[bytes], Any]) -> PlainSerializer:
    return PlainSerializer(show, when_used="json")


def _floats(values: Any) -> bytes:
    return floats_to_bytes([math.nan if value is None else value for value in values])


def _numbers(raw: bytes) -> list[float | None]:
    return [number if math.isfinite(number) else None for number in bytes_to_floats(raw)]


TokenIds = Annotated[
    bytes,
    _read(ids_to_bytes),
    _write(lambda raw: bytes_to_ids(raw).tolist()),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "format": "int32"}}),
]
"""int32 LE; in JSON a list of integers."""

Logprobs = Annotated[
    bytes,
    _read(_floats),
    _write(_numbers),
    WithJsonSchema({"type": "array", "items": {"anyOf": [{"type": "number", "format": "float"}, {"type": "null"}]}}),
]
"""float32 LE; in JSON a list of numbers, null where one is NaN (not sampled) or not finite: JSON has no word for it."""


def _halves(value: Any) -> bytes:
    if not isinstance(value, str):
        return halves_to_bytes([math.nan if number is None else number for number in value])
    try:
        raw = base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None
    if len(raw) % 2:
        raise ValueError(f"float16 numbers have two bytes each, and there are {len(raw)} bytes")
    return raw


Halves = Annotated[
    bytes,
    _read(_halves),
    _write(lambda raw: base64.b64encode(raw).decode()),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]
"""float16 LE; in JSON base64 of that, and a list of numbers (null for NaN) is read too."""

Mask = Annotated[
    bytes,
    _read(lambda flags: bytes(bool(flag) for flag in flags)),
    _write(lambda raw: [bool(flag) for flag in raw]),
    WithJsonSchema({"type": "array", "items": {"type": "boolean"}}),
]
"""One byte per token, 0 or 1; in JSON a list of booleans."""

Digest = Annotated[
    bytes,
    _read(bytes.fromhex),
    _write(bytes.hex),
    WithJsonSchema({"type": "string", "pattern": "^([0-9a-f]{2})*$"}),
]
"""In JSON as hex."""
