"""The heads of WebSocket frames, counted ahead of uvicorn, and what of uvicorn is built upon."""

from __future__ import annotations

import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from steno_proxy.workers.worker_socket import FrameCounter, OpeningSocket, opening_of

SIZES = st.one_of(st.integers(0, 300), st.sampled_from([125, 126, 65535, 65536, 70_000]))
FRAMES = st.lists(
    st.tuples(st.sampled_from([Opcode.BINARY, Opcode.CONT, Opcode.PING, Opcode.TEXT]), SIZES), max_size=12
)


@given(FRAMES, st.booleans(), st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_frames_are_counted_however_they_are_cut(
    frames: list[tuple[Opcode, int]], masked: bool, cuts: list[int]
) -> None:
    data = b"".join(
        Frame(opcode, bytes(size % 126 if opcode is Opcode.PING else size)).serialize(mask=masked)
        for opcode, size in frames
    )
    counted, at, turn = FrameCounter(), 0, 0
    while at < len(data):
        counted.take(data[at : at + cuts[turn % len(cuts)]], 1000)
        at += cuts[turn % len(cuts)]
        turn += 1
    assert counted.frames == len(frames)
    assert counted.payload_bytes == sum(size % 126 if opcode is Opcode.PING else size for opcode, size in frames)
    assert not counted.closes


def test_a_frame_is_known_by_its_head_before_any_of_it_comes() -> None:
    counted = FrameCounter()
    counted.take(bytes([0x82, 0xFF]) + (60 * 2**20).to_bytes(8, "big"), 64)
    assert (counted.frames, counted.payload_bytes) == (0, 0)
    counted.take(bytes(4), 64)  # the mask ends the head
    assert (counted.frames, counted.payload_bytes) == (1, 60 * 2**20)


def test_no_more_are_looked_at_than_may_be() -> None:
    counted = FrameCounter()
    counted.take(bytes([0x00, 0x80, 0, 0, 0, 0]) * 40_000, 64)
    assert counted.frames == 64


def test_a_close_is_seen_behind_what_is_skipped() -> None:
    counted = FrameCounter()
    counted.take(Frame(Opcode.BINARY, bytes(1000)).serialize(mask=True), 64)
    assert not counted.closes
    counted.take(Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=True), 64)
    assert counted.closes


async def test_uvicorn_still_has_what_the_bound_is_built_upon() -> None:
    """An upgrade that renames any of these must be read before it is taken: the bound would be gone, and nothing else fails."""
    config = uvicorn.Config("unused:app", ws=OpeningSocket, interface="asgi3")
    config.loaded_app = None  # type: ignore[assignment]
    config.loaded = True
    made = OpeningSocket(config, ServerState(), {"kept": 1})
    assert isinstance(made, WebSocketsSansIOProtocol)
    assert {"queue", "handshake_initiated", "close_sent", "transport", "app_state", "conn"} <= set(vars(made))
    assert not made.handshake_initiated and not made.close_sent
    assert made.conn.max_message_size == config.ws_max_size  # `metered` sets another
    assert opening_of({"state": made.app_state}) is made and made.app_state["kept"] == 1
    assert "data_received" in vars(WebSocketsSansIOProtocol)
    assert opening_of({}) is None
