"""The asynchronous client's connections, as a server sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from steno.client.client import AT_ONCE, AsyncClient

POOL = 100
"""Connections that httpx has by default: more than so many never had any."""


@dataclass
class Server:
    """Answers each request with 204, but one that may wait (`wait_s`) or asks for events never."""

    connections: int = 0
    held: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if b"wait_s=" in head or b"/events " in head:
                    self.held += 1
                    self.changed.set()
                    await reader.read()
                else:
                    writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()


async def test_connections_are_used_again_however_many_calls_are_made_at_once() -> None:
    server = Server()
    async with server.running() as url, AsyncClient(url) as client:
        await asyncio.gather(*(client.delete(f"t{number}") for number in range(10 * AT_ONCE)))
    assert server.connections == AT_ONCE


async def test_calls_and_streams_that_wait_keep_no_short_call_from_its_connection() -> None:
    """However many: each has a connection of its own."""
    server = Server()
    async with server.running() as url, AsyncClient(url, retries=0) as client:

        async def follow(trial_id: str) -> None:
            async for _ in client.events(trial_id):
                raise AssertionError

        waiting = [asyncio.ensure_future(client.update(f"u{number}", wait_s=60.0)) for number in range(POOL)]
        waiting += [asyncio.ensure_future(follow(f"t{number}")) for number in range(POOL)]
        async with asyncio.timeout(120):  # without an end where the pool has a bound
            while server.held < len(waiting):
                server.changed.clear()
                await server.changed.wait()
        await asyncio.gather(*(client.delete(f"t{number}") for number in range(2 * AT_ONCE)))
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
