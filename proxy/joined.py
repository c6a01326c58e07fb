"""A second client of a request that runs: a retry of it, sent while the first connection still looked alive.

It gets what has come so far, then what comes. It reads at its own pace: what it has not read waits here, bounded, so that it
holds up neither the request nor its first client. What may leave when (I3) the request decides, for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from proxy.answering import Client, Patience
from proxy.contracts.canonical import CanonicalRequest
from proxy.contracts.errors import StenoError
from proxy.contracts.frames import Started
from proxy.dialects.base import Breaker, Choice, Dialect, Header, Piece, Writer

MAX_WAITING_BYTES = 8 * 2**20
"""A client that is so far behind does not read any more. What had come before it did does not count. An answer of 64,000 tokens
is about this in events."""


class TooSlow(StenoError):
    """The client does not read its answer."""

    status = 503
    code = "client_too_slow"


class Host(Protocol):
    """The request that is joined."""

    async def saved(self, index: int) -> None:
        """What has come so far of a choice is on record."""
        ...

    def leave(self, joined: Joined) -> None: ...


class Joined:
    """`Answering` beside another client. Between `run` and the host's calls nothing is awaited, so events keep their order."""

    def __init__(self, host: Host, dialect: Dialect, asked: CanonicalRequest, client: Client, header: Header) -> None:
        self.done = asyncio.Event()
        self.client = client
        self.streams = asked.stream
        self._host = host
        self._dialect = dialect
        self._asked = asked
        self._header = header
        self._writer: Writer | None = dialect.writer(asked, header) if asked.stream else None
        self._openings: dict[int, bytes] = {}  # of those choices that have begun; empty once it was put
        self._unsaved: list[int] = []
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._woken = asyncio.Event()
        self._reads = False  # it has begun to
        self._accepted = False
        self._ended = False
        self._failure: StenoError | None = None
        self._patience = Patience()

    # -- what the host says

    def catch_up(self, index: int, started: Started, pieces: Sequence[Piece]) -> None:
        """What has come of a choice before this client did. Blocks that this closes leave once they are on record."""
        self.accept()
        for piece in pieces:
            if self.closes(index, piece) and index not in self._unsaved:
                self._unsaved.append(index)
            self.piece(index, piece, started)

    def accept(self) -> None:
        """The prompt is accepted."""
        self._accepted = True
        self._woken.set()

    def closes(self, index: int, piece: Piece) -> bool:
        return self._writer is not None and self._writer.closes(index, piece)

    def piece(self, index: int, piece: Piece, started: Started) -> None:
        if self._writer is not None and self._failure is None:
            opening = self._begin(index, started.prompt_tokens, started.cached_tokens)
            if data := self._writer.piece(index, piece):
                self._put(opening + data)
                self._openings[index] = b""

    def finish(self, choice: Choice) -> None:
        """A choice is on record, whole."""
        if self._writer is not None and self._failure is None:
            opening = self._begin(choice.index, choice.prompt_tokens, choice.cached_tokens)
            self._put(opening + self._writer.finish(choice))
            self._openings[choice.index] = b""

    def end(self, choices: Sequence[Choice]) -> None:
        """All of them are."""
        if self._failure is None:
            if self._writer is not None:
                self._waiting.append(self._writer.end(choices))
            else:
                self._waiting.append(self._dialect.answer(self._asked, self._header, choices))
            self._ended = True
            self._woken.set()

    def fail(self, error: StenoError) -> None:
        """No more comes. Too late once everything has."""
        if self._failure is None and not self._ended:
            self._failure = error
            self._woken.set()
            self._patience.over(error)

    def _begin(self, index: int, prompt_tokens: int, cached_tokens: int) -> bytes:
        """The events before a choice's first, until that is put; made before it is, since events may be numbered."""
        assert self._writer is not None
        if index not in self._openings:
            self._openings[index] = self._writer.begin(index, prompt_tokens, cached_tokens)
        return self._openings[index]

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._woken.set()
        if self._reads:
            self._waiting_bytes += len(data)
            if self._waiting_bytes > MAX_WAITING_BYTES:
                self.fail(TooSlow("the client does not read its answer"))

    # -- what the route says

    def abort(self, error: StenoError) -> None:
        self.fail(error)
        self._patience.over(error)

    def unrecorded(self) -> tuple[int, int]:
        """The request has its turns."""
        return 0, 0

    def broken(self, error: StenoError) -> bytes:
        if isinstance(self._writer, Breaker):
            return b"".join([*self._openings.values(), self._writer.broken(error)])
        return self._dialect.broken(error)

    async def run(self) -> None:
        self._reads = True
        try:
            async with self._patience:
                for index in self._unsaved:
                    await self._host.saved(index)
                while not await self._flush():
                    await self._woken.wait()
        finally:
            self._host.leave(self)
            self.done.set()

    async def _flush(self) -> bool:
        """Write what waits. True: that was all there will be."""
        self._woken.clear()
        if self._accepted:
            self._accepted = False
            self.client.ready()
        data, self._waiting, self._waiting_bytes = b"".join(self._waiting), [], 0
        if self._ended:
            await (self.client.end(data) if self._writer is not None else self.client.answer(data))
            return True
        if data:
            await self.client.write(data)
        if self._failure is not None:
            raise self._failure
        return False
