"""`steno rollout`: run a command once per trial, and post what each was worth."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from steno_cli.terminal.output import EXIT_FAILURE, console
from steno_cli.terminal.signals import hangup_taken, taken

if TYPE_CHECKING:
    from steno_rollouts.build import Prepared
    from steno_rollouts.config import RolloutSettings
    from steno_rollouts.outcome import TrialResult


def rollout(settings: RolloutSettings) -> None:
    """Roll out tasks: register their groups, run a command once per trial with the trial's environment, post its reward.

    Ctrl-C ends what runs and says why on record; with --run the same again goes on where it stopped. Exit code 1: no trial
    has got a reward, or too many failed before their first turn (--stop-after-failures).
    """
    run_id = settings.run or f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    results = asyncio.run(roll_out(settings, run_id))
    if not any(result.reward is not None for result in results):
        raise typer.Exit(EXIT_FAILURE)


async def roll_out(
    settings: RolloutSettings, run_id: str, *, patient: bool = True, again: str | None = None
) -> list[TrialResult]:
    """The results of all trials; progress goes to stderr.

    Args: patient: as in `Prepared.client`. again: words after "start the same command", shown on Ctrl-C; None: --run RUN.
    Raises: as `Prepared.of` and `Rollouts.run`.
    """
    from steno_rollouts.build import Prepared

    prepared = Prepared.of(settings, run_id)
    if prepared.ray is not None:
        prepared.ray.join()  # it blocks, and sets a handler of SIGTERM, which would end this process at once
    with _cancelled_by_signals(f" with --run {run_id}" if again is None else again):
        return await _rolled_out(prepared, run_id, patient)


async def _rolled_out(prepared: Prepared, run_id: str, patient: bool) -> list[TrialResult]:
    from steno_rollouts.groups.plan import epochs
    from steno_rollouts.preflight import (
        about_group_size,
        about_trainer,
        check_command,
        check_nodes,
        check_proxy,
        check_sampling,
        until_served,
    )
    from steno_rollouts.reporting.progress import ProgressPrinter
    from steno_rollouts.reporting.results import ResultsFile, ended_trials

    settings = prepared.settings
    check_sampling(settings)
    known = ended_trials(settings.results)
    out = console(stderr=True)
    for warning in (*prepared.warnings, *about_group_size(settings)):
        out.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    if prepared.confinement is not None:
        out.print(
            "trials are confined: your processes, keys and Docker's socket are hidden (--confine)",
            style="dim",
            markup=False,
        )
    if prepared.engine is not None:
        out.print(f"trials run in containers of {settings.executor}", style="dim", markup=False)
    if prepared.harbor is not None:
        version = prepared.harbor.python.version
        out.print(f"trials run in sandboxes of Harbor {version} ({settings.environment})", style="dim", markup=False)
    if prepared.verifiers is not None:
        out.print(f"trials are episodes of verifiers {prepared.verifiers.version}", style="dim", markup=False)

    def say(text: str) -> None:
        out.print(text, markup=False, soft_wrap=True)

    view = await check_proxy(prepared, say)
    if prepared.ray is not None:
        await check_nodes(prepared, say)
    else:
        await check_command(prepared)
    if (trainer := about_trainer(prepared, view)) is not None:
        say(trainer)
    await until_served(prepared, say)
    groups = len(prepared.tasks) * settings.epochs
    out.print(
        f"run {run_id}: {groups} groups of {settings.trials_of_group} trials, {settings.trials_at_once} at a time",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    progress = ProgressPrinter(out, groups * settings.trials_of_group, settings.progress_s, groups=groups)
    with contextlib.ExitStack() as files:
        observers = [progress]
        if settings.results is not None:
            observers.append(files.enter_context(ResultsFile(settings.results, known)))  # type: ignore[arg-type]
        async with prepared.client(patient=patient) as client:
            rollouts = prepared.rollouts(client, observers=observers)
            async with progress.shown():
                planned = epochs(prepared.tasks, settings.epochs, settings.shuffle_seed)
                results = await rollouts.run(planned, done=known)
                await prepared.say_over(client)
                return results


@contextlib.contextmanager
def _cancelled_by_signals(again: str) -> Iterator[None]:
    """Ctrl-C, SIGTERM or a closed terminal cancels the rollouts, which then end their trials in order. A second signal cancels
    all tasks but those that tell the proxy how trials ended; a third one cancels these, too.

    Raises: KeyboardInterrupt: in place of the cancellation."""
    from steno_rollouts.calls.posts import is_post

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        for each in asyncio.all_tasks(loop) if signals > 1 else [task]:
            if signals > 2 or not is_post(each):
                each.cancel()

    with taken(stop, signal.SIGINT, signal.SIGTERM), hangup_taken(stop):
        try:
            yield
        except asyncio.CancelledError:
            text = f"cancelled; to go on, start the same command{again}"
            console(stderr=True).print(text, markup=False, soft_wrap=True)
            raise KeyboardInterrupt from None
