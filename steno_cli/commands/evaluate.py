"""`steno evaluate`: a checkpoint's rewards and pass@k on tasks, in one command. `steno results`: the same of results files."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import Field, SecretStr, model_validator
from rich.table import Table
from rich.text import Text

from steno.config.extras import missing
from steno.contracts.errors import ConfigError
from steno_cli.terminal.output import EXIT_FAILURE, console, require_modules
from steno_rollouts.config import RolloutSettings

if TYPE_CHECKING:
    from steno_rollouts.outcome import TrialResult
    from steno_rollouts.reporting.passes import Figure, TaskResult

SHOWN_TASKS = 40
"""Rows of the table: a data set has thousands of tasks, and the file has them all."""
PassAt = Annotated[
    list[int] | None, typer.Option("--pass-at", min=1, help="k of pass@k; may be repeated. Default: 1 and all trials.")
]


class EvaluateSettings(RolloutSettings):
    """What `steno evaluate` runs with: rollouts whose groups are never trained, and what is evaluated."""

    purpose: Literal["train", "eval"] = Field("eval", description="always eval")
    model: str | None = Field(
        None, description="model or checkpoint to serve for this; unset: what the workers of --proxy serve"
    )
    engine: Literal["auto", "vllm", "transformers"] = Field(
        "auto", description="what serves --model; auto: vllm where it is installed, else transformers"
    )
    engine_args: str = Field(
        "", description="the engine's own arguments, in one word: '--tool-call-parser hermes --tensor-parallel-size 2'"
    )
    max_streams: int = Field(64, ge=1, le=65536, description="most requests at once on the worker of --model")
    pass_at: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list, description="k of pass@k; default: 1 and the trials of a task"
    )
    pass_reward: float = Field(1.0, description="lowest reward of a trial that passes")

    @model_validator(mode="after")
    def _is_evaluation(self) -> EvaluateSettings:
        if self.purpose != "eval":
            raise ValueError(f"purpose: got {self.purpose!r}, must be 'eval': `steno evaluate` never trains its groups")
        if self.model is None and (self.engine != "auto" or self.engine_args):
            raise ValueError("engine and engine_args need --model: they configure the worker that serves it")
        try:
            shlex.split(self.engine_args)
        except ValueError as error:
            raise ValueError(f"engine_args: got {self.engine_args!r}: {str(error).lower()}") from None
        return self


HIDDEN = frozenset({"purpose", "groups_per_step", "max_staleness_steps"})
"""Settings of rollouts that mean nothing here."""


def evaluate(settings: EvaluateSettings) -> None:
    """Roll out tasks with a policy that is not trained, and say what it is worth: mean reward and pass@k.

    With --model, a proxy and a worker are started for this on free ports of this machine, and ended; without, the workers of
    --proxy are evaluated as they are. --results keeps the trials: `steno results BEFORE.jsonl AFTER.jsonl` compares two.
    Exit code 1: no trial has got a reward.
    """
    from steno_cli.demo.processes import cancelled_by_sigterm
    from steno_rollouts.reporting.passes import by_task

    async def run() -> list[TrialResult]:
        with cancelled_by_sigterm():
            return await _evaluate(settings)

    try:
        results = asyncio.run(run())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    show(by_task(results), settings.pass_at or sorted({1, settings.group_size}), settings.pass_reward)
    if not any(result.reward is not None for result in results):
        raise typer.Exit(EXIT_FAILURE)


async def _evaluate(settings: EvaluateSettings) -> list[TrialResult]:
    from steno_cli.commands.rollout import roll_out

    run_id = settings.run or f"eval-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    async with contextlib.AsyncExitStack() as stack:
        elsewhere = settings.model is None  # a proxy of our own that has ended does not come back
        if settings.model is not None:
            settings = await stack.enter_async_context(_served(settings, settings.model, run_id))
        return await roll_out(settings, run_id, patient=elsewhere)


@contextlib.asynccontextmanager
async def _served(settings: EvaluateSettings, model: str, run_id: str) -> AsyncIterator[EvaluateSettings]:
    """A proxy and a worker of this machine, with keys of their own; the settings that reach them, with the key of the run."""
    from steno.client.client import AsyncSteno
    from steno_cli.demo.processes import free_port, start, until_healthy

    engine = settings.engine
    if engine == "auto":
        engine = "transformers" if missing(["vllm"]) else "vllm"
    require_modules("fastapi", "uvicorn", "vllm" if engine == "vllm" else "torch")
    if settings.origin("proxy").startswith("--") or settings.is_given("proxy"):
        raise ConfigError(
            "proxy and model: give one: --proxy evaluates the workers of a proxy, --model starts a proxy and a worker",
            field="model",
        )
    port = free_port(0)
    url, admin, worker_key = f"http://127.0.0.1:{port}", secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="steno-evaluate-")))
        console(stderr=True).print(f"serving {model} with {engine} on {url}", markup=False, soft_wrap=True)
        proxy = await start(
            stack, folder, "proxy", "--port", str(port), STENO_ADMIN_KEY=admin, STENO_WORKER_KEY=worker_key
        )
        words = ["--proxy", url, "--engine", engine, "--model", model]
        words += ["--max-streams", str(settings.max_streams)]
        more = ["--", *shlex.split(settings.engine_args)] if settings.engine_args else []
        worker = await start(stack, folder, "worker", *words, *more, STENO_WORKER_KEY=worker_key)
        await until_healthy(url, proxy)
        async with AsyncSteno(url, admin) as client:
            while not any(each.models for each in await client.workers()):  # a large model takes minutes
                proxy.check()
                worker.check()
                await asyncio.sleep(0.5)
            key = await client.run_key(run_id)
        assert key is not None, "the proxy has an admin key"
        yield settings.model_copy(update={"proxy": url, "key": SecretStr(key)})


def results(
    files: Annotated[list[Path], typer.Argument(metavar="FILE [FILE]", help="What --results of rollouts wrote.")],
    pass_at: PassAt = None,
    pass_reward: Annotated[float, typer.Option(help="The least reward of a trial that passes.")] = 1.0,
) -> None:
    """Show what a results file says of a policy: mean reward and pass@k; of two files, also how the second differs.

    Intervals are of 95 %, bootstrapped over tasks. Differences are paired by task.
    """
    from steno_rollouts.reporting.passes import by_task, compared
    from steno_rollouts.reporting.results import ended_trials

    if len(files) > 2:
        raise ConfigError(f"results: got {len(files)} files, must be one (to show) or two (to compare)", field="files")
    found: list[list[TaskResult]] = []
    for file in files:
        if not file.exists():
            raise ConfigError(f"results: {file}: no such file", field="files")
        trials = ended_trials(file)
        found.append(by_task(trials.values()))
        if not found[-1]:
            raise ConfigError(f"results: {file} has no trials", field="files")
        largest = max(len(task.rewards) for task in found[-1])
        if len(files) == 2:
            console().print(Text(str(file), style="bold"))
        show(found[-1], pass_at or sorted({1, max(1, largest)}), pass_reward, rows=len(files) == 1)
    if len(found) == 2:
        both = compared(*found)
        if both is None:
            raise ConfigError("results: no task is scored in both files", field="files")
        out = console()
        out.print(
            f"second - first, paired by task: {_signed(both.difference)}; {both.better} tasks better, {both.worse} worse, "
            f"{both.equal} equal", markup=False, soft_wrap=True,
        )  # fmt: skip
        if both.only_first or both.only_second:
            out.print(f"left out: {both.only_first} tasks only in the first, {both.only_second} only in the second")


def show(tasks: Sequence[TaskResult], ks: Sequence[int], threshold: float, *, rows: bool = True) -> None:
    from steno_rollouts.reporting.passes import mean_reward, passes

    out = console()
    if rows:
        table = Table("task", "scored", "unscored", "mean reward", "passed", box=None)
        for task in tasks[:SHOWN_TASKS]:
            mean = f"{task.mean:.3f}" if task.rewards else "-"
            counts = (str(len(task.rewards)), str(task.unscored), mean, str(task.passed(threshold)))
            table.add_row(Text(task.task_id), *counts)
        out.print(table)
        if len(tasks) > SHOWN_TASKS:
            out.print(f"and {len(tasks) - SHOWN_TASKS} more tasks")
    scored, unscored = sum(len(task.rewards) for task in tasks), sum(task.unscored for task in tasks)
    out.print(f"{len(tasks)} tasks, {scored} trials with a reward, {unscored} without")
    if (reward := mean_reward(tasks)) is not None:
        out.print(f"mean reward  {_plain(reward)}")
    for k in ks:
        figure = passes(tasks, k, threshold)
        few = sum(len(task.rewards) < k for task in tasks)
        if figure is None:
            out.print(f"pass@{k}       no task has {k} scored trials")
        else:
            note = f", of {figure.tasks} tasks: {few} have fewer than {k} scored trials" if few else ""
            out.print(f"pass@{k:<6}  {_plain(figure)}{note}")


def _plain(figure: Figure) -> str:
    return f"{figure.value:.3f}  (95 %: {figure.low:.3f} to {figure.high:.3f})"


def _signed(figure: Figure) -> str:
    return f"{figure.value:+.3f}  (95 %: {figure.low:+.3f} to {figure.high:+.3f})"
