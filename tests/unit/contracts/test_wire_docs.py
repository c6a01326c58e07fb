"""docs/wire-protocol.md names every frame, field, state and close code."""

from __future__ import annotations

from pathlib import Path

import msgspec

from steno.contracts.wire import frames, packets
from steno.contracts.wire.peer import PeerState

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "wire-protocol.md").read_text()


def test_every_frame_and_field_is_there() -> None:
    for kind in frames.Frame.__args__:
        assert f"`{kind.__struct_config__.tag}`" in PAGE, kind
        assert [field.name for field in msgspec.structs.fields(kind) if field.name not in PAGE] == [], kind


def test_every_state_close_code_and_refusal_is_there() -> None:
    codes = [value for name, value in vars(packets).items() if name.startswith("CLOSE_")]
    words = [*(state.value for state in PeerState), *packets.REFUSALS, packets.PROTOCOL_ERROR]
    assert [code for code in codes if f"| {code} |" not in PAGE and f", {code}" not in PAGE] == []
    assert [word for word in words if f"`{word}`" not in PAGE] == []
