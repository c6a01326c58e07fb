"""Accepting connections, also when there is no file descriptor left for one more.

libuv, and so uvloop, then accepts each with a descriptor that it keeps in reserve and closes it at once: clients see connections
that end, and nobody is told. Where a thread takes that descriptor meanwhile, uvloop closes the listening socket, without a word,
for as long as the process runs. Here such connections wait in the kernel's backlog instead, and it is logged and counted.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable

from steno_proxy import metrics

log = logging.getLogger(__name__)

AGAIN_S = 0.2
"""After a connection that could not be accepted. What holds descriptors without a word is closed within
`http_protocol.HEAD_S`."""
SAY_EVERY_S = 60.0
BURST = 64
"""Connections accepted before anybody else has a turn."""
_FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Accepts on one listening socket, in the running loop, until `close`. What `uvicorn.Server.servers` is made of.

    Args: factory: a protocol for each connection.
    """

    def __init__(self, listener: socket.socket, factory: Callable[[], asyncio.Protocol]) -> None:
        self.sockets = (listener,)
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._said_at: float | None = None
        self._closed = False
        listener.setblocking(False)
        self._start()

    def close(self) -> None:
        """Accept no more. The socket stays its owner's. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        else:
            self._loop.remove_reader(self.sockets[0])

    async def wait_closed(self) -> None:
        """Until what was accepted has its protocol."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _start(self) -> None:
        self._again = None
        self._loop.add_reader(self.sockets[0], self._accept)

    def _accept(self) -> None:
        for _ in range(BURST):
            try:
                connection, _ = self.sockets[0].accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _FULL:  # of one connection, such as a reset before it was accepted
                    continue
                self._wait(error)
                return
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._factory, connection)
        except OSError as error:
            log.debug("a client closed its connection before it was accepted: %s", error)
            connection.close()

    def _wait(self, error: OSError) -> None:
        metrics.ACCEPT_FAILURES.inc()
        now = time.monotonic()
        if self._said_at is None or now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            log.error(
                "connections can't be accepted and wait: %s. Let the process have more file descriptors (ulimit -n, LimitNOFILE) "
                "or find out which clients keep so many connections open",
                error.strerror,
            )
        self._loop.remove_reader(self.sockets[0])
        self._again = self._loop.call_later(AGAIN_S, self._start)
