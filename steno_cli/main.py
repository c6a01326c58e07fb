"""The command `steno`: one line for each command, which is imported when it is run. So `steno --help` is quick, and no command
needs what another one imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from steno.contracts.errors import ConfigError
from steno_cli.terminal.http_proxies import leave_out_socks, mend_no_proxy, reach_loopback_directly
from steno_cli.terminal.late import LateCommand, group_of
from steno_cli.terminal.output import console, one_line_errors, write_utf8


def _proxy() -> Any:
    from steno_cli.commands.serve import proxy
    from steno_cli.terminal.flags import settings_command
    from steno_proxy.config.settings import ProxySettings

    return _command(settings_command(ProxySettings, proxy), proxy.__doc__)


def _worker() -> Any:
    from steno_cli.commands.serve import worker
    from steno_cli.terminal.flags import settings_command
    from steno_worker.config import WorkerSettings

    return _command(settings_command(WorkerSettings, worker, rest="engine_args"), worker.__doc__)


def _demo() -> Any:
    from steno_cli.commands.demo import demo

    return _command(demo)


def _env() -> Any:
    from steno_cli.commands.env import env

    return _command(env)


def _rollout() -> Any:
    from steno_cli.commands.rollout import rollout
    from steno_cli.terminal.flags import settings_command
    from steno_rollouts.config import RolloutSettings

    return _command(settings_command(RolloutSettings, rollout, rest="command"), rollout.__doc__)


def _evaluate() -> Any:
    from steno_cli.commands.evaluate import HIDDEN, EvaluateSettings, evaluate
    from steno_cli.terminal.flags import settings_command

    return _command(settings_command(EvaluateSettings, evaluate, rest="command", hidden=HIDDEN), evaluate.__doc__)


def _rescore() -> Any:
    from steno_cli.commands.rescore import rescore

    return _command(rescore)


def _train() -> Any:
    from steno_cli.commands.train import train
    from steno_cli.terminal.flags import settings_command
    from steno_trainer.run_config import RunSettings

    return _command(settings_command(RunSettings, train), train.__doc__)


def _merge() -> Any:
    from steno_cli.commands.train import merge

    return _command(merge)


def _doctor() -> Any:
    from steno_cli.commands.doctor import doctor

    return _command(doctor)


def _results() -> Any:
    from steno_cli.commands.evaluate import results

    return _command(results)


def _ui() -> Any:
    from steno_cli.commands.ui import ui

    return _command(ui)


def _sessions() -> Any:
    from steno_cli.commands.sessions import app

    return _group(app)


def _runs() -> Any:
    from steno_cli.commands.runs import app

    return _group(app)


def _groups() -> Any:
    from steno_cli.commands.runs import groups_app

    return _group(groups_app)


def _tasks() -> Any:
    from steno_cli.commands.tasks import app

    return _group(app)


def _models() -> Any:
    from steno_cli.commands.models import app

    return _group(app)


def _command(run: Callable[..., None], doc: str | None = None) -> Any:
    """A command of a function, whose help is `doc`, else the function's own."""
    from steno_cli.terminal.flags import plain_commands, prose

    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    alone.command(help=prose(doc or run.__doc__))(run)
    plain_commands(alone)
    return typer.main.get_command(alone)


def _group(commands: typer.Typer) -> Any:
    from steno_cli.terminal.flags import plain_commands

    plain_commands(commands)
    return typer.main.get_group(commands)


RUN, READ = "Run", "Read"
COMMANDS = (
    LateCommand("proxy", RUN, _proxy, "Run the recording proxy: agents speak to it over HTTP, workers dial in."),
    LateCommand(
        "worker", RUN, _worker,
        "Run an inference worker: it loads an engine, dials one or more proxies and samples for them.",
    ),
    LateCommand(
        "demo", RUN, _demo,
        "Run a proxy, a worker with the embedded engine and small tool-using agents; then show what was recorded.",
    ),
    LateCommand(
        "env", RUN, _env,
        'Print what points a known agent at a trial: `eval "$(steno env claude-code my-trial)"`.',
    ),
    LateCommand(
        "rollout", RUN, _rollout,
        "Roll out tasks: register their groups, run a command once per trial with the trial's environment, post its reward.",
    ),
    LateCommand(
        "evaluate", RUN, _evaluate,
        "Roll out tasks with a policy that is not trained, and say what it is worth: mean reward and pass@k.",
    ),
    LateCommand(
        "rescore", RUN, _rescore,
        "Score a recorded run with another reward function, into a run of its own. Nothing is sampled.",
    ),
    LateCommand(
        "train", RUN, _train,
        "Train a policy on the completed groups of a run, and push its weights to the workers after each step.",
    ),
    LateCommand(
        "merge", RUN, _merge,
        "Merge an adapter that `steno train --lora-rank` trained into its model, in Hugging Face's layout.",
    ),
    LateCommand(
        "doctor", READ, _doctor,
        "Check a deployment: the proxy and its keys, workers, clocks, Redis's settings, disks. Each finding says what to do.",
    ),
    LateCommand(
        "results", READ, _results,
        "Show what a results file says of a policy: mean reward and pass@k; of two files, also how the second differs.",
    ),
    LateCommand("ui", READ, _ui, "Open the page that shows sessions: conversations, tokens, times."),
    LateCommand("sessions", READ, _sessions, "Read recorded sessions."),
    LateCommand("runs", READ, _runs, "Look at training runs."),
    LateCommand("groups", READ, _groups, "Look at a run's groups."),
    LateCommand("tasks", READ, _tasks, "Look at tasks before anything is trained on them."),
    LateCommand("models", READ, _models, "Look at model names, and retire them."),
)  # fmt: skip

app = typer.Typer(
    name="steno",
    cls=group_of(COMMANDS),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Record agentic rollouts exactly: every token the policy sampled, as sampled, ready to train on.",
)


def _version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version("steno")
    except PackageNotFoundError:  # a checkout without an installation
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


def whole_app() -> Any:
    """The command line with every command in it, imported: for what documents it."""
    found = typer.main.get_command(app)
    found.commands = {command.name: command.load() for command in COMMANDS}  # type: ignore[attr-defined]
    return found


def main() -> None:
    """Entry point of the console script. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration."""
    with one_line_errors():
        write_utf8()
        words = sys.argv[1:]
        if any(word.partition("=")[0] == "--url" for word in words[: words.index("--") if "--" in words else None]):
            raise ConfigError("--url was renamed to --proxy (or STENO_PROXY)")
        for line in (*leave_out_socks(os.environ), *mend_no_proxy(os.environ)):
            console(stderr=True).print(line, style="dim", markup=False, soft_wrap=True)
        reach_loopback_directly(os.environ)
        app()
