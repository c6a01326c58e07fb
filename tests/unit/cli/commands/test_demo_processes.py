"""The processes of a demo: waiting for them, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
from pathlib import Path

import pytest

from steno.contracts.rest import Trial
from steno_cli.demo import processes
from steno_cli.demo.processes import DemoProcess, free_port, until_served

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


async def test_what_a_process_that_does_not_end_has_started_is_killed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "END_S", 0.05)
    stubborn = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork() and print(); time.sleep(600)"
    )
    ours, theirs = os.pipe()  # no pipe of asyncio's, which would wait for the child as well
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-c", stubborn, stdout=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        assert await asyncio.to_thread(os.read, ours, 1) == b"\n"
        await DemoProcess("worker", process, tmp_path / "log").end()
        assert process.returncode == -signal.SIGKILL
        assert select.select([ours], [], [], 60)[0] and os.read(ours, 1) == b"", "the child is there still"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        os.close(ours)


def test_a_free_port_is_given_to_no_other_program_before_the_proxy_listens() -> None:
    port = free_port(0)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as listener, socket.create_connection(listener.getsockname()):
        pass
