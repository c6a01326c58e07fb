"""`steno runs show`: where a run's groups are, and the proxy's side of its ledger."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from proxy.contracts.leases import RunView
from steno.commands.connection import connect
from steno.commands.output import console
from steno.commands.sessions import Json, Key, KeyFile, Url

app = typer.Typer(no_args_is_help=True, help="Look at training runs.", rich_markup_mode="rich")


@app.callback()
def _runs() -> None:
    """With a single command, typer would take it for the whole of `runs`."""


@app.command("show")
def show(
    run_id: Annotated[str, typer.Argument(help="As given to POST /groups.")],
    as_json: Json = False,
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Show where a run's groups are, and its tokens: sampled, not trained and why, or for leases to bring."""
    with connect(url, key, key_file) as steno:
        view = steno.run(run_id)
    if as_json:
        typer.echo(view.model_dump_json())
        return
    if not view.sampled and not any([*view.groups.model_dump().values(), *view.eval_groups.model_dump().values()]):
        console().print(f"nothing is on record of a run {run_id}", markup=False, soft_wrap=True)
        return
    groups = view.groups
    console().print(
        f"groups: {groups.running} running, {groups.ready} ready, {groups.leased} leased, {groups.used} used, "
        f"{groups.acknowledged} acknowledged, {groups.empty} empty"
    )
    console().print(f"evaluation: {view.eval_groups.running} running, {view.eval_groups.ended} ended")
    if view.sampled:
        console().print(ledger_table(view))


def ledger_table(view: RunView) -> Table:
    """One row per policy version, in tokens; `leases`: what leases bring, or will once running groups have ended."""
    reasons = sorted(view.not_trained)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("version", overflow="fold")
    for name in ("sampled", *reasons, "leases"):
        table.add_column(name, justify="right")
    for version, sampled in sorted(view.sampled.items()):
        lost = [view.not_trained[reason].get(version, 0) for reason in reasons]
        table.add_row(version, *(f"{tokens:,}" for tokens in (sampled, *lost, sampled - sum(lost))))
    return table
