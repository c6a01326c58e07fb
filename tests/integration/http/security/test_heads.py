"""A connection must say what it wants in time; one that has is left alone."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from steno_proxy.config.settings import ProxySettings
from steno_proxy.server.app import create_app
from steno_proxy.server.http_protocol import BoundedHttp
from tests.support.programs.server import serve


class Impatient(BoundedHttp):
    head_s = 2.0


REQUEST = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"


async def test_heads_that_do_not_come_or_do_not_end_close_their_connections() -> None:
    async with serve(create_app(ProxySettings()), http=Impatient) as port:

        async def says(said: bytes) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            if said.endswith(b"/he"):  # the second head of a connection
                await reader.readuntil(b"}")
                writer.write(b"al")
            async with asyncio.timeout(60):
                assert await reader.read() == b"", said
            writer.close()

        await asyncio.gather(*map(says, (b"", b"G", REQUEST, REQUEST + b"\r\nGET /he")))


OFFER = (
    b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: "
    + b"A" * 22
    + b"==\r\n"
)


@pytest.mark.parametrize("path", ["/workers/connect", "/t/v1/chat/completions"])
@pytest.mark.parametrize(
    "rest",
    [
        b"content-length: 5\r\n\r\n",
        b"content-length: 5\r\n\r\nhello",
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"x: y\r\n" * 300 + b"\r\n",
        b"x: " + b"y" * 20_000 + b"\r\n\r\n",
    ],
    ids=["a body to come", "a body", "chunks", "many headers", "a long header"],
)
async def test_a_websocket_in_a_head_that_can_not_be_one_is_refused_and_closed(path: str, rest: bytes) -> None:
    async with serve(create_app(ProxySettings()), http=BoundedHttp) as port:
        for method in (b"GET", b"POST"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(method + b" " + path.encode() + b" HTTP/1.1\r\nhost: localhost\r\n" + OFFER + rest)
            async with asyncio.timeout(30):
                assert (await reader.read()).split()[1] in (b"400", b"405"), method
            writer.close()


async def test_a_head_sent_byte_by_byte_is_not_waited_for() -> None:
    async with serve(create_app(ProxySettings()), http=Impatient) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        closed = asyncio.create_task(reader.read())
        while not closed.done():
            writer.write(b"a")
            await asyncio.sleep(0.02)
        writer.close()


async def test_a_kept_connection_may_be_silent_and_a_body_may_take_its_time() -> None:
    async with serve(create_app(ProxySettings()), http=Impatient) as port:

        async def is_silent() -> None:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                for _ in range(2):
                    assert (await client.get("/healthz")).status_code == 200
                    await asyncio.sleep(2.5)
                assert (await client.get("/healthz")).status_code == 200

        async def takes_its_time() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b'{"trial_id": "t"}'
            writer.write(
                b"POST /sessions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: 17\r\n\r\n"
            )
            await asyncio.sleep(4.5)
            writer.write(body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

        await asyncio.gather(is_silent(), takes_its_time())
