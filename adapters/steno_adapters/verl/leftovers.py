"""What agent-loop workers of this machine that were killed have left: agents that run on, and trials that nobody will end.

Each process has a folder of its own under `work_dir`, whose name says whose it is. A later one ends what is in the folders of
those that are gone: of this job after a worker died, or of the next job with the same `work_dir`.
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

from steno.client.client import AsyncSteno
from steno.contracts.errors import StenoError
from steno.contracts.rest import Completion
from steno_rollouts.outcome import EndReason
from steno_rollouts.trials.executor import Executor

log = logging.getLogger(__name__)
PREFIX = "verl-worker-"


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


async def end_leftovers(work_dir: Path, executor: Executor, client: AsyncSteno) -> None:
    """Idempotent; several processes may do it at once."""
    for folder in await asyncio.to_thread(lambda: list(abandoned(work_dir))):
        for trial in sorted(path for path in folder.iterdir() if path.is_dir()):
            log.warning("trial %s: its agent-loop worker was killed; it is ended", trial.name)
            await executor.clear(trial)
            with contextlib.suppress(StenoError):  # another proxy's, or ended by itself
                await client.complete(trial.name, Completion(status="aborted", end_reason=EndReason.INTERRUPTED.value))
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _started_at(pid: int) -> str:
    """In clock ticks since boot: with its number, a process' identity. "" where there is none, or only its exit code is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
