"""One trial, from its folder to its record: run the command, find the reward, post what became of it.

A trial of a group is fixed at the proxy, and one recording must not hold two attempts. So an attempt is repeated only while
the trial has no turn on record: a command that could not start, or failed before its first model call. After that, what
happened is what is recorded, and the trial ends with its reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from steno.client.client import AsyncSteno
from steno.contracts.errors import Conflict, Gone, StenoError
from steno.contracts.records import Session
from steno.contracts.rest import Completion, Trial
from steno_rollouts.outcome import CommandOutcome, EndReason, TrialResult, recorded_result
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import workdir
from steno_rollouts.trials.command import fill
from steno_rollouts.trials.executor import CannotStart, Executor, Exit, TrialJob
from steno_rollouts.trials.reward import FinishedTrial, RewardError, RewardFunction, TrialTranscript

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 3600.0
SETTLE_S = 1.0
"""Before another attempt: by then the proxy has noticed that the last one's connections are gone, and recorded its turns."""


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

    def recorded(self) -> TrialResult:
        """As it was on record when it was looked at: it had ended."""
        return recorded_result(self.trial.session, task_id=self.task.task_id, round_name=self.round, earlier=True)


class ClaimLost(StenoError):
    """Another launcher has the trial, and runs it: its end is not these rollouts' to tell."""

    code = "claim_lost"


@dataclass(frozen=True)
class RunnerOptions:
    """As in `RolloutSettings`."""

    command: tuple[str, ...]
    proxy_url: str
    work_dir: Path
    timeout_s: float | None = None
    timeout_reward: float | None = None
    retries: int = 1
    keep: Literal["failed", "all", "none"] = "failed"
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass(frozen=True)
class FailedTrial:
    """A trial that failed before its first turn, and is still open at the proxy."""

    assignment: Assignment
    verdict: CommandOutcome
    began: float
    attempts: int
    ended: Exit
    folder: Path

    @property
    def trial_id(self) -> str:
        return self.assignment.trial.session.trial_id


class TrialRunner:
    """Runs assignments, any number at a time."""

    def __init__(
        self,
        client: AsyncSteno,
        executor: Executor,
        options: RunnerOptions,
        reward: RewardFunction | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._executor = executor
        self._options = options
        self._reward = reward
        self._clock = clock

    async def run(
        self, assignment: Assignment, report: Callable[[TrialResult], None], *, hold: bool = False
    ) -> FailedTrial | None:
        """Run a trial to its end and post it; `report` is called once. Cancelled: the trial is ended and posted as `cancelled`.

        Args: hold: one that failed before its first turn is neither posted nor reported, but returned; `give_up` does both.
        Raises: ClaimLost; StenoError: the proxy could not be reached, or refuses.
        """
        began = self._clock()
        folder = self._folder(assignment)
        attempts, ended = 0, Exit(None)
        try:
            while True:
                attempts += 1
                try:
                    ended, verdict = await self._attempt(assignment, folder)
                except OSError as error:  # a full disk, say: others may go on
                    ended = Exit(None, error=str(error))
                    verdict = CommandOutcome(EndReason.START_FAILED, detail=str(error))
                if not verdict.reason.early or (attempts > self._options.retries and not hold):
                    break
                await asyncio.sleep(SETTLE_S)
                session = await self._client.session(assignment.trial.session.trial_id)
                if session.counts.turns or session.status != "open":
                    break
                if attempts > self._options.retries:
                    return FailedTrial(assignment, verdict, began, attempts, ended, folder)
                log.info("%s: attempt %d failed before its first turn: %s", folder.name, attempts, verdict.detail)
        except asyncio.CancelledError:
            verdict = CommandOutcome(EndReason.CANCELLED)
            posting = asyncio.ensure_future(self._close(assignment, verdict, began, attempts, ended, folder))
            report(await asyncio.shield(posting))
            raise
        report(await self._close(assignment, verdict, began, attempts, ended, folder))
        return None

    async def give_up(self, failed: FailedTrial) -> TrialResult:
        """Post what failed before its first turn."""
        return await self._close(
            failed.assignment, failed.verdict, failed.began, failed.attempts, failed.ended, failed.folder
        )

    async def abandon(self, assignment: Assignment, reason: EndReason) -> TrialResult:
        """End a trial that is not run: one whose rollouts were killed in the middle, or that is not wanted any more."""
        folder = self._folder(assignment)
        await self._executor.clear(folder)
        return await self._close(assignment, CommandOutcome(reason), self._clock(), 0, Exit(None), folder)

    def _folder(self, assignment: Assignment) -> Path:
        return self._options.work_dir / assignment.trial.session.trial_id

    async def _attempt(self, assignment: Assignment, folder: Path) -> tuple[Exit, CommandOutcome]:
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
            failed = CommandOutcome(EndReason.TIMEOUT, detail=f"ended after {timeout_s:g} s")
        elif ended.code is None:
            return ended, CommandOutcome(EndReason.START_FAILED, detail=ended.error)
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
        played = failed is None or bool((await self._client.session(job.trial_id)).counts.turns)
        try:
            verdict = await self._verdict(assignment, job, ended, played)
        except RewardError as error:
            return CommandOutcome(EndReason.REWARD_ERROR, detail=error.message)
        if failed is None:
            return verdict or CommandOutcome(EndReason.NO_REWARD, detail="no reward.json and no reward.txt")
        if failed.reason is EndReason.TIMEOUT:
            if verdict is None or verdict.reward is None:
                reward = self._options.timeout_reward if played else None
                return replace(failed, reward=reward, metrics=verdict.metrics if verdict else {})
            return replace(verdict, reason=EndReason.TIMEOUT, detail=failed.detail)
        return verdict or failed

    async def _verdict(self, assignment: Assignment, job: TrialJob, ended: Exit, played: bool) -> CommandOutcome | None:
        """What the reward function or else the executor says; None: nothing. Raises: RewardError."""
        if self._reward is None:
            return await self._executor.verify(job, played)
        if not played:
            return None
        transcript = TrialTranscript(self._options.proxy_url, assignment.harness_key, job.trial_id)
        code = None if ended.timed_out else ended.code
        return await self._reward(
            FinishedTrial(assignment.task, job.workdir, code, job.stdout, job.stderr, job.trial_id, transcript)
        )

    async def _close(
        self, assignment: Assignment, verdict: CommandOutcome, began: float, attempts: int, ended: Exit, folder: Path
    ) -> TrialResult:
        wall_s = self._clock() - began
        session = await self._post(assignment, verdict, wall_s)
        result = replace(
            recorded_result(session, task_id=assignment.task.task_id, round_name=assignment.round, earlier=False),
            detail=verdict.detail,
            attempts=attempts,
            exit_code=ended.code,
            image=ended.image,
            wall_s=round(wall_s, 3),
        )
        keep = self._options.keep == "all" or (self._options.keep == "failed" and result.failed)
        if await asyncio.to_thread(workdir.dispose, folder, keep):
            result = replace(result, folder=str(folder))
        if result.failed:
            log.info("trial %s ended: %s %s", result.trial_id, result.end_reason, verdict.detail)
        return result

    async def _post(self, assignment: Assignment, verdict: CommandOutcome, wall_s: float) -> Session:
        """The session as it is then on record. One that ended by itself (a spent limit, an operator) keeps what it ended with.

        Raises: ClaimLost."""
        trial_id = assignment.trial_id
        outcome = Completion(
            reward=verdict.reward,
            status="completed" if verdict.reward is not None else verdict.reason.status,
            end_reason=verdict.reason.value,
            metrics={**verdict.metrics, "rollout/wall_s": wall_s},
            # Not said where there is none: a proxy of an older release refuses what it does not know.
            **({"claim": assignment.claim} if assignment.claim is not None else {}),
        )
        try:
            return await self._client.complete(trial_id, outcome)
        except (Conflict, Gone) as error:
            log.warning("trial %s: its end was not taken: %s", trial_id, error.message)
            session = await self._recorded(trial_id, error)
            if session.status == "open":
                raise ClaimLost(error.message) from None
            return session

    async def _recorded(self, trial_id: str, error: StenoError) -> Session:
        try:
            return await self._client.session(trial_id)
        except StenoError:
            raise error from None
