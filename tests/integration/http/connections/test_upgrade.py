"""A client that offers HTTP/2 over plain text is answered in HTTP/1.1, body and all."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import ParrotEngine

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi " * 4000}]}).encode()
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"


def head(extra: bytes) -> bytes:
    lines = b"POST /t/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return lines + OFFER + extra + b"\r\n"


def chunked(body: bytes) -> bytes:
    half = len(body) // 2
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:], b""))


async def answer(proxy: Proxy, *pieces: bytes) -> list[bytes]:
    """Status lines of what came back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
    seen = []
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        async with asyncio.timeout(30):
            for _ in range(b"".join(pieces).count(b"HTTP/1.1\r\n")):
                seen.append((await reader.readline()).strip())
                length = 0
                while (line := await reader.readline()).strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                await reader.readexactly(length)
    finally:
        writer.close()
    return seen


SIZED = head(b"Content-Length: %d\r\n" % len(BODY))
CHUNKED = head(b"Transfer-Encoding: chunked\r\n")
PLAIN = SIZED.replace(OFFER, b"")


@pytest.mark.parametrize(
    "pieces",
    [
        [SIZED + BODY],
        [SIZED, BODY],
        [SIZED[:60], SIZED[60:] + BODY[:100], BODY[100:]],
        [CHUNKED + chunked(BODY)],
        [SIZED + BODY, PLAIN + BODY, SIZED + BODY],
        [b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + OFFER + b"\r\n" + SIZED + BODY],
    ],
    ids=["at once", "head first", "in pieces", "chunked", "one connection", "after another without a body"],
)
async def test_an_offer_that_is_not_taken_changes_nothing(pieces: list[bytes]) -> None:
    async with running(ParrotEngine()) as proxy:
        seen = await answer(proxy, *pieces)
        assert seen == [b"HTTP/1.1 200 OK"] * len(seen) and seen
        turns = await proxy.turns("t", 1)
        assert turns[0].messages == json.loads(BODY)["messages"]


async def test_a_head_without_an_end_is_still_bounded() -> None:
    async with running(ParrotEngine()) as proxy:
        endless = SIZED[:-2] + b"".join(b"X-%d: %b\r\n" % (i, b"y" * 1000) for i in range(70))
        assert await answer(proxy, endless) == [b"HTTP/1.1 400 Bad Request"]
