"""One attempt at a trial: make its folder, run its command, find out what that was worth. Nothing is posted here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from steno.client.client import AsyncClient
from steno.contracts.errors import Gone, NotFound, StenoError
from steno.contracts.rest import Trial
from steno_rollouts.outcome import CommandOutcome, EndReason, RewardError, TrialResult, recorded_result
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import workdir
from steno_rollouts.trials.command import fill
from steno_rollouts.trials.executor import CannotStart, Executor, Exit, TrialJob
from steno_rollouts.trials.reward import BadRewardFile, FinishedTrial, RewardFunction
from steno_rollouts.trials.transcript import Transcript, read_transcript

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 3600.0
SETTLE_S = 1.0
"""After an attempt: by then the proxy has noticed that its connections are gone, and recorded its turns."""


@dataclass(frozen=True)
class Assignment:
    """A trial to be run. harness_key: completes and reads the trials of its group; None where the proxy asks for no key. claim:
    epoch of the launcher's claim; None: it is not claimed."""

    trial: Trial
    task: Task
    round: str
    harness_key: str | None = None
    claim: int | None = None

    @property
    def trial_id(self) -> str:
        return self.trial.session.trial_id

    @property
    def group_id(self) -> str:
        return self.trial.session.group_id or ""

    def recorded(self) -> TrialResult:
        """As it was on record when it was looked at: it had ended."""
        return recorded_result(self.trial.session, task_id=self.task.task_id, round_name=self.round, earlier=True)


@dataclass(frozen=True)
class RunnerOptions:
    """As in `RolloutSettings`. scored_together: trials get their rewards once their group has ended (`groups/scores.py`)."""

    command: tuple[str, ...]
    work_dir: Path
    timeout_s: float | None = None
    timeout_reward: float | None = None
    retries: int = 1
    scored_together: bool = False
    keep: Literal["failed", "all", "none"] = "failed"
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


class Player(Protocol):
    """Who plays attempts, wherever that is."""

    async def play(self, assignment: Assignment, folder: Path) -> tuple[Exit, CommandOutcome]:
        """One attempt. Cancelled: it is ended, and nothing of it runs any more.

        Args: folder: the trial's own on this machine, made anew.
        Raises: StenoError: the proxy could not be reached, or refuses; OSError: no folder could be made.
        """
        ...

    async def clear(self, folder: Path) -> None:
        """End what rollouts that were killed have left running of the trial with this folder. Idempotent."""
        ...


async def unless_told(attempt: Coroutine[Any, Any, T], told: Coroutine[Any, Any, Any]) -> T | None:
    """What an attempt returns; None: `told` has returned first, and ended it. Nothing of it runs when this is over, however often
    this is cancelled meanwhile; the second time, the attempt is given no more time to end. Raises: what either raises."""
    playing, telling = asyncio.create_task(attempt), asyncio.create_task(told)
    stopped, cancelled = False, None
    while not playing.done():
        try:
            await asyncio.wait({playing} if telling.done() else {playing, telling}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            if cancelled or not stopped:
                playing.cancel()
            cancelled = error
        if telling.done() and not (stopped or cancelled or playing.done()):
            playing.cancel()
            stopped = True
    if not stopped and not cancelled:
        telling.cancel()
        return playing.result()
    if not playing.cancelled():
        playing.exception()  # seen: what it brings now is not asked for
    if cancelled:
        telling.cancel()
        raise cancelled
    telling.result()
    return None


class ExecutorPlayer(Player):
    """Here, by an `Executor`. Args: reward: None: what the executor says counts."""

    def __init__(
        self, client: AsyncClient, executor: Executor, options: RunnerOptions, reward: RewardFunction | None = None
    ) -> None:
        self._client = client
        self._executor = executor
        self._options = options
        self._reward = reward

    async def clear(self, folder: Path) -> None:
        await self._executor.clear(folder)

    async def play(self, assignment: Assignment, folder: Path) -> tuple[Exit, CommandOutcome]:
        trial, task = assignment.trial, assignment.task
        try:
            await self._executor.clear(folder)
            work, variables = await self._executor.prepare(folder, trial, task, self._options.inherited)
        except CannotStart as error:
            return Exit(None, error=str(error)), CommandOutcome(EndReason.START_FAILED, detail=str(error))
        command = fill(self._options.command, task, variables)
        timeout_s = self._options.timeout_s or task.timeout_s or DEFAULT_TIMEOUT_S
        url = trial.urls["anthropic"]
        job = TrialJob(trial.session.trial_id, command, variables, folder, work, timeout_s, task, url)
        ended = await self._executor.run(job)
        failed = None
        if ended.timed_out:
            failed = CommandOutcome(EndReason.TIMEOUT, detail=ended.error or f"ended after {timeout_s:g} s")
        elif ended.code is None:
            reason = EndReason.INTERRUPTED if ended.lost else EndReason.START_FAILED
            return ended, CommandOutcome(reason, detail=ended.error)
        elif ended.code:
            said = await asyncio.to_thread(workdir.last_line, job.stderr)
            failed = CommandOutcome(
                EndReason.EXIT_CODE, detail=f"exit code {ended.code}" + (f": {said}" if said else "")
            )
        return ended, await self._score(assignment, job, ended, failed)

    async def _score(
        self, assignment: Assignment, job: TrialJob, ended: Exit, failed: CommandOutcome | None
    ) -> CommandOutcome:
        """A reward decides, whatever the exit code: agents exit with 1 for a task that they missed, and one that stalls until its
        time limit is to be punished for it. Only a command that failed before its first turn is not scored.

        Args: failed: what became of the trial if nothing says what it was worth; None: it ran to its end.
        """
        played = failed is None or await self._has_turns(job.trial_id)
        try:
            verdict = await self._verdict(assignment, job, ended, played)
        except RewardError as error:
            if (
                isinstance(error, BadRewardFile)
                and failed is not None
                and failed.reason is EndReason.TIMEOUT
                and played
            ):
                punished = self._options.timeout_reward  # a bad file is no way around what stalling costs
                if punished is not None:
                    return replace(failed, reward=punished, detail=f"{failed.detail}; {error.message}")
            return CommandOutcome(EndReason.REWARD_ERROR, detail=error.message)
        if failed is None:
            return verdict or CommandOutcome(EndReason.NO_REWARD, detail="no reward.json and no reward.txt")
        if failed.reason is EndReason.TIMEOUT:
            if verdict is None or verdict.reward is None:
                reward = self._options.timeout_reward if played else None
                return replace(failed, reward=reward, metrics=verdict.metrics if verdict else {})
            return replace(verdict, reason=EndReason.TIMEOUT, detail=failed.detail)
        if verdict is None or verdict.reward is None:
            return replace(failed, metrics=verdict.metrics if verdict else {})
        return verdict

    async def _has_turns(self, trial_id: str) -> bool:
        """A turn that was cut off with the command is recorded a moment later."""
        if (await self._client.session(trial_id)).counts.turns:
            return True
        await asyncio.sleep(SETTLE_S)
        return bool((await self._client.session(trial_id)).counts.turns)

    async def _verdict(self, assignment: Assignment, job: TrialJob, ended: Exit, played: bool) -> CommandOutcome | None:
        """What the reward function or else the executor says; None: nothing. Raises: RewardError."""
        if self._reward is None:
            return await self._executor.verify(job, played)
        if not played:
            return None
        transcript = await self._transcript(job.trial_id) if self._reward.takes("transcript") else None
        code = None if ended.timed_out else ended.code
        return await self._reward(
            FinishedTrial(assignment.task, job.workdir, code, job.stdout, job.stderr, job.trial_id, transcript)
        )

    async def _transcript(self, trial_id: str) -> Transcript:
        """Raises: RewardError: it can't be read. Gone, NotFound: it was deleted."""
        try:
            return await read_transcript(self._client, await self._client.session(trial_id))
        except (Gone, NotFound):
            raise
        except StenoError as error:
            raise RewardError(f"transcript of {trial_id}: {error.message}") from error
