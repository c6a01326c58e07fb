"""What runs a trial's command: one small protocol, implemented in `local.py`, `containers/`, `harbor/` and `verifiers/`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from steno.contracts.errors import StenoError
from steno.contracts.rest import Trial
from steno_rollouts.outcome import CommandOutcome
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import workdir
from steno_rollouts.trials.command import environment
from steno_rollouts.trials.reward import written_reward


class CannotStart(StenoError):
    """A trial can't be started here: what it would run in is not to be had. Never leaves these rollouts, but where they stop."""

    code = "cannot_start"


@dataclass(frozen=True)
class TrialJob:
    """One attempt at a trial. folder: the trial's own, for what the executor has to remember of it and for `stdout.log` and
    `stderr.log`; workdir: inside it, where the command runs. timeout_s: None: no limit. task, url: whose trial it is, and its
    address at the proxy, without a version; the local executor asks for neither. Without a url nothing is to be reached. given:
    folders of this machine by the path at which a container has them, to be read."""

    trial_id: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    workdir: Path
    timeout_s: float | None = None
    task: Task | None = None
    url: str = ""
    given: Mapping[str, Path] = field(default_factory=dict)

    @property
    def stdout(self) -> Path:
        return self.folder / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.folder / "stderr.log"


@dataclass(frozen=True)
class Exit:
    """How a job ended. code: its exit status; -N, or 128 + N where it was confined: by signal N; None: it never ran, and `error`
    says why. timed_out: `error` has the words, if another limit than the job's ended it. image: digest of the image that it ran
    in, where that is known. lost: nobody saw it end: what it ran in is gone, or out of reach, where it may run on."""

    code: int | None
    timed_out: bool = False
    error: str = ""
    image: str | None = None
    lost: bool = False


class Executor(Protocol):
    async def prepare(
        self, folder: Path, trial: Trial, task: Task, inherited: Mapping[str, str]
    ) -> tuple[Path, dict[str, str]]:
        """Make the trial's folder anew. Here, and in executors that inherit this: for processes of this machine.

        Args: inherited: the environment of these rollouts.
        Returns: the working folder on this machine, and the environment of the command. Raises: CannotStart.
        """
        work, task_file = await workdir.written(workdir.prepare, folder, task)
        return work, environment(inherited, trial, task, work, task_file)

    async def run(self, job: TrialJob) -> Exit:
        """Run it to its end, or to its time limit; then nothing of it runs any more. Cancelled: the same, at once."""
        ...

    async def verify(self, job: TrialJob, played: bool) -> CommandOutcome | None:
        """What a trial that has ended was worth, where no reward function says; None: nothing tells. Here: what its file says.

        Args: played: it has had a turn, or ran to its end. Raises: RewardError.
        """
        return await asyncio.to_thread(written_reward, job.workdir) if played else None

    async def clear(self, folder: Path) -> None:
        """End what rollouts that were killed have left running of the trial with this folder. Idempotent."""
        ...

    def close(self) -> None:
        """End what runs for all trials, once none runs. Idempotent."""
        return
