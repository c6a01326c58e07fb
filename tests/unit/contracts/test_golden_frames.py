"""Frames as protocol 1 wrote them are read for as long as this speaks protocol 1; another major version is refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from steno.contracts.errors import ProtocolError
from steno.contracts.wire.frames import PROTOCOL_VERSION
from steno.contracts.wire.packets import TO_PROXY, TO_WORKER, decode_packet
from tests.golden.frames import PATH, WAYS, view

GOLDEN: dict[str, dict[str, Any]] = json.loads(PATH.read_text())


def decoded(name: str, data: bytes) -> Any:
    decoder: Any = TO_PROXY if "to proxy" in name else TO_WORKER
    packet = decode_packet(decoder, data, 1 << 20)
    assert packet.ack == 2
    [frame] = packet.frames
    return frame


def holds(new: Any, old: Any) -> bool:
    """What was said is there; fields that came later may stand beside it."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and holds(new[key], value) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(holds, new, old))
    return bool(new == old)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_frame_of_version_1_says_what_it_said(name: str) -> None:
    frame = decoded(name, bytes.fromhex(GOLDEN[name]["packet"]))
    assert type(frame).__name__ == name.split(" ")[0]
    assert holds(view(frame), GOLDEN[name]["says"])


@pytest.mark.parametrize("name", [name for name in GOLDEN if "full" in name])
def test_fields_of_a_later_minor_version_are_left_out(name: str) -> None:
    seq, ack, _ = msgspec.msgpack.decode(bytes.fromhex(GOLDEN[name]["packet"]))
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(decoded(name, bytes.fromhex(GOLDEN[name]["packet"]))))
    later = msgspec.msgpack.encode([seq, ack, [[*said, "a field that came later", 5]]])
    assert holds(view(decoded(name, later)), GOLDEN[name]["says"])


def test_every_frame_is_kept() -> None:
    names = {
        f"{kind.__name__} to {way}, {how}" for way, kinds in WAYS.items() for kind in kinds for how in ("full", "bare")
    }
    assert names <= GOLDEN.keys(), "python -m tests.golden.frames adds those that are new"
    assert PROTOCOL_VERSION == 1, "keep frames-v1.json, and begin frames-v2.json beside it"


def test_a_frame_that_version_1_did_not_have_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not a packet"):
        decode_packet(TO_PROXY, msgspec.msgpack.encode([1, 0, [["telepathy", 1]]]), 1 << 20)
