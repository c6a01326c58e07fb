"""What stands between a request and whoever sent it: the client as the turn sees it, and the turn as the route sees it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from proxy.contracts.errors import StenoError


class ClientLeft(StenoError):
    """The agent closed its connection. Nobody is told; 499 is nginx's word for it, for the metrics."""

    status = 499
    code = "client_left"


class Stopping(StenoError):
    """The proxy was told to stop, and its streams had their time."""

    status = 503
    code = "proxy_stopped"
    retryable = True


class Client(Protocol):
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


class Answering(Protocol):
    """What answers one client: a request of its own, one that it joined, or an answer given again."""

    done: asyncio.Event

    def abort(self, error: StenoError) -> None:
        """Stop answering; `run` raises `error`. Idempotent, and nothing once it is done."""
        ...

    def broken(self, error: StenoError) -> bytes:
        """The events that end an answer which fails midway; b"": its connection is to be broken instead."""
        ...

    async def run(self) -> None:
        """Answer. Raises: StenoError: what the client should be told, if it can still be told."""
        ...
