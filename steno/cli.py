"""The command `steno`. Commands import what they run when they run, so that `steno --help` needs no torch and is quick."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from inference_worker.config import WorkerSettings
from proxy.config import ProxySettings
from steno.commands import demo, serve, sessions
from steno.commands.flags import settings_command
from steno.commands.output import one_line_errors

app = typer.Typer(
    name="steno",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Record agentic rollouts exactly: every token the policy sampled, as sampled, ready to train on.",
)


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"steno {_version()}")
        raise typer.Exit


app.command("proxy", help=serve.proxy.__doc__, rich_help_panel="Run")(settings_command(ProxySettings, serve.proxy))
app.command("worker", help=serve.worker.__doc__, rich_help_panel="Run")(settings_command(WorkerSettings, serve.worker))
app.command("demo", rich_help_panel="Run")(demo.demo)
app.add_typer(sessions.app, name="sessions", rich_help_panel="Read")


def _version() -> str:
    try:
        return importlib.metadata.version("steno")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout, as the scripts do
        return "from source"


def main() -> None:
    """Entry point of the console script. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration."""
    with one_line_errors():
        app()
