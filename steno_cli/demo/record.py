"""The demo: proxy, worker and small agents as processes of their own, and then what was recorded of the agents.

Owns the order of things and their processes; what is printed is `report.py`. Everything runs on loopback with the memory
store and the model that ships with the project; whatever happens, the processes are ended before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from steno.client.client import AsyncClient
from steno.contracts.records import SamplingPolicy
from steno.contracts.rest import Completion, GroupSpec, Trial
from steno.models import TINY
from steno_cli.demo.processes import (
    cancelled_by_signals,
    environment,
    free_port,
    says_stopped,
    serve,
    start,
    until_healthy,
    until_served,
)
from steno_cli.demo.report import show_record, show_where_to_look

GROUP = "demo"
LAW = SamplingPolicy(force={"temperature": 0.3, "top_p": 1.0})
"""Plain temperature sampling, cooler than for training. At temperature 1 so tiny a model misreads a word in one world of a
hundred, by a token with a probability of some tenths of a percent; at 0.3 that token has one chance in many millions: a
demo that fails then has another cause."""
AGENT_S = 120.0


@dataclass
class AgentRun:
    """One agent's run. lines: what it printed."""

    trial: Trial
    code: int
    lines: list[str]

    @property
    def solved(self) -> bool:
        return self.code == 0


def run(*, trials: int = 3, keep: bool = False, port: int | None = None) -> None:
    """`steno demo`. Raises: DemoFailed; SystemExit(1) if an agent did not solve its task."""
    console = Console(highlight=False)
    with says_stopped(console):
        solved = asyncio.run(demo(console, trials=trials, keep=keep, port=port))
    if not solved:
        raise SystemExit(1)


async def demo(console: Console, *, trials: int = 3, keep: bool = False, port: int | None = None) -> bool:
    """Run the demo; returns whether every agent solved its task. Raises: DemoFailed.

    keep: go on serving after the report, until Ctrl-C or SIGTERM.
    """
    port = free_port(port)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="steno-demo-") as folder, cancelled_by_signals():
        async with AsyncClient(url) as client, contextlib.AsyncExitStack() as stack:
            with _progress(console) as progress:
                step = progress.add_task("starting the proxy", total=1)
                proxy = await start(stack, Path(folder), "proxy", "--port", str(port))
                relay = url
                engine = ["--engine", "transformers", "--model", str(TINY)]
                worker = await start(stack, Path(folder), "worker", "--proxy", relay, *engine)
                await until_healthy(url, proxy)
                progress.update(step, completed=1, description=f"the proxy listens on {url}")
                step = progress.add_task("starting the worker, which loads the model", total=1)
                group = await client.create_group(GroupSpec(group_id=GROUP, size=trials, sampling=LAW))
                await until_served(group.trials[0], proxy, worker)
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
                await serve(console, proxy, worker)
            return solved == trials


async def _report(console: Console, client: AsyncClient, url: str, runs: list[AgentRun], keep: bool) -> None:
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


async def _run_agent(trial: Trial, seed: int, done: Callable[[], None]) -> AgentRun:
    """Run one agent to its end. An agent that hangs is ended, and counts as one that failed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "steno_cli.demo.toy_agent", "--seed", str(seed),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL,
        env=environment(OPENAI_BASE_URL=trial.urls["openai"], OPENAI_API_KEY=trial.api_key or "none"),
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
    return AgentRun(trial, code, output.decode(errors="replace").splitlines())


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
    )
