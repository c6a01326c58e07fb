"""`steno rescore`: new rewards for a recorded run, in a run of their own, without sampling anything."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from steno.client.client import AsyncClient
from steno.contracts.errors import ConfigError
from steno_cli.commands.sessions import KeyFile, Url
from steno_cli.terminal.connection import client_settings
from steno_cli.terminal.output import console

if TYPE_CHECKING:
    from steno_rollouts.rescoring import Rescoring
    from steno_rollouts.tasks.task import Task
    from steno_rollouts.trials.group_reward import GroupRewardFunction
    from steno_rollouts.trials.reward import RewardFunction

PROGRESS_S = 10.0
"""Between two lines of progress."""


def rescore(
    run: Annotated[str, typer.Option(help="Run whose completed groups are scored anew.", metavar="RUN")],
    reward: Annotated[
        str | None, typer.Option(help="FILE.py:function that scores a trial.", metavar="FILE.py:FUNCTION")
    ] = None,
    group_reward: Annotated[
        str | None,
        typer.Option(help="FILE.py:function that scores a group's trials together.", metavar="FILE.py:FUNCTION"),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Id of the new run; give the same id to go on with it; unset: RUN-rescored- and a digest of FILE.py.",
            metavar="RUN",
        ),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(help="Tasks as rollouts were given them, for fields and folders that are not on record."),
    ] = None,
    hide: Annotated[
        list[str] | None, typer.Option(help="Task field that was withheld, as in steno rollout.", metavar="FIELD")
    ] = None,
    purpose: Annotated[Literal["train", "eval"], typer.Option(help="Purpose of the groups to score.")] = "train",
    reward_timeout_s: Annotated[float, typer.Option(min=0.001, help="Time limit of the function, in seconds.")] = 300.0,
    url: Url = None,
    key: Annotated[
        str | None,
        typer.Option(help="Admin key; else STENO_CLIENT_KEY, else STENO_ADMIN_KEY.", rich_help_panel="Connection"),
    ] = None,
    key_file: KeyFile = None,
) -> None:
    """Score a recorded run with another reward function, into a run of its own. Nothing is sampled.

    The new run has the recorded turns, for `steno train --run NEW --offline`; the old one stays as it is. The function may ask
    for what is on record: task, trial_id, transcript (with --tasks also task_folder); of a group: task, group_id, trials. Killed,
    the same command goes on. Exit code 1: trials could not be scored; they are named, and nothing was made.
    """
    from steno_rollouts.rescoring import Rescoring, check_inputs, default_name

    function = _function(reward, group_reward, reward_timeout_s)
    check_inputs(function, with_tasks=tasks is not None)
    name = into or default_name(run, function)
    if name == run:
        raise ConfigError(
            f"--as: got {name!r}, must differ from --run: the new rewards are kept in a run of their own", field="as"
        )
    known = _tasks(tasks, hide or [])
    settings = client_settings(url, key, key_file)
    client = AsyncClient(settings.proxy, settings.key, timeout_s=settings.timeout_s)
    rescoring = Rescoring(client, run, name, function, known, purpose)
    out = console(stderr=True)
    asyncio.run(_rescore(rescoring, out))
    if rescoring.left_out:
        out.print(f"left out: {rescoring.without()}", markup=False, soft_wrap=True)
    _show(rescoring)


def _function(reward: str | None, group_reward: str | None, timeout_s: float) -> RewardFunction | GroupRewardFunction:
    """Raises: ConfigError: not one of the two."""
    from steno_rollouts.trials.group_reward import GroupRewardFunction
    from steno_rollouts.trials.reward import RewardFunction

    if reward is not None and group_reward is None:
        return RewardFunction(reward, timeout_s)
    if group_reward is not None and reward is None:
        return GroupRewardFunction(group_reward, timeout_s)
    raise ConfigError("--reward: give one function: --reward or --group-reward", field="reward")


async def _rescore(rescoring: Rescoring, out: Console) -> None:
    async def tell() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            out.print(rescoring.line(), markup=False, soft_wrap=True)

    telling = asyncio.create_task(tell())
    try:
        async with rescoring.client:
            await rescoring.run()
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling


def _tasks(path: Path | None, hide: list[str]) -> dict[str, Task]:
    """Tasks by name. Raises: ConfigError."""
    from steno_rollouts.tasks.task import load_tasks

    if path is None:
        if hide:
            raise ConfigError("--hide: needs --tasks: it names fields of these tasks", field="hide")
        return {}
    return {task.task_id: task for task in load_tasks(path, hide=hide)}


def _show(rescoring: Rescoring) -> None:
    from steno_rollouts.rescoring import summary

    found = summary(rescoring.groups)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "before", "now"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("trials with a reward", str(found.rewards_before), str(found.rewards_after))
    table.add_row("mean reward", _shown(found.mean_before), _shown(found.mean_after))
    table.add_row("groups whose rewards are all equal", str(found.flat_before), str(found.flat_after))
    out = console()
    out.print(table)
    out.print(
        f"{found.order_changed} of {found.groups} groups order their trials otherwise than before",
        markup=False,
        soft_wrap=True,
    )
    earlier = sum(group.made for group in rescoring.groups)
    there = f" ({earlier} were there already)" if earlier else ""
    out.print(
        f"run {rescoring.into}: {found.groups} groups{there}, {found.trials} trials", markup=False, soft_wrap=True
    )


def _shown(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.3f}"
