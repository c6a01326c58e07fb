"""`steno demo`: proxy, worker and small agents on this machine; what was recorded of them, or, with --train, what was learned."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from steno.contracts.errors import ConfigError
from steno_cli.terminal.output import check_can_be_written, require_modules

_TRAINING = "With --train"


def demo(
    context: typer.Context,
    trials: Annotated[
        int, typer.Option(min=1, max=64, help="How many agents run, each in a trial of its own. Not with --train.")
    ] = 3,
    keep: Annotated[
        bool | None,
        typer.Option("--keep/--no-keep", help="Go on serving afterwards, until Ctrl-C. Default: on a terminal, yes."),
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the proxy; else a free one.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Train on the agents' sessions, too.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimisation steps.", rich_help_panel=_TRAINING)] = 15,
    seed: Annotated[int, typer.Option(help="Seed of the tasks and of the trainer.", rich_help_panel=_TRAINING)] = 0,
    plot: Annotated[Path, typer.Option(help="PNG of the rewards.", metavar="PATH", rich_help_panel=_TRAINING)] = Path(
        "steno-demo.png"
    ),
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting of the trainer (push=delta), repeatable.", metavar="NAME=VALUE",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
) -> None:  # fmt: skip
    """Run a proxy, a worker with the embedded engine and small tool-using agents; then show what was recorded.

    With --train, also a trainer of two ZeRO-3 ranks: agents run, their sessions become optimisation steps, new weights go back
    to the worker, and rewards rise. Takes a few minutes.

    Needs no GPU, no Redis and no download. Ends what it started.
    """
    for name in ("trials",) if train else ("steps", "seed", "plot", "set"):
        given = context.get_parameter_source("set_" if name == "set" else name)
        if given is not None and given.name == "COMMANDLINE":
            raise ConfigError(f"--{name}: {'not' if train else 'only'} with --train", field=name)
    # Whoever watches wants to look around with the lines just printed; a script wants it to end.
    keep = sys.stdout.isatty() if keep is None else keep
    require_modules("openai", "torch", "transformers", "fastapi")
    if train:
        require_modules("deepspeed", "matplotlib")
        check_can_be_written("--plot", plot)
        if plot.is_dir():
            raise ConfigError(f"--plot: {plot} is a folder; a PNG is written: give a file in it", field="plot")
        from steno_cli.demo.train import run as run_training

        run_training(steps=steps, seed=seed, plot=plot, keep=keep, port=port, more=_settings(set_ or []))
        return
    from steno_cli.demo.record import run

    run(trials=trials, keep=keep, port=port)


def _settings(given: list[str]) -> dict[str, Any]:
    """Values as a config file has them."""
    import yaml

    from steno.config.config_file import SettingsLoader

    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"got {word!r}, must be NAME=VALUE", param_hint="--set")
        try:
            found[name] = yaml.load(value, SettingsLoader)
        except (yaml.YAMLError, ValueError) as error:
            why = getattr(error, "problem", None) or str(error)
            raise ConfigError(f"--set {name}: got {value!r}, which is not valid YAML: {why}", field=name) from None
    return found
