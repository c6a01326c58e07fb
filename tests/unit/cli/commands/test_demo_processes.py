"""The processes of a demo: waiting for them, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from steno.contracts.errors import CannotListen
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


WATCHED = """
import asyncio, contextlib, sys
from pathlib import Path
from steno_cli.demo.processes import cancelled_by_signals, start

async def demo(folder):
    with cancelled_by_signals():
        try:
            async with contextlib.AsyncExitStack() as stack:
                sleep = ("-c", "import time; time.sleep(600)")
                child = await start(stack, folder, "proxy", launcher=sleep)
                print("up", flush=True)
                await asyncio.sleep(600)
        finally:
            print("ended", flush=True)  # no terminal is there any more
            (folder / "code").write_text(str(child.process.returncode))

asyncio.run(demo(Path(sys.argv[1])))
"""


def test_a_terminal_that_is_closed_ends_what_was_started_from_it(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    demo = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(tmp_path)], preexec_fn=lambda: os.login_tty(theirs), pass_fds=[theirs]
    )
    try:
        os.close(theirs)
        with os.fdopen(os.dup(ours), "rb") as shown:
            assert shown.readline() == b"up\r\n"
        os.close(ours)  # the kernel sends SIGHUP
        assert demo.wait(60) == 128 + signal.SIGHUP
        assert (tmp_path / "code").read_text() == str(-signal.SIGTERM)
    finally:
        demo.kill()
        demo.wait()


def test_with_nohup_it_goes_on_until_sigterm(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    try:
        assert demo.stdout is not None
        assert demo.stdout.readline() == b"up\n"
        demo.send_signal(signal.SIGHUP)
        demo.terminate()
        assert demo.wait(60) == 128 + signal.SIGTERM
        assert demo.stdout.read() == b"ended\n"
    finally:
        demo.kill()
        demo.wait()


def test_a_free_port_is_given_to_no_other_program_before_the_proxy_listens() -> None:
    port = free_port(0)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as listener, socket.create_connection(listener.getsockname()):
        pass


def test_a_port_that_this_user_may_not_have_is_not_said_to_be_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket, "socket", Refused)
    with pytest.raises(CannotListen, match=r"^--port: can't listen on 127.0.0.1:80: Permission denied$"):
        free_port(80)


def test_a_port_where_something_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            CannotListen, match=f"^--port: can't listen on 127.0.0.1:{port}: the address is in use already$"
        ):
            free_port(port)
