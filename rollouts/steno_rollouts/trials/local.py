"""Trials as processes of this machine: each in a session of its own, ended as a whole.

A job ends when its first process does, or at its time limit: SIGTERM to the session, some seconds, SIGKILL to what is left of it.
It may have several process groups: `timeout` makes one, and so does a shell with job control.
Unconfined, a process that leaves the session (a daemon) or becomes another user's (sudo) escapes, and a trial can read whatever
its operator can. `confine.py` hides the operator's processes and keys; there a daemon ends with its trial.

While a job runs, `pid` in its folder names its session, so that rollouts that were killed can be cleaned up after (`clear`).
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
from collections.abc import Iterable, Iterator
from pathlib import Path

from steno_rollouts.trials import proc
from steno_rollouts.trials.confine import Confinement
from steno_rollouts.trials.executor import CannotStart, Executor, Exit, TrialJob

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL: agents get to write their trajectories."""
ROUNDS = 100
"""How often a session's processes are looked for to be killed: they may start others meanwhile."""
ROUND_S = 0.05
"""Between two rounds of `clear`: what is killed may take a while to end."""


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
                await self._end(job, process, exited)
        _forget(note)
        return Exit(process.returncode, timed_out)

    async def _end(self, job: TrialJob, process: subprocess.Popen[bytes], exited: asyncio.Future[None]) -> None:
        """Nothing of the session is left after this, but what is another user's. The first process is reaped last: until then its
        number, which is the session's, can't be given to anybody else."""
        try:
            if not exited.done():
                # bwrap, the first one of a confined trial, would end at once, and everything in it without a grace.
                spared = set() if self._confinement is None else {process.pid}
                # A shell whose child ended before it was told itself would go on to its next line.
                _signal(_parents_first(_members(process.pid) - spared), signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._grace_s):
                        await asyncio.shield(exited)
        finally:  # also when whoever waits is cancelled a second time
            beyond = _kill(process.pid)
            if beyond:
                log.warning("%s: processes %s are another user's, and run on", job.trial_id, _listed(beyond))
            if process.pid not in beyond:  # nobody knows when that would end
                process.wait()

    async def clear(self, folder: Path) -> None:
        """Raises: CannotStart: something of it can't be ended: it is another user's, or hangs in the kernel."""
        note = folder / "pid"
        try:
            leader, began = map(int, note.read_text().split())
        except (OSError, ValueError):
            return
        left = _left(leader, began)
        if left:
            log.warning("%s: ending processes %s, left by rollouts that were killed", folder.name, _listed(left))
        for _ in range(ROUNDS):
            if not left:
                break
            _signal(left, signal.SIGKILL)
            await asyncio.sleep(ROUND_S)
            left = _left(leader, began)
        if left:
            raise CannotStart(
                f"{folder.name}: processes {_listed(left)}, left by rollouts that were killed, can't be ended from here: end them"
            )
        _forget(note)


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


def _kill(session: int) -> set[int]:
    """SIGKILL to every process of a session, and to those that it starts meanwhile. Returns: those that are out of our reach."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)  # most are in its first group, where none can slip through
    told: set[int] = set()
    beyond: set[int] = set()
    for _ in range(ROUNDS):
        found = _members(session) - told
        if not found:
            break
        beyond |= _signal(found, signal.SIGKILL)
        told |= found
    return beyond


def _signal(pids: Iterable[int], number: signal.Signals) -> set[int]:
    """Returns: those that are out of our reach: they have become another user's."""
    beyond = set()
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            beyond.add(pid)
    return beyond


def _is_there(job: TrialJob) -> bool:
    """Whether the job's program can be found, as its own environment and folder say."""
    program = job.command[0]
    if "/" in program:
        return (job.workdir / program).exists()
    folders = job.environment.get("PATH", os.defpath).split(os.pathsep)
    return any(shutil.which(str(job.workdir / folder / program)) for folder in folders)


def _left(leader: int, began: int) -> set[int]:
    """What still runs of the session that this process led. While something does, or while nobody has reaped the process itself,
    its number is not given to another."""
    now = proc.stat_of(leader)
    if now and int(now[19]) != began:
        return set()
    return _members(leader, began)


def _members(session: int, began: int = 0) -> set[int]:
    """Processes of a session that run. Args: began: when it did: none of it is older (after a boot, numbers begin anew)."""
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208  # at each trial's end: paths would take longer than all the rest
        if name.isdigit() and _session(int(name)) == session:
            fields = proc.stat_of(int(name))
            if fields and fields[0] != "Z" and int(fields[19]) >= began:
                found.add(int(name))
    return found


def _parents_first(pids: Iterable[int]) -> list[int]:
    """By who started whom: numbers begin anew after the highest one, and many start within one clock tick."""
    children: dict[int, list[int]] = {}
    parents = {pid: int(fields[1]) for pid in pids if (fields := proc.stat_of(pid))}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = [pid for pid, parent in parents.items() if parent not in parents]
    for pid in found:  # which grows meanwhile
        found += children.get(pid, ())
    return found


def _session(pid: int) -> int | None:
    """Asked of the kernel: that takes a twentieth of the time of reading `stat`. None: there is no such process."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _started_at(pid: int) -> str:
    """When a process started, in clock ticks since boot: with its number, its identity."""
    return proc.stat_of(pid)[19]


def _forget(note: Path) -> None:
    with contextlib.suppress(OSError):  # a trial may have made its folder read-only
        note.unlink()


def _listed(pids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(pids)))
