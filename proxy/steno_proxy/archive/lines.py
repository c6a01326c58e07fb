"""A session as lines of JSON, compressed: what any tool reads, and nothing is lost by. Pure.

    {"session": {…}}        first, the `Session` record
    {"turn": {…}}           then its turns in commit order, whole: token ids and log-probabilities are lists of numbers

The session's line is one gzip member, its turns are the next one, so that lists read a session without its turns; many sessions
in a row are one gzip file. A string in place of a list of log-probabilities is base64 of float32: one of them is not finite.
A turn's `annotation`, where it has one, is what a trainer saw in its tokens: `differences` is base64 of float16.
"""

from __future__ import annotations

import base64
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from steno.contracts.lenient import read
from steno.contracts.records import Session, Turn, bytes_to_floats, bytes_to_ids, floats_to_bytes, ids_to_bytes
from steno_proxy.store.encoding.texts import from_json, to_json

_IDS = ("new_prompt_ids", "completion_ids")
_FLOATS = "sampling_logprobs"
_HEX = ("prompt_digest",)
_LEVEL = 6
_HEADER = b"\x1f\x8b\x08\x04\x00\x00\x00\x00\x00\xff"
_EMPTY = b"\x03\x00" + bytes(8)  # no data, its checksum and its length
_MOST_FILLER = 0xFFFF
_SLICE_BYTES = 1 << 16


class PackedSession(NamedTuple):
    """A session's bytes. head_bytes: of the first member, the session's own line."""

    data: bytes
    head_bytes: int


def pack(session: Session, turns: Sequence[Turn]) -> PackedSession:
    """One that awaits its reward as it leaves awaits none from then on.

    Raises: ValueError: what is packed would not be read as the same."""
    session = session.model_copy(update={"awaits_reward": False})
    head = gzip.compress(_line({"session": session.model_dump(mode="json")}), _LEVEL, mtime=0)
    rest = gzip.compress(b"".join(_line({"turn": _of_turn(turn)}) for turn in turns), _LEVEL, mtime=0)
    packed = PackedSession(head + rest, len(head))
    again = unpack(packed.data)
    if again != (session, list(turns)):
        raise ValueError(f"session {session.trial_id}: what the archive would read back differs from the session")
    return packed


def unpack(data: bytes) -> tuple[Session, list[Turn]]:
    """Raises: ValueError (also zlib.error, as one): not what `pack` made."""
    first, *others = [from_json(line) for line in _decompressed(data).splitlines()]
    return read(Session, first["session"]), [_to_turn(line["turn"]) for line in others]


def unpack_head(data: bytes) -> Session:
    """Of the first member alone. Raises: ValueError."""
    return read(Session, from_json(_decompressed(data))["session"])


def _line(value: Any) -> bytes:
    return to_json(value) + b"\n"


def _of_turn(turn: Turn) -> dict[str, Any]:
    line = turn.model_dump(mode="python", exclude={"unreadable"})
    for name in _IDS:
        line[name] = bytes_to_ids(line[name]).tolist()
    for name in _HEX:
        line[name] = line[name].hex()
    floats = bytes_to_floats(raw := line[_FLOATS]).tolist()
    line[_FLOATS] = floats if all(map(math.isfinite, floats)) else base64.b64encode(raw).decode()
    if turn.annotation is None:
        del line["annotation"]
    else:
        line["annotation"] = turn.annotation.model_dump(mode="json")
    return line


def _to_turn(line: dict[str, Any]) -> Turn:
    for name in _IDS:
        line[name] = ids_to_bytes(line[name])
    for name in _HEX:
        line[name] = bytes.fromhex(line[name])
    floats = line[_FLOATS]
    line[_FLOATS] = base64.b64decode(floats) if isinstance(floats, str) else floats_to_bytes(floats)
    return read(Turn, line)


def _decompressed(data: bytes) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from None


def members(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The gzip members of an object: where each begins, how long it is, what it holds. Raises: ValueError."""
    at = 0
    while at < len(data):
        stream, held, read = zlib.decompressobj(wbits=31), [], at
        while not stream.eof and read < len(data):
            try:
                held.append(stream.decompress(data[read : read + _SLICE_BYTES]))
            except zlib.error as error:
                raise ValueError(str(error)) from None
            read = min(len(data), read + _SLICE_BYTES)
        if not stream.eof:
            raise ValueError("it is truncated")
        end = read - len(stream.unused_data)
        yield at, end - at, b"".join(held)
        at = end


def filler(length: int) -> bytes:
    """Empty gzip members of so many bytes in all, to stand where a session was deleted. Raises: ValueError: too few for one."""
    least = len(_HEADER) + 2 + len(_EMPTY)
    if length < least:
        raise ValueError(f"{length} bytes are too few for a gzip member")
    made = b""
    while length:
        extra = min(length - least, _MOST_FILLER)
        if 0 < length - least - extra < least:
            extra -= least
        made += _HEADER + extra.to_bytes(2, "little") + bytes(extra) + _EMPTY
        length -= least + extra
    return made
