"""`steno demo`: proxy, worker and a small agent on this machine, and what was recorded of it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def demo(
    trials: Annotated[int, typer.Option(min=1, max=64, help="How many agents run, each in a trial of its own.")] = 3,
    keep: Annotated[
        bool | None,
        typer.Option("--keep/--no-keep", help="Go on serving afterwards, until Ctrl-C. Default: on a terminal, yes."),
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the proxy; else a free one.")] = None,
) -> None:
    """Run a proxy, a worker with the embedded engine and a small tool-using agent; then show what was recorded.

    Needs no GPU, no Redis and no download. Ends what it started.
    """
    from steno.demo import run

    # Whoever watches wants to look around with the lines just printed; a script wants it to end.
    run(trials=trials, keep=sys.stdout.isatty() if keep is None else keep, port=port)
