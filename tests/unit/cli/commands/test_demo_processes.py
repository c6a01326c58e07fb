"""The processes of a demo: waiting for them."""

from __future__ import annotations

import asyncio

from steno.contracts.rest import Trial
from steno_cli.demo.processes import until_served

MODELS = b'{"data": [{"id": "tiny"}]}'


async def test_a_proxy_that_drops_a_request_while_its_worker_starts_is_asked_again() -> None:
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        if asked > 1:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(MODELS), MODELS)
            )
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        trial = Trial.model_construct(api_key=None, urls={"openai": f"http://127.0.0.1:{port}/t/v1"})
        async with asyncio.timeout(60):
            await until_served(trial)
    assert asked == 2
