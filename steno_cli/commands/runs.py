"""`steno runs list|show|key`, `steno groups list`: where a run's groups are, and the proxy's side of its ledger."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from steno.contracts.errors import ConfigError, NotFound
from steno.contracts.runs.leases import RunView
from steno_cli.commands.sessions import Json, Key, KeyFile, Url, ago, print_table
from steno_cli.terminal.connection import connect
from steno_cli.terminal.output import console

app = typer.Typer(no_args_is_help=True, help="Look at training runs.", rich_markup_mode="rich")
groups_app = typer.Typer(no_args_is_help=True, help="Look at a run's groups.", rich_markup_mode="rich")


@groups_app.callback()
def _groups() -> None:
    """With a single command, typer would take it for the whole of `groups`."""


@app.command("list")
def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most runs to list.")] = 20,
    as_json: Json = False,
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """List runs, the one with the newest group first: how many of its groups are in hand, done with, for evaluation."""
    with connect(url, key, key_file) as steno:
        found = steno.runs(limit=limit)
    if as_json:
        for run in found:
            typer.echo(run.model_dump_json())
        return
    table = _table("run", "running", "ready", "leased", "done", "evaluation", "last group")
    for run in found:
        groups, evals = run.groups, run.eval_groups
        done = groups.used + groups.acknowledged + groups.empty
        counts = (groups.running, groups.ready, groups.leased, done, evals.running + evals.ended)
        last = ago(time.time() - run.last_group_at)
        table.add_row(Text(run.run_id or "(none)", style="bold"), *map(str, counts), last)
    _print(table, "no runs")


@groups_app.command("list")
def list_groups(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="As given to POST /groups.")],
    limit: Annotated[int, typer.Option(min=1, help="Most groups to list.")] = 100,
    as_json: Json = False,
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """List a run's groups, newest first: where each is, how many of its trials have ended, who has it."""
    with connect(url, key, key_file) as steno:
        found = steno.groups(run_id)
    if as_json:
        for group in found[:limit]:
            typer.echo(group.model_dump_json())
        return
    table = _table("group", "purpose", "state", "ended", "made", "trainer")
    for group in found[:limit]:
        made = "-" if group.created_at is None else ago(time.time() - group.created_at)
        ended = f"{group.ended}/{group.size}"
        state = f"{group.state}, archived" if group.archived else group.state
        table.add_row(Text(group.group_id, style="bold"), group.purpose, state, ended, made, group.trainer or "-")
    _print(table, f"no groups of a run {run_id}")
    if len(found) > limit:
        console(stderr=True).print(f"the newest {limit} of {len(found)} are shown; --limit shows more", style="dim")


@app.command("key")
def key_of_run(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="As given to steno rollout --run.")],
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Print the key of a run: all that steno rollout --run RUN needs.

    It reads the run, makes its groups, claims, reads and completes their trials, says that its rollouts are over, and opens
    nothing else.
    """
    with connect(url, key, key_file) as steno:
        found = steno.run_key(run_id)
    if found is None:
        raise ConfigError("this proxy needs no key")
    typer.echo(found)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name)
    return table


def _print(table: Table, nothing: str) -> None:
    if table.row_count:
        print_table(table)
    else:
        console(stderr=True).print(nothing, markup=False, soft_wrap=True)


@app.command("show")
def show(
    run_id: Annotated[str, typer.Argument(help="As given to POST /groups.")],
    as_json: Json = False,
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Show where a run's groups are, and its tokens: sampled, not trained and why, or for leases to bring.

    Exit code 1: nothing is on record of such a run.
    """
    with connect(url, key, key_file) as steno:
        view = steno.run(run_id)
    if not view.known:
        raise NotFound(f"no run {run_id} is on record; `steno runs list` shows all that are")
    if as_json:
        typer.echo(view.model_dump_json())
        return
    groups = view.groups
    console().print(
        f"groups: {groups.running} running, {groups.ready} ready, {groups.leased} leased, {groups.used} used, "
        f"{groups.acknowledged} acknowledged, {groups.empty} empty",
        soft_wrap=True,
    )
    console().print(f"evaluation: {view.eval_groups.running} running, {view.eval_groups.ended} ended")
    if (trainer := view.trainer) is not None:
        state = "ended" if trainer.heard_s is None else f"last heartbeat {ago(trainer.heard_s)}"
        console().print(f"trainer: {trainer.name}, {state}", markup=False, soft_wrap=True)
    if view.to_account_for:
        print_table(ledger_table(view))


def ledger_table(view: RunView) -> Table:
    """One row per policy version, in tokens; `leases`: what leases bring, or will once running groups have ended."""
    reasons = sorted(view.not_trained)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("version")
    sides = [("sampled", view.sampled), *([("borrowed", view.borrowed)] if view.borrowed else [])]
    for name in (*(name for name, _ in sides), *reasons, "leases"):
        table.add_column(name, justify="right")
    for version, tokens in sorted(view.to_account_for.items()):
        lost = [view.not_trained[reason].get(version, 0) for reason in reasons]
        row = (*(side.get(version, 0) for _, side in sides), *lost, tokens - sum(lost))
        table.add_row(version, *(f"{count:,}" for count in row))
    return table
