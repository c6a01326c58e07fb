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


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the test runner's signals are not ours to take


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
        server.should_exit = True
        await task
        listener.close()
