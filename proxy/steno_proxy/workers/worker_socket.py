"""uvicorn's WebSocket protocol, with bounds on what a socket may send: a worker's until its key is known, an agent's always.

uvicorn keeps a message until it is whole, up to `ws_max_size`: 64 MiB, which workers need and strangers must not have. Until
`known` is called, this protocol reads the heads of the frames that come (RFC 6455, 5.2) ahead of uvicorn, and passes on no frame
that takes the socket over its bounds. The application is told with a message that is too large to be a Hello, so that its
refusal leaves on the socket as any other does; what still comes is dropped.

Whoever serves the socket finds this protocol by `opening_of(scope)`. All that is used of uvicorn's own names is
here: `WebSocketsSansIOProtocol` and its `queue`, `handshake_initiated`, `close_sent`, `conn` and `transport`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

from starlette.types import Scope
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from steno.contracts.wire.packets import MAX_HELLO_BYTES

MAX_OPENING_FRAMES = 64
"""A Hello is one frame; an intermediary may send it in pieces. Each costs the parser 6 us, and a stranger 6 bytes."""
MAX_LEAVING_FRAMES = 4096
"""Frames that are searched for a Close after a socket was refused for its size, so that the other end may still read why."""
MOST_UNREAD_BYTES = 16 << 20
"""Bytes that may wait to be written to an agent; with more, the connection ends. Else answers to pings add up without end."""
_STATE = "steno.opening"
_CLOSE = 8


class UnverifiedSocket(Protocol):
    """A socket that may send little until `known` (a worker's) or `metered` (an agent's) is called: it may be a stranger's.

    Attributes: gone: set when the connection is over, and nothing of it is kept any more.
    """

    gone: asyncio.Event

    def known(self) -> None:
        """From now on it may send what uvicorn takes. Idempotent."""
        ...

    def drop(self) -> None:
        """Break the connection, whatever is left to write to a client that does not read. Idempotent."""
        ...

    def metered(self, room_for: Callable[[int, int, int], bool], most_bytes: int) -> None:
        """From now on it may send messages of up to `most_bytes`. room_for(new_bytes, all_bytes, all_frames) is asked as heads of
        frames arrive: bytes that they announce, bytes and frames of all messages so far. After False, only a Close is read."""
        ...


def opening_of(scope: Scope) -> UnverifiedSocket | None:
    """The `UnverifiedSocket` of an ASGI scope. None: another server than ours serves it."""
    return cast("UnverifiedSocket | None", scope.get("state", {}).get(_STATE))


class FrameCounter:
    """Counts the frames of a stream of bytes, and the bytes in them, by their heads alone.

    Attributes: frames, payload_bytes: as the heads so far announce them. message_frames, message_bytes: without control frames.
    closes: whether one of the frames was a Close.
    """

    def __init__(self) -> None:
        self.frames = self.payload_bytes = self.message_frames = self.message_bytes = 0
        self.closes = False
        self._head = b""
        self._skip = 0  # bytes of the present frame that are still to come

    def take(self, data: bytes, most_frames: int) -> None:
        """What has come. Stops at `most_frames`, and is of no use after that."""
        at = 0
        while at < len(data) and self.frames < most_frames:
            if self._skip:
                passed = min(self._skip, len(data) - at)
                self._skip -= passed
                at += passed
                continue
            taken = data[at : at + _MOST_HEAD_BYTES - len(self._head)]
            head = self._head + taken
            size = _head_bytes(head)
            if len(head) < size:
                self._head = head
                return
            at += size - len(self._head)
            self._head = b""
            self._skip = _payload_bytes(head)
            self.frames += 1
            self.payload_bytes += self._skip
            if head[0] & 0x08 == 0:
                self.message_frames += 1
                self.message_bytes += self._skip
            self.closes |= head[0] & 0x0F == _CLOSE


_MOST_HEAD_BYTES = 14


def _head_bytes(head: bytes) -> int:
    """The length of this frame's head, which its first 2 bytes tell; 2 while they have not come."""
    if len(head) < 2:
        return 2
    return 2 + {126: 2, 127: 8}.get(head[1] & 0x7F, 0) + (4 if head[1] & 0x80 else 0)


def _payload_bytes(head: bytes) -> int:
    short = head[1] & 0x7F
    return short if short < 126 else int.from_bytes(head[2 : 4 if short == 126 else 10], "big")


class OpeningSocket(WebSocketsSansIOProtocol):
    """`UnverifiedSocket`, as uvicorn runs it."""

    def __init__(
        self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        super().__init__(config, server_state, {**app_state, _STATE: self}, _loop)
        self.gone = asyncio.Event()
        self._frames: FrameCounter | None = FrameCounter()
        self._over = False
        self._room_for: Callable[[int, int, int], bool] | None = None

    def metered(self, room_for: Callable[[int, int, int], bool], most_bytes: int) -> None:
        self._room_for = room_for
        self.conn.max_message_size = most_bytes
        if self._over:
            self.transport.abort()

    def drop(self) -> None:
        self.transport.abort()

    def known(self) -> None:
        self._frames = None
        if self._over:  # it went on while it was looked at: what it sent is not whole
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        frames = self._frames
        if frames is None or not self.handshake_initiated:
            super().data_received(data)
            return
        if self._room_for is not None:
            self._metered(data, frames, self._room_for)
            return
        most = MAX_LEAVING_FRAMES if self._over else MAX_OPENING_FRAMES
        frames.take(data, most)
        if frames.frames >= most:
            self.transport.abort()
        elif frames.payload_bytes <= MAX_HELLO_BYTES:
            super().data_received(data)
        elif not self._over:
            self._over = True
            if not self.close_sent:
                self.queue.put_nowait({"type": "websocket.receive", "bytes": bytes(MAX_HELLO_BYTES + 1)})
        elif frames.closes:
            self.transport.close()

    def _metered(self, data: bytes, frames: FrameCounter, room_for: Callable[[int, int, int], bool]) -> None:
        pieces, size = frames.message_frames, frames.message_bytes
        frames.take(data, sys.maxsize)
        if not self._over and frames.message_frames > pieces:
            self._over = not room_for(frames.message_bytes - size, frames.message_bytes, frames.message_frames)
        if self.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            self.transport.abort()
        elif not self._over:
            super().data_received(data)
        elif frames.closes:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.gone.set()
