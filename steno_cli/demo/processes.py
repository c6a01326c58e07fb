"""The processes of a demo: started as a user would start them, watched, and ended whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import httpx
from rich.console import Console

from steno.contracts.errors import CannotListen, StenoError
from steno.contracts.rest import Trial
from steno_cli.terminal.signals import hangup_taken, taken

PORT = 8000
"""Where a demo listens, if nothing else does: the lines that it prints hold for the next one, too."""
PACKAGES = ("steno", "steno_cli", "steno_proxy", "steno_worker", "steno_trainer", "steno_rollouts")
"""What the processes of a demo import: from where this process has them."""
READY_S = 120.0
"""Importing torch on a cold, slow disk takes most of a minute."""
END_S = 10.0


class DemoFailed(StenoError):
    """A process did not come up, or an agent did not finish. The message ends with what it had printed last."""

    code = "demo_failed"


@dataclass
class DemoProcess:
    """A process of the demo, and the file that its output goes to."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def check(self) -> None:
        if self.process.returncode is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-15:]
            raise DemoFailed("\n".join([f"the {self.name} ended with code {self.process.returncode}:", *lines]))

    async def end(self) -> None:
        """SIGTERM, then SIGKILL to it and to all that it started; at once if this is cancelled: nothing is left behind. Safe to
        call when it has ended."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), END_S)
            except TimeoutError:
                self._kill()
                await self.process.wait()
            except asyncio.CancelledError:
                self._kill()
                raise

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the leader of a session of its own


async def start(
    stack: contextlib.AsyncExitStack, folder: Path, name: str, *arguments: str,
    launcher: tuple[str, ...] = ("-m", "steno"), **variables: str,
) -> DemoProcess:  # fmt: skip
    """Start `steno <name>`; it is ended with `stack`. variables: of its environment."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *launcher, name, *arguments,
            stdout=output, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL,
            env=environment(**variables), start_new_session=True,
        )  # fmt: skip  # a session of its own: Ctrl-C reaches the demo alone, which ends them in order
    child = DemoProcess(name, process, log)
    stack.push_async_callback(child.end)
    return child


def environment(**more: str) -> dict[str, str]:
    """The demo's processes take nothing from settings that were meant for others, and find the package that runs now."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("STENO_")}
    roots = dict.fromkeys(str(Path(place).parent) for name in PACKAGES for place in import_module(name).__path__)
    path = os.pathsep.join([*roots, *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


async def until_healthy(url: str, proxy: DemoProcess) -> None:
    async with httpx.AsyncClient(timeout=READY_S) as http, deadline("the proxy did not come up"):
        while True:
            proxy.check()
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(f"{url}/healthz")).is_success:
                    return
            await asyncio.sleep(0.1)


async def until_served(trial: Trial, *children: DemoProcess) -> None:
    headers = {"authorization": f"Bearer {trial.api_key}"} if trial.api_key else {}
    async with (
        httpx.AsyncClient(headers=headers, timeout=READY_S) as http,
        deadline("no worker announced a model"),
    ):
        while True:
            for child in children:
                child.check()
            with contextlib.suppress(httpx.TransportError):
                answer = await http.get(f"{trial.urls['openai']}/models")
                if answer.is_success and answer.json().get("data"):
                    return
            await asyncio.sleep(0.2)


async def serve(console: Console, *children: DemoProcess) -> None:
    """Until Ctrl-C or SIGTERM. Raises: DemoFailed: one of them has ended."""
    console.print("\nServing until Ctrl-C.", style="dim")
    with contextlib.suppress(asyncio.CancelledError):  # how this is meant to end
        await _until_one_ends(*children)


async def _until_one_ends(*children: DemoProcess) -> None:
    waits = [asyncio.ensure_future(child.process.wait()) for child in children]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    for child in children:
        child.check()


@contextlib.asynccontextmanager
async def deadline(what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(READY_S):
            yield
    except TimeoutError:
        raise DemoFailed(f"{what} in {READY_S:.0f} s") from None


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """SIGTERM and a terminal that is closed cancel the demo, as Ctrl-C does by itself, so that its processes are ended.

    Raises: SystemExit: 128 and the signal's number, in place of the cancellation.
    """
    task = asyncio.current_task()
    assert task is not None
    came: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        came.append(number)
        task.cancel()

    with taken(lambda: cancel(signal.SIGTERM), signal.SIGTERM), hangup_taken(lambda: cancel(signal.SIGHUP)):
        try:
            yield
        except asyncio.CancelledError:
            if not came:
                raise
            raise SystemExit(128 + came[0]) from None


@contextlib.contextmanager
def says_stopped(console: Console) -> Iterator[None]:
    """Around a demo: its last line says that all it started has ended, however it ended."""
    try:
        yield
    finally:
        console.print("stopped: the proxy, the worker and all else that this demo started", style="dim")


def free_port(wanted: int | None) -> int:
    """`wanted`, or if nobody wants one, PORT or any other. It stays bound while this process lives: no other program that asks
    for any free port is given it before the proxy listens there.

    Raises: CannotListen: something listens at the one that is wanted, and the demo would record what it says; or this user may
        not. DemoFailed: no port is free.
    """
    for port in (PORT, 0) if wanted is None else (wanted,):
        probe = socket.socket()
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that the proxy can listen there all the same
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            probe.close()
            if wanted is not None:
                raise CannotListen("--port", "127.0.0.1", wanted, error) from None
            continue
        found = int(probe.getsockname()[1])
        probe.detach()  # the descriptor stays open
        return found
    raise DemoFailed("no port of 127.0.0.1 is free")
