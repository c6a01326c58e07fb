"""The command `steno`. Commands import what they run when they run, so that `steno --help` needs no torch and is quick."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from steno.contracts.errors import ConfigError
from steno_cli.commands import (
    demo,
    doctor,
    env,
    evaluate,
    merge,
    models,
    rescore,
    rollout,
    runs,
    serve,
    sessions,
    tasks,
    train,
    ui,
)
from steno_cli.terminal.flags import plain_commands, prose, settings_command
from steno_cli.terminal.output import one_line_errors
from steno_proxy.config import ProxySettings
from steno_rollouts.config import RolloutSettings
from steno_trainer.run_config import RunSettings
from steno_worker.config import WorkerSettings

app = typer.Typer(
    name="steno",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Record agentic rollouts exactly: every token the policy sampled, as sampled, ready to train on.",
)


def _version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        number = importlib.metadata.version("steno")
    except importlib.metadata.PackageNotFoundError:  # a checkout without an installation
        number = "from source"
    typer.echo(f"steno {number}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    pass


_proxy = settings_command(ProxySettings, serve.proxy)
_worker = settings_command(WorkerSettings, serve.worker, rest="engine_args")
app.command("proxy", help=prose(serve.proxy.__doc__), rich_help_panel="Run")(_proxy)
app.command("worker", help=prose(serve.worker.__doc__), rich_help_panel="Run")(_worker)
app.command("demo", help=prose(demo.demo.__doc__), rich_help_panel="Run")(demo.demo)
app.command("env", help=prose(env.env.__doc__), rich_help_panel="Run")(env.env)
_rollout = settings_command(RolloutSettings, rollout.rollout, rest="command")
app.command("rollout", help=prose(rollout.rollout.__doc__), rich_help_panel="Run")(_rollout)
_evaluate = settings_command(evaluate.EvaluateSettings, evaluate.evaluate, rest="command", hidden=evaluate.HIDDEN)
app.command("evaluate", help=prose(evaluate.evaluate.__doc__), rich_help_panel="Run")(_evaluate)
app.command("rescore", help=prose(rescore.rescore.__doc__), rich_help_panel="Run")(rescore.rescore)
_train = settings_command(RunSettings, train.train)
app.command("train", help=prose(train.train.__doc__), rich_help_panel="Run")(_train)
app.command("merge", help=prose(merge.merge.__doc__), rich_help_panel="Run")(merge.merge)
app.command("doctor", help=prose(doctor.doctor.__doc__), rich_help_panel="Read")(doctor.doctor)
app.command("results", help=prose(evaluate.results.__doc__), rich_help_panel="Read")(evaluate.results)
app.command("ui", help=prose(ui.ui.__doc__), rich_help_panel="Read")(ui.ui)
app.add_typer(sessions.app, name="sessions", rich_help_panel="Read")
app.add_typer(runs.app, name="runs", rich_help_panel="Read")
app.add_typer(runs.groups_app, name="groups", rich_help_panel="Read")
app.add_typer(tasks.app, name="tasks", rich_help_panel="Read")
app.add_typer(models.app, name="models", rich_help_panel="Read")
plain_commands(app)


def main() -> None:
    """Entry point of the console script. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration."""
    with one_line_errors():
        words = sys.argv[1:]
        if any(word.partition("=")[0] == "--url" for word in words[: words.index("--") if "--" in words else None]):
            raise ConfigError("--url was renamed to --proxy (or STENO_PROXY)")
        app()
