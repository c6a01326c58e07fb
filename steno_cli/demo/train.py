"""`steno demo --train`: the whole loop on this machine. Agents run, their sessions are trained on, new weights go back, rewards
rise.

A proxy, a worker with the embedded engine, and a trainer of two ZeRO-3 ranks, as processes of their own; the agents are the toy
agent's code in threads of this one, through the official SDK. The task is one that the tiny model was never trained for
(`make_misleading_world`). Nothing is tuned to the outcome here: the same commands train any model on any task.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from steno.client.client import AsyncClient
from steno.contracts.errors import ConfigError
from steno.contracts.records import SamplingPolicy
from steno.contracts.runs.leases import RunView
from steno.models import TINY
from steno_cli.demo.processes import (
    DemoFailed,
    DemoProcess,
    cancelled_by_signals,
    free_port,
    says_stopped,
    serve,
    start,
    until_healthy,
)
from steno_cli.demo.task import make_misleading_world
from steno_cli.demo.toy_agent import solve
from steno_cli.demo.train_report import show_ledger, write_plot
from steno_rollouts.groups.admission import Admission
from steno_rollouts.groups.plan import GroupOptions, Planned
from steno_rollouts.harness import Rollouts
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import Executor, Exit, TrialJob
from steno_rollouts.trials.play import ExecutorPlayer, RunnerOptions
from steno_rollouts.trials.runner import TrialRunner
from steno_trainer.run_config import RunSettings

RUN = "demo"
STEPS = 15
GROUP_SIZE = 8
GROUPS_PER_STEP = 6
MAX_STALENESS_STEPS = 1
IN_FLIGHT = 48
LEARNING_RATE = 3e-4
"""Hundreds of times what a model of billions would take: this one has 0.7 million parameters."""
EVAL_WORLDS = 96
RANKS = 2
OWN = {
    "total_steps": "use --steps",
    **dict.fromkeys(("run", "proxy", "metrics_file"), "the demo needs its own"),
}
"""Settings of the trainer that the demo looks for itself -> what to do instead."""
LAW = SamplingPolicy(force={"temperature": 1.0, "top_p": 1.0})
POLL_S = 0.25


@dataclass
class DemoOutcome:
    """What the run came to. before, after: mean reward over the same worlds, none of which was trained on."""

    before: float
    after: float
    steps: list[dict[str, Any]]
    view: RunView

    @property
    def rose(self) -> bool:
        return self.after > self.before


class Agents(Executor):
    """An `Executor` that runs the toy agent in threads: thousands of short trials need no process each."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="agent")

    async def run(self, job: TrialJob) -> Exit:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._solve, job)

    async def clear(self, folder: Path) -> None:
        """Threads of this process can't have been left by another one."""

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _solve(self, job: TrialJob) -> Exit:
        world = make_misleading_world(job.environment["STENO_TASK_WORLD"])
        client = openai.OpenAI(
            base_url=job.environment["OPENAI_BASE_URL"], api_key=job.environment["OPENAI_API_KEY"],
            http_client=self._http, max_retries=5,
        )  # fmt: skip
        try:
            answer = solve(client, "tiny", world, stream=True, say=lambda line: None)
        except openai.OpenAIError as error:
            return Exit(2, error=str(error))
        (job.workdir / "reward.txt").write_text(str(float(world.solved_by(answer))))
        return Exit(0)

    def __enter__(self) -> Agents:
        self._http = openai.DefaultHttpxClient()  # one pool: a client of its own costs each trial a TLS context
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._http.close()


def run(
    *, steps: int = STEPS, seed: int = 0, plot: Path = Path("steno-demo.png"), keep: bool = False,
    port: int | None = None, more: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """`steno demo --train`. more: settings of the trainer. Raises: ConfigError, before anything is started; DemoFailed;
    SystemExit(1) if rewards did not rise."""
    check_settings(more or {})
    console = Console(highlight=False)
    with says_stopped(console):
        outcome = asyncio.run(demo_train(console, steps=steps, seed=seed, plot=plot, keep=keep, port=port, more=more))
    if not outcome.rose:
        raise SystemExit(1)


async def demo_train(
    console: Console, *, steps: int = STEPS, seed: int = 0, plot: Path, keep: bool = False, port: int | None = None,
    more: Mapping[str, Any] | None = None,
) -> DemoOutcome:  # fmt: skip
    """Run the loop for `steps` optimisation steps, evaluated before and after. Raises: DemoFailed.

    keep: go on serving after the report, until Ctrl-C or SIGTERM.
    """
    port = free_port(port)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="steno-demo-") as name, cancelled_by_signals():
        folder = Path(name)
        async with AsyncClient(url, retries=8) as client, contextlib.AsyncExitStack() as stack:
            agents = stack.enter_context(Agents(IN_FLIGHT))
            with _progress(console) as progress:
                task = progress.add_task("starting the proxy and the worker", total=None)
                proxy = await start(stack, folder, "proxy", "--port", str(port))
                engine = ["--engine", "transformers", "--model", str(TINY), "--max-streams", "64"]
                dial = ["--proxy", url]
                worker = await start(stack, folder, "worker", *dial, *engine, OMP_NUM_THREADS="1")
                await until_healthy(url, proxy)
                await _until_served(client, proxy, worker)
                evaluation = _Evaluation(client, agents, folder, seed)
                progress.update(task, description="evaluating the untrained policy")
                before = await evaluation.run("before")
                progress.update(
                    task, description=f"untrained, it solves {before:.0%} of {EVAL_WORLDS} worlds", total=1, completed=1
                )
                trainer = await _start_trainer(stack, folder, url, steps, seed, more or {})
                children = (proxy, worker, trainer)
                done = await _train(progress, client, agents, folder, url, steps, seed, children, more or {})
                task = progress.add_task("evaluating the trained policy", total=None)
                after = await evaluation.run("after")
                progress.update(task, description=f"trained, it solves {after:.0%} of them", total=1, completed=1)
            outcome = DemoOutcome(before, after, done, await client.run(RUN))
            show_ledger(console, outcome.steps[-1]["ledger"], outcome.view)
            write_plot(plot, outcome.steps, before, after)
            console.print(
                f"\nMean reward {before:.3f} before training, {after:.3f} after {steps} steps; the curve is in {plot}"
            )
            if keep:
                console.print(f"  {url}/ui/#/runs/{RUN}   in a browser", markup=False, soft_wrap=True)
                await serve(console, proxy, worker)
            return outcome


async def _start_trainer(
    stack: contextlib.AsyncExitStack, folder: Path, url: str, steps: int, seed: int, more: Mapping[str, Any]
) -> DemoProcess:
    """`torchrun --nproc-per-node 2 -m steno train …`, as anybody would."""
    config = folder / "train.yaml"
    config.write_text(json.dumps(_settings(folder, url, steps, seed, more)))  # YAML takes JSON
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m", "steno")
    return await start(stack, folder, "train", "--config", str(config), launcher=launcher, OMP_NUM_THREADS="1")


def _settings(folder: Path, url: str, steps: int, seed: int, more: Mapping[str, Any]) -> dict[str, Any]:
    settings = {
        "proxy": url, "run": RUN, "model": str(TINY), "precision": "float32", "device": "cpu", "seed": seed,
        "learning_rate": LEARNING_RATE, "total_steps": steps, "groups_per_step": GROUPS_PER_STEP,
        "max_staleness_steps": MAX_STALENESS_STEPS, "micro_batch_tokens": 4096, "activation_checkpointing": False,
        "checkpoint_dir": str(folder / "checkpoints"), "checkpoint_every": 5, "weights_dir": str(folder / "weights"),
        "metrics_file": str(folder / "metrics.jsonl"), "probe_tolerance": 0.001,
    }  # fmt: skip
    return {**settings, **more}


class _Given(RunSettings):
    """What the trainer reads in its file; the demo's processes have no settings in their environment."""

    @classmethod
    def flag(cls, key: str) -> str:
        return f"--set {key}"

    @classmethod
    def _read_environment(cls) -> dict[str, Any]:
        return {}


def check_settings(more: Mapping[str, Any]) -> None:
    """Raises: ConfigError: the trainer would refuse one of them, or the demo would wait for what never comes."""
    for name in OWN.keys() & more.keys():
        raise ConfigError(f"--set {name}: got {more[name]!r}; {OWN[name]}", field=name)
    settings = _settings(Path("demo"), "http://127.0.0.1:8000", STEPS, 0, more)
    for name, value in more.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise ConfigError(f"--set {name}: got {value!r}, must be a value that JSON has", field=name) from None
    _Given.load(settings, None).check()


async def _train(
    progress: Progress, client: AsyncClient, agents: Agents, folder: Path, url: str, steps: int, seed: int,
    children: tuple[DemoProcess, ...], more: Mapping[str, Any],
) -> list[dict[str, Any]]:  # fmt: skip
    """Agents run until the trainer has taken its steps. Returns: its numbers, a dict a step."""
    trainers = _Given.load(_settings(folder, url, steps, seed, more), None)
    bar = progress.add_task("starting the trainer", total=steps)

    async def in_hand() -> int:
        return (await client.run(RUN)).groups.in_hand

    options = GroupOptions(RUN, size=GROUP_SIZE, in_flight=IN_FLIGHT, sampling=LAW, resumable=False)
    rollouts = Rollouts(
        client, _runner(client, agents, folder / "trials"), options,
        admission=Admission(trainers.groups_per_step, trainers.max_staleness_steps), in_hand=in_hand,
    )  # fmt: skip
    running = asyncio.create_task(rollouts.run(_worlds(f"train-{seed}")))
    trainer = children[-1]
    seen: list[dict[str, Any]] = []
    try:
        while trainer.process.returncode is None:
            await asyncio.sleep(POLL_S)
            for child in children[:-1]:
                child.check()
            if running.done():
                running.result()
            seen = _read(folder / "metrics.jsonl")
            if seen:
                last = seen[-1]["values"]
                reward = f"reward {last['reward/mean']:.2f}" if "reward/mean" in last else ""
                progress.update(bar, completed=len(seen), description=f"training: {reward}")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    if trainer.process.returncode:
        trainer.check()
    seen = _read(folder / "metrics.jsonl")
    progress.update(bar, completed=steps, description="trained")
    return seen


class _Evaluation:
    """The same worlds, before and after: groups that are never trained."""

    def __init__(self, client: AsyncClient, agents: Agents, folder: Path, seed: int) -> None:
        self._runner = _runner(client, agents, folder / "evaluation")
        self._client, self._seed = client, seed

    async def run(self, round_name: str) -> float:
        options = GroupOptions(RUN, size=1, purpose="eval", in_flight=IN_FLIGHT, sampling=LAW, resumable=False)
        worlds = itertools.islice(_worlds(f"eval-{self._seed}", round_name), EVAL_WORLDS)
        results = await Rollouts(self._client, self._runner, options).run(worlds)
        rewards = [result.reward for result in results if result.reward is not None]
        if len(rewards) < EVAL_WORLDS:
            raise DemoFailed(
                f"{EVAL_WORLDS - len(rewards)} of {EVAL_WORLDS} agents did not finish: {results[0].detail}"
            )
        return sum(rewards) / len(rewards)


def _runner(client: AsyncClient, agents: Agents, folder: Path) -> TrialRunner:
    options = RunnerOptions(("toy-agent",), folder, timeout_s=120.0, keep="none", inherited={})
    return TrialRunner(client, ExecutorPlayer(client, agents, options), options)


def _worlds(prefix: str, round_name: str = "0") -> Iterator[Planned]:
    for number in itertools.count():
        world = f"{prefix}-{number}"
        yield Planned(Task(world, {"task_id": world, "world": world}), round_name)


async def _until_served(client: AsyncClient, *children: DemoProcess) -> None:
    while not any(worker.models for worker in await client.workers()):
        for child in children:
            child.check()
        await asyncio.sleep(POLL_S)


def _read(file: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last one may be being written."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"), BarColumn(bar_width=30),
        MofNCompleteColumn(), TimeElapsedColumn(), console=console,
    )  # fmt: skip
