"""`steno models list|retire`: names that workers have served, for which no other model answers."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from steno_cli.commands.sessions import Json, Key, KeyFile, Url
from steno_cli.terminal.connection import connect
from steno_cli.terminal.output import console

app = typer.Typer(no_args_is_help=True, help="Look at model names, and retire them.", rich_markup_mode="rich")


@app.command("list")
def list_models(as_json: Json = False, url: Url = None, key: Key = None, key_file: KeyFile = None) -> None:
    """List the model names that workers have served, their policies, and who serves them now.

    A request for one of them waits while nobody serves it, and gets 503 then; any other name means the policy `default`. It
    waits in the same way, if a model of that policy is listed and nobody serves it.
    """
    with connect(url, key, key_file) as steno:
        found = steno.models()
    if as_json:
        for one in found:
            typer.echo(one.model_dump_json())
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "policy", "workers"):
        table.add_column(name, overflow="fold")
    for one in found:
        table.add_row(Text(one.name, style="bold"), Text(one.policy or "-"), Text(", ".join(one.workers) or "-"))
    if found:
        console().print(table)
    else:
        console(stderr=True).print("no model names are kept")


@app.command()
def retire(
    name: Annotated[str, typer.Argument(help="As `steno models list` shows it.")],
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Retire a model name that no worker serves any more: requests for it go to the policy `default` from now on."""
    with connect(url, key, key_file) as steno:
        steno.retire_model(name)
    console(stderr=True).print(f"{name} is retired", markup=False, soft_wrap=True)
