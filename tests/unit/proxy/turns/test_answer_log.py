"""What a reader of an answer has been told, and whether it holds anything up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from steno.contracts.chat import Sampling, ToolCallPiece
from steno.contracts.errors import EngineFailed
from steno.contracts.records import Limits, Session
from steno.contracts.wire.frames import Started
from steno_proxy.dialects.anthropic.dialect import MessagesDialect
from steno_proxy.dialects.base import Choice, Dialect, Header, Piece
from steno_proxy.dialects.openai.chat import ChatDialect
from steno_proxy.dialects.openai.completions import CompletionsDialect
from steno_proxy.dialects.responses.dialect import ResponsesDialect
from steno_proxy.turns import answer_log as module
from steno_proxy.turns.answer_log import LogReader
from steno_proxy.turns.request import Request
from tests.support.records.choices import Said

STARTED = Started(1, 0, b"", 3, b"", Sampling())
CHOICE = Choice(0, {"role": "assistant", "content": "abc"}, "stop", 3, 4)
CALL = Piece(tool_calls=[ToolCallPiece(0, "{}", "call_0_0", "f")])


class Reader:
    """A client that takes what is written when `reads` is set."""

    def __init__(self, *, reads: bool = True) -> None:
        self.gone = False
        self.reads = asyncio.Event()
        self.seen: list[bytes] = []
        if reads:
            self.reads.set()

    def ready(self) -> None:
        pass

    async def write(self, data: bytes) -> None:
        await self.reads.wait()
        self.seen.append(data)

    async def end(self, data: bytes) -> None:
        await self.write(data)

    async def answer(self, body: bytes) -> None:
        await self.write(body)


def reader(dialect: Dialect, client: Reader, **fields: Any) -> LogReader:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "max_tokens": 9,
        "stream": True,
    }
    asked = dialect.parse(msgspec.json.encode(body | fields))
    return LogReader(dialect, asked, client, Header("0" * 12, 1, "m"))


async def request(client: Reader, clock: float = 30.0) -> Request:
    said = await Said.begin()
    runner: Any = SimpleNamespace(clock=lambda: clock)
    found = Request(runner, said.choice._recording, ChatDialect(), said.choice.plan)
    found.choices = [said.choice]
    found.begin(client, 10.0)
    return found


SPLIT = "a\x85b\u2028c\u2029\u00e9"


@pytest.mark.parametrize("dialect", [ChatDialect(), MessagesDialect()])
async def test_an_event_is_one_line_for_clients_that_split_lines_at_more_than_line_feeds(dialect: Dialect) -> None:
    """httpx's `iter_lines` does, by which LiteLLM reads: what came after it in the event was lost, calls and all."""
    log = reader(dialect, client := Reader())
    log.piece(0, Piece(SPLIT), STARTED)
    await log.flush()
    told = b"".join(client.seen).decode()
    assert told.splitlines() == told.split("\n")[:-1] and "\u00e9" in told
    events = [msgspec.json.decode(line.partition("data: ")[2]) for line in told.splitlines() if "\\u2028" in line]
    [said] = [event.get("delta", {}).get("text") or event["choices"][0]["delta"]["content"] for event in events]
    assert said == SPLIT


async def test_so_is_an_event_that_ends_a_stream_which_broke() -> None:
    body = {"model": "m", "input": "x", "instructions": SPLIT, "stream": True}
    dialect = ResponsesDialect()
    log = LogReader(dialect, dialect.parse(msgspec.json.encode(body)), Reader(), Header("0" * 12, 1, "m"))
    told = log.broken(EngineFailed("lost")).decode()
    assert "response.failed" in told and told.splitlines() == told.split("\n")[:-1]
    assert msgspec.json.decode(told.rpartition("data: ")[2])["response"]["instructions"] == SPLIT


async def test_a_whole_answer_is_json_as_it_is() -> None:
    log = reader(ChatDialect(), client := Reader(), stream=False)
    log.end([Choice(0, {"role": "assistant", "content": SPLIT}, "stop", 3, 4)])
    await log.flush()
    assert SPLIT in client.seen[0].decode()


async def test_a_piece_that_wrote_nothing_tells_nothing_in_formats_without_an_opening() -> None:
    completions = reader(CompletionsDialect(), Reader())
    completions.piece(0, Piece(), STARTED)
    assert completions.written_choices() == set()
    completions.piece(0, Piece("a"), STARTED)
    assert completions.written_choices() == {0}


async def test_nothing_of_an_attempt_that_was_thrown_away_is_written() -> None:
    client = Reader()
    messages = reader(MessagesDialect(), client)
    messages.piece(0, Piece("\n\n"), STARTED)
    assert messages.written_choices() == set()
    messages.restart(0)
    messages.piece(0, Piece("abc"), STARTED)
    messages.finish(CHOICE)
    messages.end([CHOICE])
    await messages.flush()
    text = b"".join(client.seen)
    assert b'"text":"abc"' in text and text.count(b"message_start\n") == 1


async def test_a_write_waits_until_all_that_wait_have_ended() -> None:
    client = Reader(reads=False)
    chat = reader(ChatDialect(), client, n=2)
    chat.piece(0, Piece("a"), STARTED)
    stuck = asyncio.create_task(chat.flush())
    await asyncio.sleep(0)
    assert chat.writing
    assert await asyncio.wait_for(chat.flush(), 5) is False, "there is nothing to write"
    assert chat.writing
    chat.piece(1, Piece("b"), STARTED)
    also = asyncio.create_task(chat.flush())
    await asyncio.sleep(0)
    client.reads.set()
    await asyncio.gather(stuck, also)
    assert not chat.writing and len(client.seen) == 2


async def test_the_last_write_does_not_hold_up_those_who_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_S", 0.01)
    client, other = Reader(reads=False), Reader()
    running = await request(client)
    monkeypatch.setattr(running, "_choice", lambda choice: asyncio.sleep(0, CHOICE))
    running.log.add(reader(ChatDialect(), other, stream=False), [])
    await asyncio.wait_for(running._run(), 5)
    assert client.gone


@pytest.mark.parametrize(("limit", "left"), [(50, 20.0), (25, 0.0)])
async def test_the_wall_time_runs_while_a_request_waits(limit: int, left: float) -> None:
    """It came at 10 s, and has begun at 30 s."""
    said = await request(Reader())
    said.recording.session = Session(
        trial_id="t", created_at=0.0, updated_at=0.0, first_turn_at=0.001, limits=Limits(max_wall_s=limit)
    )
    said.begin(Reader(), 10.0)
    assert said._clock is not None
    assert said._clock.when() - asyncio.get_running_loop().time() == pytest.approx(left, abs=2)
    said._clock.cancel()
