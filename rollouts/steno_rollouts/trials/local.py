"""Trials as processes of this machine: each in a session and process group of its own, ended as a whole.

A job ends when its first process does, or at its time limit: SIGTERM to the group, some seconds, SIGKILL to what is left of it.
Unconfined, a process that leaves the group (a daemon) escapes, and a trial can read whatever its operator can. `confine.py` hides
the operator's processes and keys; there a daemon ends with its trial.

While a job runs, `pid` in its folder names its group, so that rollouts that were killed can be cleaned up after (`clear`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from steno_rollouts.trials.confine import Confinement
from steno_rollouts.trials.executor import Executor, Exit, TrialJob

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL: agents get to write their trajectories."""


class LocalExecutor(Executor):
    """An `Executor`. Needs Linux (pidfd). Args: confinement: what trials must not see; None: they see everything."""

    def __init__(self, grace_s: float = GRACE_S, confinement: Confinement | None = None) -> None:
        self._grace_s = grace_s
        self._confinement = confinement

    async def run(self, job: TrialJob) -> Exit:
        command = list(job.command)
        if self._confinement is not None:
            if not _is_there(job):  # bwrap would start, and say so in its own words
                return Exit(None, error=f"{job.command[0]}: {os.strerror(errno.ENOENT)}")
            command = self._confinement.command(job)
        with job.stdout.open("ab") as stdout, job.stderr.open("ab") as stderr:
            try:
                process = subprocess.Popen(  # noqa: ASYNC220  # returns once exec has happened; asyncio's reaps too early, see _end
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=job.workdir,
                    env=dict(job.environment),
                    start_new_session=True,
                )
            except OSError as error:
                return Exit(None, error=f"{job.command[0]}: {error.strerror or error}")
        note = job.folder / "pid"
        exited = asyncio.get_running_loop().create_future()
        timed_out = False
        with _watching(process.pid, exited):
            try:
                note.write_text(f"{process.pid} {_started_at(process.pid)}")
                async with asyncio.timeout(job.timeout_s):
                    await asyncio.shield(exited)
            except TimeoutError:
                timed_out = True
            finally:
                await self._end(process, exited)
        note.unlink(missing_ok=True)
        return Exit(process.returncode, timed_out)

    async def _end(self, process: subprocess.Popen[bytes], exited: asyncio.Future[None]) -> None:
        """Nothing of the group is left after this. The first process is reaped last: until then its number, which is the group's,
        can't be given to anybody else."""
        try:
            if not exited.done():
                if self._confinement is None:
                    _signal(process.pid, signal.SIGTERM)
                else:
                    _signal_inside(process.pid, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._grace_s):
                        await asyncio.shield(exited)
        finally:  # also when whoever waits is cancelled a second time
            _signal(process.pid, signal.SIGKILL)
            process.wait()

    async def clear(self, folder: Path) -> None:
        note = folder / "pid"
        try:
            pid, started_at = note.read_text().split()
        except (OSError, ValueError):
            return
        while _is_left(int(pid), started_at):
            log.warning("%s: ending process group %s, left by rollouts that were killed", folder.name, pid)
            _signal(int(pid), signal.SIGKILL)
            await asyncio.sleep(0.05)
        note.unlink(missing_ok=True)


@contextlib.contextmanager
def _watching(pid: int, exited: asyncio.Future[None]) -> Iterator[None]:
    """Resolves `exited` when the process ends, without reaping it."""
    loop = asyncio.get_running_loop()
    watched = os.pidfd_open(pid)

    def done() -> None:
        loop.remove_reader(watched)
        if not exited.done():
            exited.set_result(None)

    loop.add_reader(watched, done)
    try:
        yield
    finally:
        loop.remove_reader(watched)
        os.close(watched)


def _signal(group: int, number: signal.Signals) -> None:
    # All gone; or one that changed its user, out of our reach.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _signal_inside(group: int, number: signal.Signals) -> None:
    """To all of the group but its first process: bwrap would end at once, and everything in it without a grace."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(path)
        if fields and fields[2] == str(group) and path.parent.name != str(group):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(path.parent.name), number)


def _is_there(job: TrialJob) -> bool:
    """Whether the job's program can be found, as its own environment and folder say."""
    program = job.command[0]
    if "/" in program:
        return (job.workdir / program).exists()
    folders = job.environment.get("PATH", os.defpath).split(os.pathsep)
    return any(shutil.which(str(job.workdir / folder / program)) for folder in folders)


def _is_left(pid: int, started_at: str) -> bool:
    """Whether something of the session that this process led still runs. While that is so, or while nobody has reaped the
    process itself, its number is not given to another."""
    leader = _stat(Path(f"/proc/{pid}/stat"))
    if leader and leader[19] != started_at:
        return False
    members = (_stat(path) for path in Path("/proc").glob("[0-9]*/stat"))
    return any(fields[3] == str(pid) and fields[0] != "Z" for fields in members if fields)


def _started_at(pid: int) -> str:
    """When a process started, in clock ticks since boot: with its number, its identity."""
    return _stat(Path(f"/proc/{pid}/stat"))[19]


def _stat(path: Path) -> list[str]:
    """Fields from the state on (proc(5) counts it as the third); empty where there is no such process."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
