"""The recorder before a proxy: what passes it is unchanged, and what it writes can be replayed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.http.conftest import running
from tests.support.wire_recorder import WireRecorder
from tests.support.workers.parrot import ParrotEngine, Say
from tests.wire.filler import fill
from tests.wire.fixture import read

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Please look."}], "stream": True}


async def test_it_writes_what_was_asked_and_answered_without_prose_and_keys(tmp_path: Path) -> None:
    engine = ParrotEngine(lambda request: Say("I look.", "Hm.", [("own", "look", '{"at": "pwd"}')]))
    async with running(engine) as proxy:
        with WireRecorder(proxy.port) as recorder:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{recorder.port}", timeout=60) as agent:
                headers = {"authorization": "Bearer secret-key", "x-stainless-retry-count": "0"}
                first = await agent.post("/seen/v1/chat/completions", json=ASKED, headers=headers)
                [turn] = await proxy.turns("seen", 1)
                call: dict[str, Any] = turn.reply["tool_calls"][0]
                assert first.text.rstrip().endswith("data: [DONE]") and call["id"] in first.text
                echo = [
                    *ASKED["messages"], {"role": "assistant", "content": "I look.", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": call["id"], "content": "/home/me"},
                ]  # fmt: skip
                await agent.post("/seen/v1/chat/completions", json={"messages": echo})
                assert (await agent.get("/sessions/seen")).status_code == 200

            def turns_of(trial: str) -> list[dict[str, Any]]:
                return list(httpx.get(f"{proxy.url}/sessions/{trial}/turns", timeout=60).json()["items"])

            await asyncio.to_thread(recorder.write, tmp_path, turns_of)
    one, two = read(tmp_path / "seen.jsonl").exchanges
    assert "secret" not in (tmp_path / "seen.jsonl").read_text()
    assert one.headers["x-stainless-retry-count"] == "0" and "authorization" not in one.headers
    assert one.body is not None and two.body is not None and one.answer is not None and two.answer is not None
    assert one.body["messages"] == [{"role": "user", "content": fill("Please look.")}]
    assert (
        two.body["messages"][1]["tool_calls"][0]["id"] == "call_{{turn 0}}_0" == two.body["messages"][2]["tool_call_id"]
    )
    assert two.body["messages"][1]["content"] == "I look." and two.body["messages"][2]["content"] == fill("/home/me")
    assert (one.answer.parent, two.answer.parent, two.answer.fork_reason) == (None, 0, None)
    assert one.answer.calls == [("look", '{"at": "pwd"}')]


async def test_a_stream_that_breaks_breaks_through_it_and_what_came_of_it_is_written(tmp_path: Path) -> None:
    async with running(ParrotEngine(lambda request: Say("I look for it.", fail_after=3))) as proxy:
        with WireRecorder(proxy.port) as recorder:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{recorder.port}", timeout=60) as agent:
                with pytest.raises(httpx.RemoteProtocolError):
                    await agent.post("/broken/v1/chat/completions", json=ASKED)

            def turns_of(trial: str) -> list[dict[str, Any]]:
                return list(httpx.get(f"{proxy.url}/sessions/{trial}/turns", timeout=60).json()["items"])

            await asyncio.to_thread(recorder.write, tmp_path, turns_of)
    [exchange] = read(tmp_path / "broken.jsonl").exchanges
    assert exchange.answer is not None and exchange.answer.broke and not exchange.answer.closed
    assert (exchange.status, exchange.answer.content, exchange.answer.parent) == (200, "I l", None)


async def test_a_failure_in_one_piece_is_known_for_the_turn_that_broke(tmp_path: Path) -> None:
    saying = [Say("I look for it.", fail_after=3), Say("Done.")]
    async with running(ParrotEngine(lambda request: saying.pop(0))) as proxy:
        with WireRecorder(proxy.port) as recorder:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{recorder.port}", timeout=60) as agent:
                body = ASKED | {"stream": False}
                first = await agent.post("/whole/v1/chat/completions", json=body)
                again = await agent.post(
                    "/whole/v1/chat/completions", json=body, headers={"x-stainless-retry-count": "1"}
                )
                assert (first.status_code, again.status_code) == (503, 200)

            def turns_of(trial: str) -> list[dict[str, Any]]:
                return list(httpx.get(f"{proxy.url}/sessions/{trial}/turns", timeout=60).json()["items"])

            await asyncio.to_thread(recorder.write, tmp_path, turns_of)
    broke, whole = read(tmp_path / "whole.jsonl").exchanges
    assert broke.answer is not None and broke.answer.broke and broke.answer.content == "I l" and broke.status == 503
    assert whole.answer is not None and whole.answer.retry_of == 0
