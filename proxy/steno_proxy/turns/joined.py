"""A second client of a request that runs: a retry of it, sent while the first connection still looked alive.

It is a reader of the request's log that reads at its own pace: it gets what has come so far, then what comes. What it has not
read waits here, bounded, so that it holds up neither the request nor its first client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from steno.contracts.chat import CanonicalRequest
from steno.contracts.errors import StenoError
from steno_proxy.dialects.base import Choice, Dialect, Header, Piece
from steno_proxy.session_cache.session_state import AnswerSoFar
from steno_proxy.turns.answer_log import LogReader, PromptedChoice
from steno_proxy.turns.interfaces import TurnClient, WriteTimeout

MAX_WAITING_BYTES = 8 * 2**20
"""How much may wait for all joined readers of one request together, without what came before they joined. Beyond it, the reader
that is furthest behind is given up. The events of an answer of 64,000 tokens have about this size."""


class ClientTooSlow(StenoError):
    """The client does not read its answer."""

    status = 503
    code = "client_too_slow"


class JoinedRequest(Protocol):
    """The request that is joined."""

    def leave(self, joined: JoinedReader) -> None: ...

    def more_waits(self) -> None:
        """More waits for one of those who have joined: see `give_up_slowest`."""
        ...


class JoinedReader(LogReader):
    """`RunningAnswer` beside another client. Between `run` and the log's calls nothing is awaited, so events keep their order."""

    def __init__(
        self, request: JoinedRequest, dialect: Dialect, asked: CanonicalRequest, client: TurnClient, header: Header
    ) -> None:
        super().__init__(dialect, asked, client, header)
        self.done = asyncio.Event()
        self._request = request
        # What it was told may leave once this has returned (I3); set from `AnswerLog.add` on.
        self.on_record: Callable[[], Awaitable[None]]
        self._waiting_bytes = 0
        self._woken = asyncio.Event()
        self._reads = False  # it has begun to
        self._accepted = False
        self._failure: StenoError | None = None
        self._timeout = WriteTimeout()

    # -- what the log says; nothing more is heard after a failure

    def accept(self) -> None:
        self._accepted = True
        self._woken.set()

    def piece(self, index: int, piece: Piece, of: PromptedChoice) -> None:
        if self._failure is None:
            super().piece(index, piece, of)

    def finish(self, choice: Choice) -> None:
        if self._failure is None:
            super().finish(choice)

    def end(self, choices: Sequence[Choice]) -> None:
        if self._failure is None:
            super().end(choices)
            self._woken.set()

    def fail(self, error: StenoError) -> None:
        """End the answer with this error. Does nothing once the reader was told the end."""
        if self._failure is None and not self._ended:
            self._failure = error
            self._woken.set()
            self._timeout.over(error)

    def _put(self, data: bytes) -> None:
        super()._put(data)
        self._woken.set()
        if self._reads:
            self._waiting_bytes += len(data)
            self._request.more_waits()

    @property
    def behind_bytes(self) -> int:
        """How far behind it is; 0 once no more comes for it."""
        return 0 if self._failure is not None or self._ended else self._waiting_bytes

    # -- what the route says

    def abort(self, error: StenoError) -> None:
        self.fail(error)
        self._timeout.over(error)

    def unrecorded(self) -> tuple[int, int]:
        """The request has its turns."""
        return 0, 0

    def under_way(self, most: int) -> list[AnswerSoFar]:
        """The request has them."""
        return []

    async def run(self) -> None:
        self._reads = True
        try:
            async with self._timeout:
                await self.on_record()
                while not await self.flush():
                    if self._failure is not None:
                        raise self._failure
                    await self._woken.wait()
        finally:
            self._request.leave(self)
            self.done.set()

    async def flush(self) -> bool:
        self._woken.clear()
        self._waiting_bytes = 0
        if self._accepted:
            self._accepted = False
            self.client.ready()
        return await super().flush()


def give_up_slowest(readers: Iterable[JoinedReader]) -> None:
    """Keep what waits for all who have joined a request within MAX_WAITING_BYTES."""
    found = sorted(readers, key=lambda reader: reader.behind_bytes, reverse=True)
    total = sum(reader.behind_bytes for reader in found)
    for reader in found:
        if total <= MAX_WAITING_BYTES:
            return
        total -= reader.behind_bytes
        reader.fail(ClientTooSlow("the client has stopped reading its answer"))
