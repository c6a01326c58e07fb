"""A real uvicorn, uvloop and httptools as in production, in the test's own event loop, on a free port of 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn

from steno_proxy.server.http_protocol import BoundedHttp
from steno_proxy.workers.worker_socket import OpeningSocket
from tests.support.waiting import until


class _Server(uvicorn.Server):
    """Ends as uvicorn does, but at once: its own loops look every 0.1 s, and thousands of tests end a server."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.told_to_end = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the test runner's signals are not ours to take

    async def main_loop(self) -> None:
        await self.on_tick(0)  # writes the headers of all answers
        await self.told_to_end.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for server in self.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        try:
            await until(lambda: not state.connections and not state.tasks, self.config.timeout_graceful_shutdown)
        except TimeoutError:
            for task in state.tasks:
                task.cancel()
        for server in self.servers:
            await server.wait_closed()
        await self.lifespan.shutdown()


@contextlib.asynccontextmanager
async def serve(app: Any, **options: Any) -> AsyncIterator[int]:
    """Serve an ASGI app; yields its port. `options` go to `uvicorn.Config`."""
    listener = socket.create_server(("127.0.0.1", 0))
    # As the product's listener does. Without it, Nagle's algorithm holds an answer on a reused connection for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    settings: dict[str, Any] = {
        "http": BoundedHttp, "ws": OpeningSocket, "ws_max_size": 64 * 2**20, "ws_per_message_deflate": False,
        "ws_ping_interval": None, "log_level": "warning", "timeout_graceful_shutdown": 2,
    }  # fmt: skip
    server = _Server(uvicorn.Config(app, **(settings | options)))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.told_to_end.set()
        await task
        listener.close()
