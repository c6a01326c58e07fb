"""What stands before the replicas in a deployment: each new connection goes to the next replica that accepts one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from types import TracebackType


class Balancer:
    """`async with Balancer(ports) as balancer:` and connect to `balancer.port` on 127.0.0.1."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Balancer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = next(self._turn)
        for offset in range(len(self._ports)):
            port = self._ports[(first + offset) % len(self._ports)]
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
                return
        writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
