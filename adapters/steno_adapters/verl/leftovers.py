"""Ends what agent-loop workers of this machine left when they were killed: agents that run on, and trials without a process.

Each process has a folder of its own under `work_dir`, named after the process. A later process, of the same job or of the next
job with the same `work_dir`, ends what is in the folders of processes that are gone. A mark, a file beside a trial's folder, says
that the trial was running. Trials without a mark have ended: what `keep` left of them stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from steno.client.client import AsyncClient
from steno.contracts.errors import StenoError
from steno.contracts.rest import Completion
from steno_rollouts.outcome import EndReason
from steno_rollouts.trials.executor import Executor

log = logging.getLogger(__name__)
PREFIX = "verl-worker-"
MARK = ".running"


def own_folder(work_dir: Path) -> Path:
    """Of this process: `verl-worker-HOST-PID-STARTED`."""
    return work_dir / f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{_started_at(os.getpid())}"


def abandoned(work_dir: Path) -> Iterator[Path]:
    """Folders of processes of this machine that are gone."""
    here = f"{PREFIX}{socket.gethostname()}"
    for folder in sorted(work_dir.glob(f"{PREFIX}*-*-*")):
        owner, pid, started_at = folder.name.rsplit("-", 2)
        if owner == here and pid.isdecimal() and _started_at(int(pid)) != started_at:
            yield folder


def mark_running(folder: Path, trial_id: str) -> None:
    """Before it begins. Args: folder: of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    _mark(folder, trial_id).touch()


def mark_ended(folder: Path, trial_id: str) -> None:
    """Once nothing of it runs, and the proxy has its end. Idempotent, also for one that never began."""
    _mark(folder, trial_id).unlink(missing_ok=True)


async def end_leftovers(
    work_dir: Path, executor: Executor, client: AsyncClient, keep: Literal["failed", "all", "none"]
) -> None:
    """Args: keep: as in `RolloutSettings`; a trial whose worker was killed has failed. Idempotent; several processes may do it at
    once."""
    for folder in await asyncio.to_thread(lambda: list(abandoned(work_dir))):
        for trial in await asyncio.to_thread(_running, folder):
            log.warning("trial %s: its agent-loop worker was killed; it is ended", trial.name)
            await executor.clear(trial)
            with contextlib.suppress(StenoError):  # another proxy's, or ended by itself
                await client.complete(trial.name, Completion(status="aborted", end_reason=EndReason.INTERRUPTED.value))
            await asyncio.to_thread(mark_ended, folder, trial.name)
        await asyncio.to_thread(_dispose, folder, keep == "none")


def _mark(folder: Path, trial_id: str) -> Path:
    return folder / f"{trial_id}{MARK}"


def _running(folder: Path) -> list[Path]:
    """Folders of the trials that ran when their process ended; some may not have been made yet."""
    return [mark.with_suffix("") for mark in sorted(folder.glob(f"*{MARK}"))]


def _dispose(folder: Path, everything: bool) -> None:
    if everything:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # something is kept
            folder.rmdir()


def _started_at(pid: int) -> str:
    """In clock ticks since boot: with its number, a process' identity. "" where there is none, or only its exit code is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
