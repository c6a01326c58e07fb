"""The answer of a request, and the clients that read it: the one that came first, and retries that joined it.

A `LogReader` is one client: it turns what the log tells it into events of its own format, and keeps them until they are flushed.
`AnswerLog` tells all readers of one request the same, and keeps I3: it passes on a piece that closes a block once the turn so far
is on record, and the end of a choice once its turn is. A reader that joins sends the earlier pieces once they are on record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from steno.contracts.chat import CanonicalRequest
from steno.contracts.errors import StenoError
from steno_proxy.dialects.base import Choice, Dialect, FailureWriter, Header, Piece, PromptIdsWriter, Writer
from steno_proxy.turns.interfaces import TurnClient

STALL_S = 2.0
"""How long the client that came first may hold up those who joined its request, once. Seconds."""
_LINE_ENDS = [(char.encode(), rb"\u%04x" % ord(char)) for char in "\x85\u2028\u2029"]
"""Characters that end a line for `str.splitlines`, and so for clients that read streams by httpx's lines (LiteLLM's of Messages):
they lost the rest of the event. In events these characters stand only inside JSON strings, where they may be escaped."""


class PromptedChoice(Protocol):
    """A choice whose prompt is known. prompt_ids: int32 LE, of the whole prompt; read for clients that asked for them."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def prompt_ids(self) -> bytes: ...


class LogReader:
    """One client of an answer.

    client: who reads. streams: the client gets events, instead of one body. whole: it is told nothing of the answer before its
    end: a body, or the events of a summary.
    """

    def __init__(self, dialect: Dialect, asked: CanonicalRequest, client: TurnClient, header: Header) -> None:
        self.client = client
        self._writes = 0
        self._dialect = dialect
        self._asked = asked
        self._header = header
        self._writer: Writer | None = dialect.writer(asked, header) if asked.stream else None
        self.streams = self._writer is not None
        self.whole = asked.compacts or not self.streams
        self._openings: dict[int, bytes] = {}  # by choice: the events before its first, if any; b"" once they were put
        self._written: set[int] = set()  # choices of which events were put
        self._waiting: list[bytes] = []
        self._ended = False

    # -- what the log says

    def accept(self) -> None:
        """Tell the client that the prompt was accepted."""
        self.client.ready()

    def closes(self, index: int, piece: Piece) -> bool:
        """Whether the piece closes a block for this client. Asked once for each piece, before it is said."""
        return self._writer is not None and self._writer.closes(index, piece)

    def piece(self, index: int, piece: Piece, of: PromptedChoice) -> None:
        if self._writer is not None:
            opening = self._openings.get(index)
            if opening is None:
                opening = self._open(index, of)
            if data := self._writer.piece(index, piece):
                if opening:
                    self._openings[index] = b""
                    data = opening + data
                self._written.add(index)
                self._put(data)

    def finish(self, choice: Choice) -> None:
        """Write the end of a choice. Its turn is on record."""
        if self._writer is not None:
            opening = self._open(choice.index, choice)
            self._openings[choice.index] = b""
            if data := opening + self._writer.finish(choice):
                self._written.add(choice.index)
                self._put(data)

    def end(self, choices: Sequence[Choice]) -> None:
        """Write the end of the answer, or the whole answer. All turns are on record."""
        if self._writer is not None:
            self._waiting.append(self._writer.end(choices))
        else:
            self._waiting.append(self._dialect.answer(self._asked, self._header, choices))
        self._ended = True

    def fail(self, error: StenoError) -> None:
        """Nothing more will come. Does nothing here: the request itself tells its first client of the error."""

    def broken(self, error: StenoError) -> bytes:
        """Return the events that end an answer which fails midway. b"": the connection must be broken instead."""
        if isinstance(self._writer, FailureWriter):
            return _in_lines(b"".join([*self._openings.values(), self._writer.broken(error)]))
        return _in_lines(self._dialect.broken(error))

    def written_choices(self) -> set[int]:
        """Return the indexes of the choices for which events were written."""
        return self._written

    def restart(self, index: int) -> None:
        """A choice begins again, and none of its events was written. The writer may hold back parts of the earlier attempt (space
        at the start of a text, a call whose kind was not known yet), so it is replaced. Writers of several choices hold back
        nothing of this kind."""
        if self._writer is not None and self._asked.n == 1:
            self._openings.pop(index, None)
            self._writer = self._dialect.writer(self._asked, self._header)

    def _open(self, index: int, of: PromptedChoice) -> bytes:
        """Return the events that open a choice; b"" after they were put. They are made first, since events may be numbered."""
        assert self._writer is not None
        if index not in self._openings:
            if self._asked.returns_ids and isinstance(self._writer, PromptIdsWriter):
                self._writer.prompt(of.prompt_ids)
            self._openings[index] = self._writer.begin(index, of.prompt_tokens, of.cached_tokens)
        return self._openings[index]

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)

    # -- what leaves

    async def flush(self) -> bool:
        """Write the waiting events, and return when the client has taken them. Returns: True: they were the last ones."""
        data, self._waiting, ended = b"".join(self._waiting), [], self._ended  # more may come while the client reads
        if self.streams:
            data = _in_lines(data)
        if not (data or ended):
            return False
        self._writes += 1
        try:
            if ended:
                await (self.client.end(data) if self._writer is not None else self.client.answer(data))
            else:
                await self.client.write(data)
        finally:
            self._writes -= 1
        return ended

    @property
    def writing(self) -> bool:
        """Whether a write is waiting for the client to read; choices of one request may wait at the same time."""
        return self._writes > 0


class LoggedChoice(PromptedChoice, Protocol):
    """What the log needs of a choice. finished: whole and on record; None: not yet."""

    index: int
    finished: Choice | None

    def pieces(self) -> Sequence[Piece] | None:
        """All that has come of it. None: it has not begun."""
        ...

    def note_delivered(self, tokens: int) -> None:
        """Note that the events of so many tokens have been sent to a client."""
        ...

    async def saved(self) -> None:
        """Save the turn as far as it has come. Raises: as `Recorder.commit`."""
        ...

    async def committed(self, error: StenoError | None, *, in_one_piece: bool = False) -> None:
        """Have its turn on record, whole. Raises: as `Recorder.commit`."""
        ...

    def finish(self, now: float) -> Choice:
        """Return what clients are to see of the choice. Its whole turn is on record."""
        ...


class AnswerLog:
    """Tells all readers of one request the same.

    first: the reader that the request waits for, so that a slow client slows its own turn. joined: readers that came later; they
    read at their own pace. shared: True once a reader has joined, also after it has left.
    """

    def __init__(self, first: LogReader) -> None:
        self.first = first
        self.joined: list[LogReader] = []
        self.shared = False
        self._readers: tuple[LogReader, ...] = (first,)  # all of them; another tuple when that changes
        self._told: set[int] = set()  # choices of which readers that have left had events

    def add(self, reader: LogReader, choices: Iterable[LoggedChoice]) -> Callable[[], Awaitable[None]]:
        """Tell a reader that joins what has come. Returns: a function that the reader must await before it sends any of that: it
        puts the blocks that this closes for the client on record."""
        closed = []
        for choice in choices:
            if (pieces := choice.pieces()) is not None:
                reader.accept()
                if _tell(reader, choice, pieces):
                    closed.append(choice)
            if choice.finished is not None:
                reader.finish(choice.finished)
        self.joined.append(reader)
        self._readers = (self.first, *self.joined)
        self.shared = True

        async def on_record() -> None:
            for choice in closed:
                await choice.saved()

        return on_record

    def remove(self, reader: LogReader) -> None:
        self.joined.remove(reader)
        self._readers = (self.first, *self.joined)
        self._told |= reader.written_choices()

    def accept(self) -> None:
        for reader in self._readers:
            reader.accept()

    def piece(self, choice: LoggedChoice, piece: Piece, before: int) -> Awaitable[None] | None:
        """Tell all readers a piece. before: how many tokens of the choice came before it.

        Returns: None: the readers were told. Else the piece closes a block: await this, which saves the turn so far and tells the
        readers then.
        """
        closes = False
        for reader in self._readers:  # each is asked
            closes = reader.closes(choice.index, piece) or closes
        if closes:
            return self._closing_piece(choice, piece, before)
        for reader in self._readers:
            reader.piece(choice.index, piece, choice)
        return None

    async def _closing_piece(self, choice: LoggedChoice, piece: Piece, before: int) -> None:
        readers = self._readers  # those who join while this waits have the piece from the transcript
        await self.flush()
        if self.is_read():
            choice.note_delivered(before)
        await choice.saved()
        for reader in readers:
            reader.piece(choice.index, piece, choice)

    async def finish(self, choice: LoggedChoice, now: float) -> Choice:
        """Have the turn of a choice on record, and tell its end. Raises: as `Recorder.commit`."""
        await choice.committed(None, in_one_piece=self.has_whole())
        finished = choice.finish(now)
        for reader in self._readers:
            reader.finish(finished)
        return finished

    def end(self, choices: Sequence[Choice]) -> None:
        """Tell the end of the answer. All turns are on record."""
        for reader in self._readers:
            reader.end(choices)

    def flush(self) -> Awaitable[object]:
        """Write what waits for the first client. While others have joined, this takes STALL_S at most."""
        return self._flush_in_time() if self.joined else self.first.flush()

    async def _flush_in_time(self) -> None:
        try:
            async with asyncio.timeout(STALL_S):
                await self.first.flush()
        except TimeoutError:
            self.first.client.gone = True

    def restart(self, index: int) -> None:
        """A choice begins again of which no reader was told anything."""
        for reader in self._readers:
            reader.restart(index)

    def nothing_written(self, index: int) -> bool:
        """Whether no reader was told anything of this choice."""
        return index not in self._told and not any(index in reader.written_choices() for reader in self._readers)

    def has_whole(self) -> bool:
        """Whether some reader gets the answer in one piece, which is sent right after the commit."""
        return any(reader.whole and not reader.client.gone for reader in self._readers)

    def is_read(self) -> bool:
        """Whether some reader gets events as they come."""
        return _is_read(self.first) or any(map(_is_read, self.joined))


def _tell(reader: LogReader, choice: LoggedChoice, pieces: Sequence[Piece]) -> bool:
    """Tell a reader these pieces. Returns: whether one of them closes a block for this client."""
    closes = False
    for piece in pieces:
        closes = reader.closes(choice.index, piece) or closes
        reader.piece(choice.index, piece, choice)
    return closes


def _in_lines(data: bytes) -> bytes:
    """Escape the characters that some clients take for the end of a line (`_LINE_ENDS`)."""
    if not data.isascii():
        for line_end, escaped in _LINE_ENDS:
            data = data.replace(line_end, escaped)
    return data


def _is_read(reader: LogReader) -> bool:
    return not reader.whole and not reader.client.gone
