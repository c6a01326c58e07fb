"""The demo: proxy, worker and a small agent as processes of their own, and then what was recorded of it.

Owns the order of things and their processes; what is printed is `demo_report.py`. Everything runs on loopback with the memory
store and the model that ships with the project; whatever happens, the processes are ended before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from proxy.client import AsyncSteno
from proxy.contracts.errors import StenoError
from proxy.contracts.records import SamplingPolicy
from proxy.contracts.rest import Completion, GroupSpec, Trial
from steno.demo_report import show_record, show_where_to_look
from steno.models import TINY

GROUP = "demo"
LAW = SamplingPolicy(force={"temperature": 1.0, "top_p": 1.0})
"""What a trainer would ask for: every token drawn from the policy itself."""
PORT = 8000
"""Where the demo listens, if nothing else does: the lines that it prints hold for the next one, too."""
READY_S = 120.0
"""Importing torch on a cold, slow disk takes most of a minute."""
AGENT_S = 120.0
END_S = 10.0


class DemoFailed(StenoError):
    """A process did not come up, or an agent did not finish. The message ends with what it had printed last."""

    code = "demo_failed"


@dataclass
class Child:
    """A process of the demo, and the file that its output goes to."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def check(self) -> None:
        if self.process.returncode is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-15:]
            raise DemoFailed("\n".join([f"the {self.name} ended with code {self.process.returncode}:", *lines]))

    async def end(self) -> None:
        """SIGTERM, then SIGKILL. Safe to call when it has ended."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), END_S)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()


@dataclass
class Run:
    """One agent's run. lines: what it printed."""

    trial: Trial
    code: int
    lines: list[str]

    @property
    def solved(self) -> bool:
        return self.code == 0


def run(*, trials: int = 3, keep: bool = False, port: int | None = None) -> None:
    """`steno demo`. Raises: DemoFailed; SystemExit(1) if an agent did not solve its task."""
    try:
        solved = asyncio.run(demo(Console(highlight=False), trials=trials, keep=keep, port=port))
    except asyncio.CancelledError:  # SIGTERM
        raise SystemExit(128 + signal.SIGTERM) from None
    if not solved:
        raise SystemExit(1)


async def demo(console: Console, *, trials: int = 3, keep: bool = False, port: int | None = None) -> bool:
    """Run the demo; returns whether every agent solved its task. Raises: DemoFailed.

    keep: go on serving after the report, until Ctrl-C or SIGTERM.
    """
    port = port or _free_port(PORT)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="steno-demo-") as folder, _cancelled_by_sigterm():
        async with AsyncSteno(url) as client, contextlib.AsyncExitStack() as stack:
            with _progress(console) as progress:
                step = progress.add_task("starting the proxy", total=1)
                proxy = await _start(stack, Path(folder), "proxy", "--port", str(port))
                relay = f"ws://127.0.0.1:{port}"
                engine = ["--engine", "transformers", "--model", str(TINY)]
                worker = await _start(stack, Path(folder), "worker", "--proxy", relay, *engine)
                await _until_healthy(url, proxy)
                progress.update(step, completed=1, description=f"the proxy listens on {url}")
                step = progress.add_task("starting the worker, which loads the model", total=1)
                group = await client.create_group(GroupSpec(group_id=GROUP, size=trials, sampling=LAW))
                await _until_served(group.trials[0], proxy, worker)
                progress.update(step, completed=1, description="the worker serves the model")
                step = progress.add_task(f"running {trials} agents", total=trials)
                done = functools.partial(progress.advance, step)
                runs = await asyncio.gather(*(_run_agent(trial, seed, done) for seed, trial in enumerate(group.trials)))
                solved = sum(run.solved for run in runs)
                progress.update(step, description=f"{solved} of {trials} agents solved their task")
            proxy.check()
            worker.check()
            await _report(console, client, url, runs, keep)
            if keep:
                console.print("\nServing until Ctrl-C.", style="dim")
                with contextlib.suppress(asyncio.CancelledError):  # how this is meant to end
                    await _until_one_ends(proxy, worker)
            return solved == trials


async def _report(console: Console, client: AsyncSteno, url: str, runs: list[Run], keep: bool) -> None:
    """Post the rewards, then print: what went wrong, one session, and where the others are."""
    for run in runs:
        outcome = Completion(reward=float(run.solved), end_reason="agent_exit")
        await client.complete(run.trial.session.trial_id, outcome)
        if not run.solved:
            console.print(f"\nThe agent of {run.trial.session.trial_id} ended with code {run.code}:", style="red")
            console.print("\n".join(run.lines[-12:]), markup=False)
    shown = next((run for run in runs if run.solved), None)
    if shown is not None:
        await show_record(console, client, shown.trial.session.trial_id, shown.lines, TINY / "tokenizer.json")
        await show_where_to_look(console, url, shown.trial.session.trial_id, keep)


async def _start(stack: contextlib.AsyncExitStack, folder: Path, name: str, *arguments: str) -> Child:
    """Start `steno <name>`; it is ended with `stack`."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "steno", name, *arguments,
            stdout=output, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL,
            env=_environment(), start_new_session=True,
        )  # fmt: skip  # a session of its own: Ctrl-C reaches the demo alone, which ends them in order
    child = Child(name, process, log)
    stack.push_async_callback(child.end)
    return child


def _environment(**more: str) -> dict[str, str]:
    """The demo's processes take nothing from settings that were meant for others, and find the package that runs now."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("STENO_")}
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


async def _run_agent(trial: Trial, seed: int, done: Callable[[], None]) -> Run:
    """Run one agent to its end. An agent that hangs is ended, and counts as one that failed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "steno.toy_agent", "--seed", str(seed),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL,
        env=_environment(OPENAI_BASE_URL=trial.urls["openai"], OPENAI_API_KEY=trial.api_key or "none"),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(AGENT_S):
            output = await process.stdout.read()
            code = await process.wait()
    except TimeoutError:
        output, code = f"no answer in {AGENT_S:.0f} s".encode(), -1
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    done()
    return Run(trial, code, output.decode(errors="replace").splitlines())


async def _until_healthy(url: str, proxy: Child) -> None:
    async with httpx.AsyncClient() as http, _deadline("the proxy did not come up"):
        while True:
            proxy.check()
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(f"{url}/healthz")).is_success:
                    return
            await asyncio.sleep(0.1)


async def _until_served(trial: Trial, *children: Child) -> None:
    headers = {"authorization": f"Bearer {trial.api_key}"} if trial.api_key else {}
    async with httpx.AsyncClient(headers=headers) as http, _deadline("no worker announced a model"):
        while True:
            for child in children:
                child.check()
            answer = await http.get(f"{trial.urls['openai']}/models")
            if answer.is_success and answer.json().get("data"):
                return
            await asyncio.sleep(0.2)


async def _until_one_ends(*children: Child) -> None:
    waits = [asyncio.ensure_future(child.process.wait()) for child in children]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    for child in children:
        child.check()


@contextlib.asynccontextmanager
async def _deadline(what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(READY_S):
            yield
    except TimeoutError:
        raise DemoFailed(f"{what} in {READY_S:.0f} s") from None


@contextlib.contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """SIGTERM cancels the demo, as Ctrl-C does by itself, so that its processes are ended."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
    )


def _free_port(wanted: int) -> int:
    """`wanted` if nothing listens there, else any."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise DemoFailed("there is no free port on 127.0.0.1")
