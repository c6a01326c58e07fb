"""The frames of protocol 1 as packets: `frames-v1.json`, one entry per frame, full and with its optional fields left out.

python -m tests.golden.frames        adds frames that are not in the file yet, and never touches one that is
"""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from steno.contracts.wire import frames
from steno.contracts.wire.channel import encode_packet
from steno.contracts.wire.packets import ToProxy, ToWorker

PATH = Path(__file__).with_name("frames-v1.json")
UNSEQUENCED = (frames.Hello, frames.Welcome, frames.Goodbye, frames.Heartbeat)
WAYS: dict[str, tuple[Any, ...]] = {"proxy": typing.get_args(ToProxy), "worker": typing.get_args(ToWorker)}


def view(value: Any) -> Any:
    """A frame as JSON, structs by the names of their fields."""
    if isinstance(value, msgspec.Struct):
        return {name: view(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [view(one) for one in value]
    if isinstance(value, dict):
        return {str(key): view(one) for key, one in value.items()}
    return value.hex() if isinstance(value, bytes) else value


def _full(kind: Any, name: str = "x") -> Any:
    """A value of this type in which nothing is at its default."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _full(next(one for one in inner if one is not type(None)), name)
    if origin is typing.Literal:
        return inner[-1]
    if origin is list:
        return [_full(inner[0], name)]
    if origin is tuple:
        return tuple(_full(one, name) for one in inner)
    if origin is dict:
        return {_full(inner[0], name): 1.5 if inner[1] is float else "v"}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(**{field: _full(hints[field], field) for field in kind.__struct_fields__})
    return {int: 7, float: 0.25, str: f"a {name}", bool: True, bytes: bytes(range(1, 9))}.get(kind, "anything")


def entries() -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}
    for way, kinds in WAYS.items():
        for kind in kinds:
            frame = _full(kind)
            raw = msgspec.msgpack.decode(msgspec.msgpack.encode(frame))
            least = 1 + len(kind.__struct_fields__) - len(kind.__struct_defaults__)
            seq = 0 if kind in UNSEQUENCED else 3
            for how, said in (("full", raw), ("bare", raw[:least])):
                packet = encode_packet(seq, 2, [msgspec.msgpack.encode(said)])
                known = msgspec.convert(said, kind) if how == "bare" else frame
                made[f"{kind.__name__} to {way}, {how}"] = {"packet": packet.hex(), "says": view(known)}
    return made


if __name__ == "__main__":
    kept = json.loads(PATH.read_text()) if PATH.exists() else {}
    new = {name: entry for name, entry in entries().items() if name not in kept}
    PATH.write_text(json.dumps(kept | new, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(new)} added to {len(kept)}")
