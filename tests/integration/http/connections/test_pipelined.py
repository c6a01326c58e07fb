"""Requests that come on one connection before the first is answered."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say


async def send(proxy: Proxy, *, stream: bool, requests: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    payload = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": stream}).encode()
    head = b"POST /t/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(payload)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write((head + payload) * requests)
    return reader, writer


async def test_all_are_answered_one_after_the_other(proxy: Proxy) -> None:
    reader, writer = await send(proxy, stream=True, requests=3)
    async with asyncio.timeout(60):
        for _ in range(3):
            assert b"200 OK" in await reader.readuntil(b"\r\n")
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()
    assert [turn.partial for turn in await proxy.turns("t", at_least=3)] == [False] * 3


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_one_that_runs(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("abc", gates={1: gate}))) as proxy:
        _, writer = await send(proxy, stream=stream, requests=3)
        await until(lambda: any(request.choices[0].transcript.tokens for request in proxy.app.state.turns._running))
        writer.close()
        await until(lambda: proxy.engine.cancelled)
        [turn] = await proxy.turns("t", at_least=1)
        assert (turn.partial, turn.finish_reason) == (True, "cancelled")
        assert len(proxy.engine.requests) == 1, "what waited behind it is not begun"
    assert not [record for record in caplog.records if record.exc_info]
