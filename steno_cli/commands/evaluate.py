"""`steno evaluate`: a checkpoint's rewards and pass@k on tasks, in one command. `steno results`: the same of results files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import Field, SecretStr, model_validator
from rich.table import Table
from rich.text import Text

from steno.config.settings import PROXY
from steno.contracts.errors import ConfigError
from steno_cli.demo.processes import DemoFailed, cancelled_by_signals, free_port
from steno_cli.terminal.output import EXIT_FAILURE, console
from steno_rollouts.config import RolloutSettings

if TYPE_CHECKING:
    from steno_cli.evaluation.follow import Checkpoint
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
    follow: Path | None = Field(
        None,
        description="checkpoint_dir of a `steno train`: its newest checkpoint is served and evaluated, again and again, while "
        "training goes on; results is a folder then, and a proxy that is given gets the numbers of each step",
    )
    until_step: int | None = Field(
        None,
        ge=1,
        description="with follow: end once a checkpoint of this step or a later one is evaluated and no other is left; unset: "
        "go on until stopped",
    )
    engine: Literal["auto", "vllm", "transformers"] = Field(
        "auto", description="what serves --model or --follow; auto: vllm where it is installed, else transformers"
    )
    engine_args: str = Field(
        "", description="the engine's own arguments, in one word: '--tool-call-parser hermes --tensor-parallel-size 2'"
    )
    max_streams: int = Field(
        64, ge=1, le=65536, description="most requests at once on the worker of --model or --follow"
    )
    pass_at: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list, description="k of pass@k; default: 1 and the trials of a task"
    )
    pass_reward: float = Field(1.0, description="lowest reward of a trial that passes")

    @model_validator(mode="after")
    def _is_evaluation(self) -> EvaluateSettings:
        if self.purpose != "eval":
            raise ValueError(f"purpose: got {self.purpose!r}, must be 'eval': `steno evaluate` never trains its groups")
        if self.model is None and self.follow is None and (self.engine != "auto" or self.engine_args):
            raise ValueError(
                "engine and engine_args need --model or --follow: they configure the worker that serves it"
            )
        if self.follow is not None and (self.model is not None or self.run is not None):
            other = "model" if self.model is not None else "run"
            raise ValueError(f"follow and {other}: give one: --follow serves each checkpoint, in a run of its own")
        if self.follow is None and self.until_step is not None:
            raise ValueError("until_step needs --follow")
        try:
            shlex.split(self.engine_args)
        except ValueError as error:
            raise ValueError(f"engine_args: got {self.engine_args!r}: {str(error).lower()}") from None
        return self


HIDDEN = frozenset({"purpose", "groups_per_step", "max_staleness_steps", "spare_trials"})
"""Settings of rollouts that mean nothing here."""


def evaluate(settings: EvaluateSettings) -> None:
    """Roll out tasks with a policy that is not trained, and say what it is worth: mean reward and pass@k.

    With --model, a proxy and a worker are started for this on free ports of this machine, and ended; without, the workers of
    --proxy are evaluated as they are. --follow does what --model does with each checkpoint of a training run, as it comes.
    --results keeps the trials: `steno results BEFORE.jsonl AFTER.jsonl` compares two. Exit code 1: no trial has got a reward.
    """

    async def run() -> bool:
        with cancelled_by_signals():
            return await (_evaluate(settings) if settings.follow is None else _follow(settings, settings.follow))

    if not asyncio.run(run()):
        raise typer.Exit(EXIT_FAILURE)


async def _evaluate(settings: EvaluateSettings) -> bool:
    """Whether any trial has got a reward."""
    from steno_cli.commands.rollout import roll_out
    from steno_rollouts.build import Prepared
    from steno_rollouts.reporting.passes import by_task
    from steno_rollouts.reporting.results import ended_trials

    run_id = settings.run or f"eval-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if settings.model is None:
        results = await roll_out(settings, run_id)
    elif _names_proxy(settings):
        raise ConfigError(
            "proxy and model: give one: --proxy evaluates the workers of a proxy, --model starts a proxy and a worker",
            field="model",
        )
    else:
        Prepared.of(settings, run_id)  # before a model is loaded, which takes minutes
        ended_trials(settings.results)
        results = await _rolled_out(settings, settings.model, run_id, free_port(0), None)
    show(by_task(results), _ks(settings), settings.pass_reward)
    return any(result.reward is not None for result in results)


async def _follow(settings: EvaluateSettings, folder: Path) -> bool:
    """Evaluate one checkpoint after the other. Returns: whether any trial has got a reward, or there was no checkpoint left, and
    the proxy that is given has all numbers."""
    from steno.client.client import AsyncClient
    from steno_cli.evaluation.follow import StepNumbers, next_checkpoint
    from steno_cli.evaluation.serving import Died
    from steno_rollouts.build import Prepared
    from steno_rollouts.evaluation import Evaluation
    from steno_rollouts.reporting.passes import by_task

    Prepared.of(settings, "eval")  # before a checkpoint is waited for, and loaded
    out, port = console(stderr=True), free_port(0)
    rewards: list[float | None] = []

    def say(text: str) -> None:
        out.print(text, markup=False, soft_wrap=True)

    async with contextlib.AsyncExitStack() as stack:
        proxy = None
        if _names_proxy(settings) or settings.origin("proxy") == PROXY:
            key = settings.key.get_secret_value() if settings.key is not None else None
            proxy = await stack.enter_async_context(AsyncClient(settings.proxy, key))
            if key is not None and _are_unconfined(settings):
                say(f"warning: trials can read the admin key of {settings.proxy}: confine them (--confine)")
        numbers = StepNumbers(folder, settings.results, proxy, say)
        while (found := await next_checkpoint(folder, numbers.done, settings.until_step, say)) is not None:
            await numbers.check(found)
            try:
                results = await _of_checkpoint(settings, found, port)
            except DemoFailed as error:
                if isinstance(error, Died) or found.model.exists():
                    raise
                say(f"step {found.step} is left out: its checkpoint was removed before it was loaded: {error}")
                continue
            console().print(f"step {found.step}", style="bold")
            show(by_task(results), _ks(settings), settings.pass_reward, rows=False)
            await numbers.keep(found, Evaluation.of(found.step, results).scalars())
            rewards += [result.reward for result in results]
        posted = await numbers.finish()
    return posted and (not rewards or any(reward is not None for reward in rewards))


def _are_unconfined(settings: EvaluateSettings) -> bool:
    """Whether trials run in this process, or as processes of this machine that see what its user sees."""
    from steno_rollouts.build import confinement

    if settings.executor != "local" or settings.harbor is not None:
        return False
    return settings.verifiers is not None or confinement(settings, os.environ)[0] is None


async def _of_checkpoint(settings: EvaluateSettings, checkpoint: Checkpoint, port: int) -> list[TrialResult]:
    from steno_cli.evaluation.follow import whole_model

    if settings.results is not None:
        file = settings.results / f"{checkpoint.name}.jsonl"
        file.unlink(missing_ok=True)  # of a start that was stopped, whose proxy is gone
        settings = settings.model_copy(update={"results": file})
    async with whole_model(checkpoint) as model:
        return await _rolled_out(settings, str(model), checkpoint.name, port, "")


def _names_proxy(settings: EvaluateSettings) -> bool:
    return settings.origin("proxy").startswith("--") or settings.is_given("proxy")


def _ks(settings: EvaluateSettings) -> list[int]:
    return settings.pass_at or sorted({1, settings.group_size})


async def _rolled_out(
    settings: EvaluateSettings, model: str, run_id: str, port: int, again: str | None
) -> list[TrialResult]:
    """By a proxy and a worker of its own, which end with it. again: as in `roll_out`."""
    from steno_cli.commands.rollout import roll_out
    from steno_cli.evaluation.serving import served

    words = shlex.split(settings.engine_args)
    async with served(model, settings.engine, words, max_streams=settings.max_streams, port=port, run_id=run_id) as at:
        here = settings.model_copy(update={"proxy": at.url, "key": SecretStr(at.key)})
        return await roll_out(here, run_id, patient=False, again=again)  # a proxy that has ended does not come back


def results(
    files: Annotated[list[Path], typer.Argument(metavar="FILE [FILE]", help="What --results of rollouts wrote.")],
    pass_at: PassAt = None,
    pass_reward: Annotated[float, typer.Option(help="The least reward of a trial that passes.")] = 1.0,
) -> None:
    """Show what a results file says of a policy: mean reward and pass@k; of two files, also how the second differs.

    Intervals are of 95 %, bootstrapped over tasks. Differences are paired by task.
    """
    from steno_rollouts.reporting.passes import by_task, compared, runs_of_one_task
    from steno_rollouts.reporting.results import ended_trials

    if len(files) > 2:
        raise ConfigError(f"results: got {len(files)} files, must be one (to show) or two (to compare)", field="files")
    found: list[list[TaskResult]] = []
    for file in files:
        if not file.exists():
            raise ConfigError(f"results: {file}: no such file", field="files")
        trials = ended_trials(file)
        found.append(by_task(trials.values()))
        if runs := runs_of_one_task(trials.values()):
            text = (
                f"warning: {file} has trials of {len(runs)} runs of the same tasks, counted together: {', '.join(runs)}"
            )
            console(stderr=True).print(text, style="yellow", markup=False, soft_wrap=True)
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
