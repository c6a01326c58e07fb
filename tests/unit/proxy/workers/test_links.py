"""Two sockets of one channel: what there is to say is said on the newer one, beginning with its Welcome."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from starlette.websockets import WebSocket

from steno.contracts.chat import Job
from steno.contracts.wire.frames import Generate, Hello, ModelCard
from steno.contracts.wire.peer_ends import WorkerPeer
from steno_proxy.workers.hub import Hub
from steno_proxy.workers.placement import Order
from steno_proxy.workers.relay_settings import RelaySettings
from tests.support.waiting import until


class Socket:
    """The proxy's end of a socket, and what passes there."""

    client = None

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.scope: dict[str, Any] = {}
        self.inbox: asyncio.Queue[bytes] = asyncio.Queue()
        self.sent: list[bytes] = []

    async def accept(self) -> None: ...

    async def receive(self) -> dict[str, Any]:
        return {"type": "websocket.receive", "bytes": await self.inbox.get()}

    async def send_bytes(self, data: bytes) -> None:
        self.sent.append(data)

    async def close(self, code: int, reason: str) -> None: ...


async def test_what_wakes_the_old_sockets_writer_while_a_new_one_comes_does_not_take_its_welcome() -> None:
    hub = Hub(RelaySettings(), proxy_id="p")
    peer = WorkerPeer(Hello(1, 1, "w", "boot", [ModelCard("m", 1000)], 4), max_packet_bytes=2**20)
    old, new = Socket(), Socket()
    peer.connected(time.monotonic())
    sockets = [asyncio.create_task(hub.serve(cast(WebSocket, socket))) for socket in (old, new)]
    old.inbox.put_nowait(peer.data_to_send()[0])
    await until(lambda: old.sent)
    peer.receive(old.sent[0], time.monotonic())
    said = len(old.sent)
    peer.disconnected(time.monotonic())
    peer.connected(time.monotonic())
    new.inbox.put_nowait(peer.data_to_send()[0])
    hub.open(Order("trial", "0" * 12, Job(messages=[{"role": "user", "content": "x"}])))
    await until(lambda: len(new.sent) == 2)
    assert len(old.sent) == said
    heard = [event for data in new.sent for event in peer.receive(data, time.monotonic())]
    assert any(isinstance(event, Generate) for event in heard), heard
    for socket in sockets:
        socket.cancel()
    await asyncio.gather(*sockets, return_exceptions=True)
