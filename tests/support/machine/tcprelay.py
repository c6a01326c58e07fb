"""A TCP relay in front of a server, for tests of bad networks: cut, pause, delay, and cut after so many bytes."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType


class TcpRelay:
    """`async with TcpRelay(host, port) as relay:` and connect to `relay.port` on 127.0.0.1.

    Attributes:
        delay_s: each chunk waits this long in either direction.
        cut_after_bytes: cut everything once so many more bytes have passed, both directions together; None: never.
        accepting: False refuses new connections, by closing them at once.
        connections: how many were accepted so far.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.target_port = host, port
        self.delay_s = 0.0
        self.cut_after_bytes: int | None = None
        self.accepting = True
        self.connections = 0
        self.passed_bytes = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._near: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}  # dialling side -> its server side
        self._orphaned: set[asyncio.StreamWriter] = set()
        self._lost: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def __aenter__(self) -> TcpRelay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        self.resume()
        if self._tasks:  # they end with their sockets; cancelled, each would have asyncio complain
            for task in (await asyncio.wait(set(self._tasks), timeout=2))[1]:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection, without a goodbye; what is on the way is lost."""
        for writer in list(self._writers):
            writer.transport.abort()

    def half_cut(self) -> None:
        """Reset the dialling side only: the server keeps a socket at which nothing will ever come again."""
        for writer in list(self._near):
            self._orphaned.add(self._near.pop(writer))
            writer.transport.abort()

    def lose(self) -> None:
        """Both sides keep each present connection open, but nothing arrives on it any more, not even its end: as behind a NAT
        that forgot it. New connections work."""
        self._lost |= self._writers

    def pause(self) -> None:
        """Pass nothing on, and read nothing: a stalled network, or a half-open peer."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if not self.accepting:
                writer.transport.abort()
                return
            self.connections += 1
            try:
                far_reader, far_writer = await asyncio.open_connection(self.host, self.target_port)
            except OSError:  # nobody listens there just now: as the dialling side would have it without a relay
                writer.transport.abort()
                return
            self._writers |= {writer, far_writer}
            self._near[writer] = far_writer
            try:
                await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
            finally:
                self._near.pop(writer, None)
                for each in (writer, far_writer):
                    if each not in self._orphaned:
                        self._writers.discard(each)
                        self._lost.discard(each)
                        each.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if writer in self._lost:
                    continue
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                if self.cut_after_bytes is not None:
                    passing = data[: self.cut_after_bytes]
                    self.cut_after_bytes -= len(passing)
                    writer.write(passing)
                    if self.cut_after_bytes == 0:
                        self.cut_after_bytes = None
                        with contextlib.suppress(ConnectionError):
                            await writer.drain()
                        self.cut()
                        return
                    self.passed_bytes += len(passing)
                    continue
                self.passed_bytes += len(data)
                writer.write(data)
                await writer.drain()
        if writer not in self._orphaned | self._lost:
            writer.transport.abort()
