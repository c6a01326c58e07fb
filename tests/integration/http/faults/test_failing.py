"""One turn that is refused, breaks or can't be stored: what the agent is told, and what is on record."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from steno.contracts.errors import BadRequest, ContextOverflow, StoreUnavailable
from steno.contracts.records import IndexRow, Turn
from steno_proxy.dialects.base import Piece
from steno_proxy.dialects.openai.chat import ChatWriter
from steno_proxy.store.interface import RetryKey
from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say


async def broken(proxy: Proxy) -> bytes:
    """What came of a stream before its connection broke."""
    seen = b""
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with pytest.raises(httpx.RemoteProtocolError):
        async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
            async for data in response.aiter_bytes():
                seen += data
    return seen


async def test_errors_before_the_first_byte_have_status_and_retry_after() -> None:
    async with running(worker=False) as proxy:
        response = await proxy.chat("t", "x")
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "no_worker"
        assert await proxy.turns("t") == []


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_template_refuses_is_a_400_that_names_the_field(stream: bool) -> None:
    refusal = BadRequest("no such role here", field="messages.0.role")
    async with running(ParrotEngine(lambda request: Say(refuse=refusal))) as proxy:
        response = await proxy.chat("t", "x", stream=stream)
        assert response.status_code == 400 and response.json()["error"]["param"] == "messages.0.role"
        assert await proxy.turns("t") == []


async def test_a_context_overflow_has_its_own_code() -> None:
    overflow = ContextOverflow("too long", prompt_tokens=9, context_tokens=8)
    async with running(ParrotEngine(lambda request: Say(refuse=overflow))) as proxy:
        response = await proxy.chat("t", "x")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_an_engine_that_dies_before_the_first_token_is_a_503() -> None:
    async with running(ParrotEngine(lambda request: Say("abc", fail_after=0))) as proxy:
        response = await proxy.chat("t", "x", stream=True)
        assert response.status_code == 503 and "retry-after" in response.headers


async def test_an_engine_that_dies_after_the_first_byte_breaks_the_connection() -> None:
    async with running(ParrotEngine(lambda request: Say("abc", fail_after=2))) as proxy:
        seen = await broken(proxy)
        assert b'"b"' in seen and b"error" not in seen and b"[DONE]" not in seen
        [turn] = await proxy.turns("t")
        assert (turn.partial, turn.finish_reason, turn.completion_tokens) == (True, "error", 2)
        assert turn.error is not None and turn.error.startswith("engine_failed")


@pytest.mark.parametrize("say", [Say("abc", lie=1), Say("abc", no_logprobs=True)])
async def test_tokens_that_do_not_add_up_are_an_error_and_never_padded(say: Say) -> None:
    """I1."""
    async with running(ParrotEngine(lambda request: say)) as proxy:
        response = await proxy.chat("t", "x")
        assert response.status_code in (502, 503)
        assert not [turn for turn in await proxy.turns("t") if not turn.partial]


class FailingStore(MemoryStore):
    """A store whose commits fail, as one whose server has gone does."""

    async def commit(
        self, trial_id: str, turn: Turn, row: IndexRow, *, now: float, retry_key: RetryKey | None = None
    ) -> int:
        raise StoreUnavailable("the store is gone")


async def test_a_turn_that_could_not_be_stored_is_an_error_that_the_agent_sees() -> None:
    """I3."""
    async with running(store=FailingStore()) as proxy:
        assert (await proxy.chat("t", "x")).status_code == 503
        seen = await broken(proxy)
        assert b'"o"' in seen and b'"stop"' not in seen and b"[DONE]" not in seen


async def test_a_mistake_of_our_own_leaves_no_token_unaccounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """I4."""
    written = ChatWriter.piece

    def piece(self: ChatWriter, index: int, piece: Piece) -> bytes:
        if piece.content == "a":
            raise ValueError("nobody thought of this")
        return written(self, index, piece)

    monkeypatch.setattr(ChatWriter, "piece", piece)
    async with running(ParrotEngine(lambda request: Say("abc", gates={1: asyncio.Event()}))) as proxy:
        response = await proxy.chat("t", "x", stream=True)
        assert response.status_code == 500 and "nobody thought" not in response.text
        await until(lambda: proxy.engine.cancelled)
        [turn] = await proxy.turns("t", 1)
        assert (turn.partial, turn.completion_tokens, turn.finish_reason) == (True, 1, "error")
        assert turn.error is not None and turn.error.startswith("internal_error")
        assert not proxy.app.state.turns._running
