"""The socket that carries a worker's channel just now: packets in, packets out, and its close.

What packets mean is `worker_channel.py`; who gets a channel is `hub.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from steno.contracts.errors import ProtocolError
from steno.contracts.wire.packets import CLOSE_GOING_AWAY, CLOSE_PROTOCOL_ERROR
from steno_proxy.workers.relay_settings import RelayCounts

if TYPE_CHECKING:
    from steno_proxy.workers.worker_channel import WorkerChannel

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


async def carry(worker: WorkerChannel, link: ChannelSocket, counts: RelayCounts, clock: Callable[[], float]) -> None:
    """Read and write until the socket ends, from whichever side."""
    reader = asyncio.create_task(read(worker, link.websocket))
    writer = asyncio.create_task(write(worker, link))
    ends: set[asyncio.Future[Any]] = {reader, writer, link.closing}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        reader.cancel()
        writer.cancel()
        results = await asyncio.gather(reader, writer, return_exceptions=True)
        code, reason, last = link.closing.result() if link.closing.done() else (CLOSE_GOING_AWAY, "", [])
        if worker.link is link:
            worker.link = None
            worker.peer.disconnected(clock())
            last = worker.peer.data_to_send()
            worker.tick()
    for result in results:
        if isinstance(result, ProtocolError):
            counts.protocol_errors += 1
            logger.warning("worker %s broke the protocol: %s", worker.id, result.message)
            code, reason = CLOSE_PROTOCOL_ERROR, result.message
        elif isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
            raise result
    await leave(link.websocket, code, reason, last)


async def receive(websocket: WebSocket) -> bytes:
    """The next packet. Raises: WebSocketDisconnect; ProtocolError: the message is text."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    data = message.get("bytes")
    if data is None:
        raise ProtocolError("a text message; packets are binary")
    return bytes(data)


async def read(worker: WorkerChannel, websocket: WebSocket) -> None:
    """Read packets until the socket ends; never returns. Raises WebSocketDisconnect; ProtocolError, with the worker's peer
    ended."""
    try:
        while True:
            worker.receive(await receive(websocket))
    except ProtocolError as error:
        worker.fail(error.message)
        raise


async def write(worker: WorkerChannel, link: ChannelSocket) -> None:
    """Write packets until another socket has the channel: what there is to say is for that one, beginning with its Welcome."""
    while True:
        await link.dirty.wait()
        link.dirty.clear()
        if worker.link is not link:
            return
        for packet in worker.peer.data_to_send():
            await link.websocket.send_bytes(packet)


async def leave(websocket: WebSocket, code: int, reason: str, last: list[bytes]) -> None:
    """Say the last words and close, within CLOSE_WITHIN_S; a socket that is already gone is left as it is."""
    try:
        async with asyncio.timeout(CLOSE_WITHIN_S):
            for packet in last:
                await websocket.send_bytes(packet)
            await websocket.close(code, reason.encode()[:120].decode(errors="ignore"))
    except (WebSocketDisconnect, RuntimeError, TimeoutError, OSError) as error:
        logger.debug("a worker's socket was closed before the last frames were sent: %s", error)
