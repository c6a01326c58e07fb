"""`steno tasks`: looks at tasks before anything is trained on them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import typer
from pydantic import Field, model_validator
from rich.markup import escape
from rich.table import Table

from steno.contracts.errors import ConfigError
from steno_cli.terminal.flags import prose, settings_command
from steno_cli.terminal.output import EXIT_FAILURE, console, require_modules
from steno_rollouts.config import RolloutSettings

if TYPE_CHECKING:
    from steno_rollouts.task_check import CheckedTask, Verdict, Who

SHOWN_TASKS = 40
"""Of more tasks, the table has only those that failed."""

app = typer.Typer(no_args_is_help=True, help="Look at tasks before anything is trained on them.")


class CheckSettings(RolloutSettings):
    """What `steno tasks check` runs with: of the settings of rollouts, those that say what a task is and what it was worth."""

    only: Literal["oracle", "nobody"] | None = Field(
        None, description="run only the solution (oracle), or only the run that does nothing (nobody); unset: both"
    )
    oracle: list[str] = Field(
        default_factory=list,
        description="command that solves a task; its {fields} may be withheld ones; unset: each task's solution/solve.sh",
    )

    @model_validator(mode="after")
    def _are_tasks_of_commands(self) -> Self:
        for name in ("harbor", "verifiers"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: can't be given here: only the tasks of --tasks are checked")
        return self


HIDDEN = frozenset(RolloutSettings.model_fields) - frozenset(
    (
        "tasks split filter limit shuffle_seed hide in_flight timeout_s grace_s executor image cpus memory_mb reward "
        "reward_timeout_s work_dir keep"
    ).split()
)
"""Settings of rollouts that mean nothing here: a file of rollouts may be given all the same (--config)."""


def check(settings: CheckSettings) -> None:
    """Run each task twice: its solution (the oracle) must score 1, and a run that does nothing must score 0.

    No proxy and no model is needed. The oracle is the task's solution/solve.sh, or the command after --, whose {fields} may be
    withheld ones such as {_answer}. Tasks are scored as in rollouts: by --reward, by tests/test.sh in containers, by a reward
    file. Exit code 1: a task did not score as it must.
    """
    from steno_cli.demo.processes import cancelled_by_signals
    from steno_rollouts.build import Prepared
    from steno_rollouts.task_check import TaskCheck

    prepared = Prepared.of(settings, "tasks-check", needs_command=False)
    whom: list[Who] = [settings.only] if settings.only else ["oracle", "nobody"]

    async def run() -> list[CheckedTask]:
        with cancelled_by_signals():
            return await TaskCheck(prepared, settings.oracle).run(whom, _tell)

    found = asyncio.run(run())
    _show(found, whom)
    if not all(checked.holds for checked in found):
        raise typer.Exit(EXIT_FAILURE)


def _tell(checked: CheckedTask) -> None:
    """As it happens: what is wrong with a task."""
    for verdict in checked.verdicts:
        if not verdict.holds:
            text = f"{checked.task.named}: {_words(verdict)}"
            console(stderr=True).print(text, markup=False, soft_wrap=True)


def _words(verdict: Verdict) -> str:
    from steno_rollouts.task_check import WANTED

    got = "has no reward" if verdict.reward is None else f"scored {verdict.reward:g}"
    why = f": {verdict.why}" if verdict.why else ""
    kept = f" (see {verdict.folder})" if verdict.folder else ""
    who = "the run that does nothing" if verdict.who == "nobody" else verdict.who
    return f"{who} {got}, must score {WANTED[verdict.who]:g}{why}{kept}"


def _show(found: Sequence[CheckedTask], whom: Sequence[str]) -> None:
    failed = sum(not checked.holds for checked in found)
    table = Table("task", *whom, "", box=None)
    for checked in found:
        if len(found) > SHOWN_TASKS and checked.holds:
            continue
        rewards = ["-" if each.reward is None else f"{each.reward:g}" for each in checked.verdicts]
        table.add_row(escape(checked.task.task_id), *rewards, "ok" if checked.holds else "[red]failed[/]")
    if table.row_count:
        console().print(table)
    tasks = "1 task" if len(found) == 1 else f"{len(found)} tasks"
    console().print(f"{tasks}, {len(found) - failed} ok, {failed} failed")


@app.command()
def parquet(
    tasks: Annotated[
        Path, typer.Argument(help="Tasks: a folder of task folders, or rows, as for steno rollout --tasks.")
    ],
    output: Annotated[Path, typer.Argument(help="File to write.")] = Path("train.parquet"),
    split: Annotated[str | None, typer.Option(help="Split of a data set that has several.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most tasks to take.")] = None,
    skip: Annotated[int, typer.Option(min=0, help="Tasks to leave out first; with limit: a part for validation.")] = 0,
    agent_name: Annotated[str, typer.Option(help="Name of the agent loop in agent_loop_config_path.")] = "steno",
    data_source: Annotated[str, typer.Option(help="Name under which verl counts the rewards.")] = "steno",
) -> None:
    """Write tasks as a Parquet file for verl's data set: a prompt and the task's name, and nothing that agents must not see."""
    from steno_adapters.verl.task_rows import write_parquet
    from steno_rollouts.tasks.task import load_tasks

    found = load_tasks(tasks, split=split)[skip:][:limit]
    if not found:
        raise ConfigError(f"skip: got {skip}, must be less than the number of tasks in {tasks}", field="skip")
    require_modules("pyarrow")
    rows = write_parquet(found, output, agent_name=agent_name, data_source=data_source)
    console(stderr=True).print(f"{rows} tasks in {output}", markup=False, soft_wrap=True)


_check = settings_command(CheckSettings, check, rest="oracle", hidden=HIDDEN)
app.command("check", help=prose(check.__doc__))(_check)
