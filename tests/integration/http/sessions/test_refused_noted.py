"""A request that was refused is seen on its session, over REST and in `steno sessions show`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import httpx
import pytest
from rich.console import Console

from steno.contracts.notes import Notes
from steno_cli.terminal.tree import headline
from steno_proxy.session_cache import note_writer
from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import ParrotEngine, Say


async def noted(proxy: Proxy, trial_id: str, **counts: int) -> Notes:
    """Once so much is noted."""
    async with asyncio.timeout(30):
        while True:
            notes = (await proxy.steno.session(trial_id)).notes
            if notes is not None and notes.counts == counts:
                return notes
            await asyncio.sleep(0.1)


async def test_what_was_refused_is_seen_on_the_session(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(note_writer, "EVERY_S", 3600.0)  # all in one round: each logs the first of its kind
    async with running(ParrotEngine(), admin_key="admin") as proxy:
        await proxy.steno.register("t")
        await proxy.http.post("/sessions/limited", json={"limits": {"max_turns": 1}})
        for _ in range(3):
            assert (await proxy.chat("t", "x", temperature="warm")).status_code == 400
        lines = [line for line in caplog.messages if "temperature" in line and line.startswith("request refused")]
        assert len(lines) == 1
        assert (await proxy.chat("limited", "x")).status_code == 200
        assert (await proxy.chat("limited", "y")).status_code == 403
        wrong: dict[str, Any] = {"headers": {"authorization": "Bearer wrong"}, "json": {"messages": []}}
        assert (await proxy.http.post("/t/v1/chat/completions", **wrong)).status_code == 403
        await proxy.app.turns["POST", "/v1/chat/completions"]._note_writer.flush()
        [note] = (await noted(proxy, "t", invalid_request=3)).newest
        assert note.times == 3 and "temperature" in note.text
        [spent] = (await noted(proxy, "limited", budget_spent=1)).newest
        assert "max_turns" in spent.text
        shown = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, ASYNC230, PTH123
        shown.print(headline(await proxy.steno.session("t")))
        text = shown.export_text()
        assert "notes: invalid_request 3" in text and "(3 times): " in text
        listed = [session async for session in proxy.steno.sessions()]
        assert [session.notes for session in listed] == [None, None]


@pytest.mark.parametrize(("stream", "said"), [(True, "request broken off: 503"), (False, "request refused: 503")])
async def test_the_log_tells_a_stream_that_broke_from_a_request_that_was_refused(
    stream: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine fails in the middle of the answer. What comes in one piece has had no status by then."""
    caplog.set_level(logging.INFO)
    async with running(ParrotEngine(lambda request: Say("abcdefgh", fail_after=3))) as proxy:
        with contextlib.suppress(httpx.RemoteProtocolError):  # so a stream of chat breaks
            assert (await proxy.chat("t", "x", stream=stream)).status_code == 503
        assert [line[: len(said)] for line in caplog.messages if line.startswith("request ")] == [said]
        assert any("no other worker that can serve this request" in line for line in caplog.messages)


async def test_a_refused_request_makes_no_session() -> None:
    store = MemoryStore()
    async with running(ParrotEngine(), store=store) as proxy:
        assert (await proxy.chat("nobody", "x", temperature="warm")).status_code == 400
        assert (await proxy.http.get("/sessions/nobody")).status_code == 404
    assert await store.notes("nobody") is None
