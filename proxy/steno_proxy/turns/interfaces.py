"""The interfaces between a request and its client: the client as the turn sees it, and the turn as the route sees it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol

from steno.contracts.errors import StenoError

ABORT_S = 2.0
"""After an abort, how long an answer may stay stuck in a write to a client that does not read. Seconds."""


class ClientLeft(StenoError):
    """The agent closed its connection. Nobody is told; 499 is nginx's word for it, for the metrics."""

    status = 499
    code = "client_left"


class ProxyStopping(StenoError):
    """The proxy was told to stop, and its streams had their time."""

    status = 503
    code = "proxy_stopped"
    retryable = True


class TurnClient(Protocol):
    """Who asked, as far as a turn cares. Writes after the client has left do nothing."""

    gone: bool

    def ready(self) -> None:
        """The prompt is accepted: from here on silences may be filled with keepalives."""
        ...

    async def write(self, data: bytes) -> None:
        """Some events; the first ones start the response."""
        ...

    async def end(self, data: bytes) -> None:
        """The last events."""
        ...

    async def answer(self, body: bytes) -> None:
        """The whole answer to a request that is not streamed."""
        ...


class WriteTimeout:
    """Bounds writes to a client that may not read: use `async with` around them. They have no bound until `over` is called.

    Raises: on exit, the error that was given to `over`, if the timeout ended a write."""

    def __init__(self) -> None:
        self._timeout = asyncio.timeout(None)
        self._error: StenoError | None = None
        self._inside = False

    def over(self, error: StenoError) -> None:
        """End a write that takes longer than ABORT_S from now. Idempotent."""
        if self._error is None:
            self._error = error
            if self._inside:
                self._start()

    def _start(self) -> None:
        self._timeout.reschedule(asyncio.get_running_loop().time() + ABORT_S)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._inside = True
        if self._error is not None:
            self._start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside = False
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            assert self._error is not None
            raise self._error from None


class RunningAnswer(Protocol):
    """What answers one client: a request of its own, one that it joined, or an answer given again."""

    done: asyncio.Event

    def abort(self, error: StenoError) -> None:
        """Stop answering; `run` raises `error`, within about ABORT_S if the client reads nothing. Idempotent, and nothing once it
        is done."""
        ...

    def broken(self, error: StenoError) -> bytes:
        """The events that end an answer which fails midway; b"": its connection is to be broken instead."""
        ...

    async def run(self) -> None:
        """Answer. Raises: StenoError: what the client should be told, if it can still be told."""
        ...
