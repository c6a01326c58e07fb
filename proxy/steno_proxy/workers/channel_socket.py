"""The socket that carries a worker's channel at present: reads its next packet, and closes it.

`worker_channel.py` handles packets; `carry.py` passes them between socket and channel; `hub.py` says which socket gets one.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.websockets import WebSocket, WebSocketDisconnect

from steno.contracts.errors import ProtocolError

logger = logging.getLogger(__name__)
CLOSE_WITHIN_S = 2.0
"""How long a closing socket may take to write what is left; a peer that has stopped reading must not hold us up."""


class ChannelSocket:
    """One socket. `closing` is done, with (close code, reason, last packets), when it is to be closed from this side; `left` is
    set when it is closed."""

    __slots__ = ("closing", "dirty", "left", "websocket")

    def __init__(self, websocket: WebSocket) -> None:
        self.websocket = websocket
        self.dirty = asyncio.Event()
        self.left = asyncio.Event()
        self.closing: asyncio.Future[tuple[int, str, list[bytes]]] = asyncio.get_running_loop().create_future()

    def close(self, code: int, reason: str, last: list[bytes] | None = None) -> None:
        if not self.closing.done():
            self.closing.set_result((code, reason, last or []))


class RefusedSocket(Exception):
    """A socket that gets no channel."""

    def __init__(self, close_code: int, code: str, message: str) -> None:
        super().__init__(message)
        self.close_code = close_code
        self.code = code
        self.message = message


async def receive(websocket: WebSocket) -> bytes:
    """The next packet. Raises: WebSocketDisconnect; ProtocolError: the message is text."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    data = message.get("bytes")
    if data is None:
        raise ProtocolError("a text message; packets are binary")
    return bytes(data)


async def leave(websocket: WebSocket, code: int, reason: str, last: list[bytes]) -> None:
    """Send the last packets and close the socket, within CLOSE_WITHIN_S. If it is already gone, this is only logged."""
    try:
        async with asyncio.timeout(CLOSE_WITHIN_S):
            for packet in last:
                await websocket.send_bytes(packet)
            await websocket.close(code, reason.encode()[:120].decode(errors="ignore"))
    except (WebSocketDisconnect, RuntimeError, TimeoutError, OSError) as error:
        logger.debug("a worker's socket was closed before the last frames were sent: %s", error)
