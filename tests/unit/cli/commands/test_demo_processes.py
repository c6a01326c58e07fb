"""The processes of a demo: waiting for them, and their end."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from steno.contracts.rest import Trial
from steno_cli.demo.processes import DemoProcess, until_served

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


async def test_a_process_whose_end_is_not_waited_for_is_killed(tmp_path: Path) -> None:
    """A second SIGTERM: it is in a session of its own, so nobody else would end it."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); time.sleep(600)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-c", stubborn, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    await process.stdout.readline()
    ending = asyncio.create_task(DemoProcess("worker", process, tmp_path / "log").end())
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    async with asyncio.timeout(60):
        assert await process.wait() == -signal.SIGKILL
