"""Who joins an answer reads at its own pace, in order, and not without bound."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from steno.contracts.chat import Sampling
from steno.contracts.errors import EngineFailed
from steno.contracts.wire.frames import Started
from steno_proxy.dialects.base import Choice, Dialect, Header, Piece
from steno_proxy.dialects.openai.chat import ChatDialect
from steno_proxy.dialects.responses.dialect import ResponsesDialect
from steno_proxy.turns import joined as module
from steno_proxy.turns.answer_log import AnswerLog, LogReader
from steno_proxy.turns.joined import ClientTooSlow, JoinedReader, give_up_slowest

STARTED = Started(1, 0, b"", 3, b"", Sampling())
CHOICE = Choice(0, {"role": "assistant", "content": "abc"}, "stop", 3, 4)


class Reader:
    """A client that reads when it is told to."""

    def __init__(self) -> None:
        self.gone = False
        self.reads = asyncio.Event()
        self.seen: list[bytes] = []
        self.is_ready = self.ended = False

    def ready(self) -> None:
        self.is_ready = True

    async def write(self, data: bytes) -> None:
        await self.reads.wait()
        self.seen.append(data)

    async def end(self, data: bytes) -> None:
        await self.write(data)
        self.ended = True

    async def answer(self, body: bytes) -> None:
        await self.end(body)


class Begun:
    """A choice of which something has come. Its saves wait for `may_save`."""

    prompt_tokens, cached_tokens, prompt_ids = 3, 0, b""

    def __init__(self, pieces: list[Piece], saves: list[int], may_save: asyncio.Event) -> None:
        self.index = 0
        self.finished: Choice | None = None
        self._pieces = pieces
        self._saves = saves
        self._may_save = may_save

    def pieces(self) -> list[Piece]:
        return self._pieces

    async def saved(self) -> None:
        await self._may_save.wait()
        self._saves.append(self.index)


class Host:
    def __init__(self) -> None:
        self.left: list[JoinedReader] = []
        self.saves: list[int] = []
        self.may_save = asyncio.Event()
        self.may_save.set()
        self.joined: list[JoinedReader] = []

    def more_waits(self) -> None:
        give_up_slowest(self.joined)

    def leave(self, joined: JoinedReader) -> None:
        self.left.append(joined)


def join(
    *, stream: bool = True, dialect: Dialect | None = None, host: Host | None = None, past: list[Piece] | None = None
) -> tuple[JoinedReader, Reader, Host]:
    """past: what has come of the answer before this client; None: nothing has begun."""
    client, host = Reader(), host or Host()
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "input": "x", "stream": stream}
    dialect = dialect or ChatDialect()
    asked = dialect.parse(msgspec.json.encode(body))
    header = Header("0" * 12, 1, "m")
    joined = JoinedReader(host, dialect, asked, client, header)
    choices: Any = [] if past is None else [Begun(past, host.saves, host.may_save)]
    joined.on_record = AnswerLog(LogReader(dialect, asked, Reader(), header)).add(joined, choices)
    host.joined.append(joined)
    return joined, client, host


def events(data: bytes) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line[5:]) for line in data.splitlines() if line.startswith(b"data:")]


def check_numbers(found: list[dict[str, Any]]) -> None:
    """A response's events begin with what begins it, once, and are numbered as they come."""
    kinds = [event["type"] for event in found]
    assert kinds[0] == "response.created" and kinds.count("response.created") == 1
    assert [event["sequence_number"] for event in found] == list(range(len(found)))


async def test_what_came_before_comes_first_and_nothing_waits_for_the_reader() -> None:
    joined, client, host = join(past=[Piece("a")])
    run = asyncio.create_task(joined.run())
    await asyncio.sleep(0)
    joined.piece(0, Piece("b"), STARTED)
    joined.piece(0, Piece("c"), STARTED)
    joined.finish(CHOICE)
    joined.end([CHOICE])
    client.reads.set()
    await run
    text = b"".join(client.seen)
    places = [text.index(b'"content":"%s"' % letter) for letter in (b"a", b"b", b"c")]
    assert places == sorted(places)
    assert text.count(b'"role"') == 1 and text.endswith(b"data: [DONE]\n\n")
    assert client.is_ready and client.ended and host.left == [joined] and host.saves == []


async def test_a_block_that_the_past_has_closed_leaves_once_it_is_on_record() -> None:
    """I3. In this format the text closes the block of the reasoning before it."""
    joined, client, host = join(dialect=ResponsesDialect(), past=[Piece(reasoning="r"), Piece("a")])
    client.reads.set()
    host.may_save.clear()
    run = asyncio.create_task(joined.run())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not client.seen and not client.is_ready
    host.may_save.set()
    joined.finish(CHOICE)
    joined.end([CHOICE])
    await run
    assert host.saves == [0] and client.ended


async def test_an_answer_in_one_piece_comes_at_the_end() -> None:
    joined, client, _ = join(stream=False)
    client.reads.set()
    run = asyncio.create_task(joined.run())
    joined.piece(0, Piece("a"), STARTED)
    joined.end([CHOICE])
    await run
    assert len(client.seen) == 1 and b'"content":"abc"' in client.seen[0]


async def test_a_failure_comes_after_what_came_before_it_and_ends_it() -> None:
    joined, client, host = join(past=[Piece("a")])
    client.reads.set()
    joined.fail(EngineFailed("the engine has died"))
    joined.piece(0, Piece("b"), STARTED)
    with pytest.raises(EngineFailed):
        await joined.run()
    assert b'"a"' in b"".join(client.seen) and b'"b"' not in b"".join(client.seen)
    assert not client.ended and host.left == [joined]


async def test_what_begins_an_answer_is_numbered_before_its_first_piece() -> None:
    joined, client, _ = join(dialect=ResponsesDialect(), past=[Piece()])
    client.reads.set()
    joined.piece(0, Piece("ab"), STARTED)
    joined.piece(0, Piece("c"), STARTED)
    joined.finish(CHOICE)
    joined.end([CHOICE])
    await joined.run()
    found = events(b"".join(client.seen))
    check_numbers(found)
    assert found[-1]["type"] == "response.completed"


@pytest.mark.parametrize("pieces", [[], [Piece()], [Piece("a")], [Piece(reasoning="a"), Piece("b")]])
async def test_an_answer_that_breaks_has_a_beginning_and_numbers_without_gaps(pieces: list[Piece]) -> None:
    joined, client, _ = join(dialect=ResponsesDialect(), past=pieces)
    client.reads.set()
    error = EngineFailed("the engine has died")
    joined.fail(error)
    joined.piece(0, Piece("too late"), STARTED)
    with pytest.raises(EngineFailed):
        await joined.run()
    seen = b"".join(client.seen)
    found = events(seen + joined.broken(error))
    assert b"too late" not in seen and found[-1]["type"] == "response.failed"
    if pieces:
        check_numbers(found)


async def test_however_much_there_was_before_it_came_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 2000)
    joined, client, _ = join(past=[Piece(reasoning="r" * 3000), Piece("a" * 3000)])
    client.reads.set()
    joined.finish(CHOICE)
    joined.end([CHOICE])
    await joined.run()
    assert client.ended and b"".join(client.seen).endswith(b"data: [DONE]\n\n")


async def test_what_is_cut_off_for_slowness_never_looks_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 2000)
    joined, client, host = join(dialect=ResponsesDialect(), past=[Piece(reasoning="r"), Piece("a")])
    client.reads.set()
    host.may_save.clear()
    run = asyncio.create_task(joined.run())
    await asyncio.sleep(0)
    for _ in range(100):
        joined.piece(0, Piece("a word"), STARTED)
    joined.finish(CHOICE)
    joined.end([CHOICE])
    host.may_save.set()
    with pytest.raises(ClientTooSlow) as slow:
        await run
    found = events(b"".join(client.seen) + joined.broken(slow.value))
    check_numbers(found)
    assert not client.ended and found[-1]["type"] == "response.failed"


async def test_one_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 2000)
    joined, client, _ = join()
    run = asyncio.create_task(joined.run())
    await asyncio.sleep(0)
    for _ in range(100):
        joined.piece(0, Piece("a word"), STARTED)
    client.reads.set()
    with pytest.raises(ClientTooSlow):
        await run
    assert sum(map(len, client.seen)) < 3000


async def test_what_waits_for_all_of_a_request_is_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who are furthest behind are given up; who reads is not."""
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 8000)
    host = Host()
    found = [join(host=host)[:2] for _ in range(16)]
    reading, client = found[0]
    client.reads.set()
    runs = [asyncio.create_task(joined.run()) for joined, _ in found]
    await asyncio.sleep(0)
    for _ in range(100):
        for joined, _ in found:
            joined.piece(0, Piece("a word"), STARTED)
        assert sum(joined.behind_bytes for joined, _ in found) <= 8000
        for _ in range(3):
            await asyncio.sleep(0)
    given_up = [joined for joined, _ in found if joined._failure is not None]
    assert len(given_up) >= 14 and reading not in given_up
    reading.finish(CHOICE)
    reading.end([CHOICE])
    await runs[0]
    assert client.ended
    for _, slow in found:
        slow.reads.set()
    for joined, _ in found[1:]:
        joined.fail(EngineFailed("the engine has died"))
    ended = await asyncio.gather(*runs[1:], return_exceptions=True)
    assert sum(isinstance(error, ClientTooSlow) for error in ended) == len(given_up)
