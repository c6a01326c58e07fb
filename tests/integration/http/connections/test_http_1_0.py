"""Clients of HTTP/1.0 (nginx is one to its upstreams, unless told otherwise) know no chunks: RFC 9112, 6.1 and 6.3."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from steno_proxy.api.agents import generation
from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import ParrotEngine, Say

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100}


async def ask(proxy: Proxy, path: str, **fields: Any) -> tuple[bytes, bytes]:
    """Head and body of the answer, read until the connection ends. Raises ConnectionResetError."""
    payload = json.dumps(BODY | fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        writer.write(b"POST %s HTTP/1.0\r\nconnection: keep-alive\r\n" % path.encode())
        writer.write(b"content-length: %d\r\n\r\n%s" % (len(payload), payload))
        async with asyncio.timeout(60):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return head.lower(), body
    finally:
        writer.close()


@pytest.mark.parametrize("path", ["/t/v1/chat/completions", "/t/v1/messages"])
async def test_a_stream_ends_with_its_connection(proxy: Proxy, path: str) -> None:
    head, body = await ask(proxy, path, stream=True)
    assert b"transfer-encoding" not in head and b"content-length" not in head and b"connection: close" in head
    lines = body.decode().splitlines()
    assert all(line == "" or line.startswith((":", "event: ", "data: ")) for line in lines), body
    assert "data: [DONE]" in lines or "event: message_stop" in lines


async def test_what_has_a_length_keeps_it(proxy: Proxy) -> None:
    head, body = await ask(proxy, "/t/v1/chat/completions")
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["choices"][0]["message"]["content"] == "hello"


async def test_an_answer_that_breaks_ends_with_a_reset() -> None:
    """There is no last chunk that could be missing (I3)."""
    async with running(ParrotEngine(lambda request: Say("abc", fail_after=2))) as proxy:
        with pytest.raises(ConnectionResetError):
            await ask(proxy, "/t/v1/chat/completions", stream=True)


async def test_one_that_is_long_comes_whole() -> None:
    async with running(ParrotEngine(lambda request: Say("x" * 20_000))) as proxy:
        _, body = await ask(proxy, "/t/v1/chat/completions", stream=True, max_tokens=100_000)
        assert body.count(b'"content":"x"') == 20_000 and body.endswith(b"data: [DONE]\n\n")


async def test_an_answer_that_nobody_foresaw_to_fail_ends_with_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> bytes:
        raise RuntimeError("a mistake")

    async with running(ParrotEngine(lambda request: Say("abc", fail_after=2))) as proxy:
        monkeypatch.setattr(generation.HttpClient, "end", fails)
        with pytest.raises(ConnectionResetError):
            await ask(proxy, "/t/v1/messages", stream=True)
