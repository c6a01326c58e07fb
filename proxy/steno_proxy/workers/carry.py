"""Passes packets between a worker's channel and its present socket, until the socket ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from steno.contracts.errors import ProtocolError
from steno.contracts.wire.packets import CLOSE_GOING_AWAY, CLOSE_PROTOCOL_ERROR
from steno_proxy.workers.channel_socket import ChannelSocket, leave, receive
from steno_proxy.workers.relay_settings import RelayCounts
from steno_proxy.workers.worker_channel import WorkerChannel

logger = logging.getLogger(__name__)


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
            counts.channels["protocol_error"] += 1
            logger.warning("worker %s broke the protocol: %s", worker.id, result.message)
            code, reason = CLOSE_PROTOCOL_ERROR, result.message
        elif isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
            raise result
    await leave(link.websocket, code, reason, last)


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
    """Write packets while this socket carries the channel. Once another one does, packets are for it, its Welcome first."""
    while True:
        await link.dirty.wait()
        link.dirty.clear()
        if worker.link is not link:
            return
        for packet in worker.peer.data_to_send():
            await link.websocket.send_bytes(packet)
