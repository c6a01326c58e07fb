"""One trial, from its first attempt to its record: have it played, again if that is allowed, and post what became of it.

A trial of a group is fixed at the proxy, and one recording must not hold two attempts. So an attempt is repeated only while
the trial has no turn on record: a command that could not start, or failed before its first model call. After that, what
happened is what is recorded, and the trial ends with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from steno.client.client import AsyncClient
from steno.contracts.errors import Conflict, Gone, NotFound, StenoError
from steno.contracts.records import Session
from steno.contracts.rest import Completion
from steno_rollouts.calls.posts import to_its_end
from steno_rollouts.outcome import (
    OWN_REWARD,
    WALL_S,
    CommandOutcome,
    EndReason,
    RewardError,
    TrialResult,
    deleted,
    has_no_end,
    recorded_result,
)
from steno_rollouts.trials import workdir
from steno_rollouts.trials.executor import CannotStart, Exit
from steno_rollouts.trials.play import SETTLE_S, Assignment, Player, RunnerOptions, unless_told
from steno_rollouts.trials.reward import check_metrics

log = logging.getLogger(__name__)


class ClaimLost(StenoError):
    """Another launcher has the trial, and runs it: its end is not these rollouts' to tell."""

    code = "claim_lost"


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
        client: AsyncClient,
        player: Player,
        options: RunnerOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._player = player
        self._options = options
        self._clock = clock

    async def run(
        self,
        assignment: Assignment,
        report: Callable[[TrialResult], None],
        *,
        hold: bool = False,
        anew: Callable[[Assignment], Awaitable[Assignment]] | None = None,
        not_needed: asyncio.Event | None = None,
    ) -> FailedTrial | None:
        """Run a trial to its end and post it; `report` is called once. Cancelled: the trial is ended and posted as `cancelled`.

        Args:
            hold: one that failed before its first turn is neither posted nor reported, but returned; `give_up` does both.
            anew: shuts out an attempt that is lost, and may still run, before there is another; None: nothing can.
            not_needed: once it is set, what runs of the trial is ended, and it is posted as `spare`.
        Raises: ClaimLost; FolderInUse; StenoError: the proxy could not be reached, or refuses.
        """
        began = self._clock()
        folder = self._folder(assignment)
        attempts, ended = 0, Exit(None)
        try:
            while True:
                attempts += 1
                try:
                    ended, verdict = await self._play(assignment, folder, not_needed)
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
                    if not_needed is not None and not_needed.is_set():
                        verdict = CommandOutcome(EndReason.SPARE)
                        break
                    return FailedTrial(assignment, verdict, began, attempts, ended, folder)
                if verdict.reason is EndReason.INTERRUPTED and anew is not None:
                    assignment = await anew(assignment)
                    if assignment.trial.session.counts.turns or assignment.trial.session.status != "open":
                        break
                log.info("%s: attempt %d failed before its first turn: %s", folder.name, attempts, verdict.detail)
        except (Gone, NotFound) as error:  # it was deleted meanwhile, as its end will show
            verdict = CommandOutcome(EndReason.CANCELLED, detail=error.message)
        except asyncio.CancelledError:
            closing = self._close(assignment, CommandOutcome(EndReason.CANCELLED), began, attempts, ended, folder)
            await to_its_end(_told(report, closing), stopping=True)
            raise
        await to_its_end(_told(report, self._close(assignment, verdict, began, attempts, ended, folder)))
        return None

    async def _play(
        self, assignment: Assignment, folder: Path, not_needed: asyncio.Event | None
    ) -> tuple[Exit, CommandOutcome]:
        spare = Exit(None), CommandOutcome(EndReason.SPARE)
        if not_needed is not None and not_needed.is_set():
            return spare
        with self._held(assignment):
            if not_needed is None:
                return await self._player.play(assignment, folder)
            return await unless_told(self._player.play(assignment, folder), not_needed.wait()) or spare

    async def give_up(self, failed: FailedTrial) -> TrialResult:
        """Post what failed before its first turn."""
        return await self._close(
            failed.assignment, failed.verdict, failed.began, failed.attempts, failed.ended, failed.folder
        )

    async def abandon(self, assignment: Assignment, reason: EndReason) -> TrialResult:
        """End a trial that is not run: one whose rollouts were killed in the middle, or that is not wanted any more."""
        folder = self._folder(assignment)
        try:
            with self._held(assignment):
                await self._player.clear(folder)
        except (CannotStart, workdir.FolderInUse) as error:
            # Nothing is to be started; and of what runs on nothing is recorded here any more.
            log.warning(
                "trial %s is ended, but some of what it started may still run: %s", assignment.trial_id, error.message
            )
        return await self._close(assignment, CommandOutcome(reason), self._clock(), 0, Exit(None), folder)

    def _folder(self, assignment: Assignment) -> Path:
        return self._options.work_dir / assignment.trial.session.trial_id

    def _held(self, assignment: Assignment) -> AbstractContextManager[None]:
        return workdir.held(self._folder(assignment), assignment.trial.session.created_at)

    async def _close(
        self, assignment: Assignment, verdict: CommandOutcome, began: float, attempts: int, ended: Exit, folder: Path
    ) -> TrialResult:
        wall_s = self._clock() - began
        try:
            check_metrics(verdict.metrics, "reward")
        except RewardError as error:  # whoever gave them: one trial's metrics must not end the others
            verdict = CommandOutcome(EndReason.REWARD_ERROR, detail=error.message)
        session = await self._post(assignment, verdict, wall_s)
        result = replace(
            recorded_result(session, task_id=assignment.task.task_id, round_name=assignment.round, earlier=False),
            detail=verdict.detail,
            attempts=attempts,
            exit_code=ended.code,
            image=ended.image,
            wall_s=round(wall_s, 3),
        )
        failed = result.failed and (not result.awaits_reward or verdict.failed(scored_together=True))
        keep = self._options.keep == "all" or (self._options.keep == "failed" and failed)
        with contextlib.suppress(workdir.FolderInUse), self._held(assignment):
            if await asyncio.to_thread(workdir.dispose, folder, keep):
                result = replace(result, folder=str(folder))
        if failed:
            log.info("trial %s ended: %s %s", result.trial_id, result.end_reason, verdict.detail)
        return result

    async def _post(self, assignment: Assignment, verdict: CommandOutcome, wall_s: float) -> Session:
        """Post the end. Returns: the session as it is then on record: one that a limit or an operator has ended keeps that end.
        For a deleted one: `deleted`.

        Raises: ClaimLost."""
        trial_id = assignment.trial_id
        try:
            return await self._client.complete(trial_id, await self._end(assignment, verdict, wall_s))
        except (Conflict, Gone, NotFound) as error:
            log.warning("trial %s: the proxy refused its end: %s", trial_id, error.message)
            session = await self._recorded(assignment, error)
            if has_no_end(session):
                raise ClaimLost(error.message) from None
            return session

    async def _end(self, assignment: Assignment, verdict: CommandOutcome, wall_s: float) -> Completion:
        metrics = {**verdict.metrics, WALL_S: wall_s}
        # Not said where there is none: a proxy of an older release refuses what it does not know.
        claim = {"claim": assignment.claim} if assignment.claim is not None else {}
        reward, reason = verdict.reward, verdict.reason
        if self._options.scored_together:
            if reward is not None:
                metrics[OWN_REWARD] = reward
            if await self._may_be_scored(assignment.trial_id, reason):
                reason = EndReason.COMPLETED if reason.status == "completed" else reason
                return Completion(end_reason=reason.value, metrics=metrics, final=False, **claim)
            reward = None
        status = "completed" if reward is not None else reason.status
        return Completion(reward=reward, status=status, end_reason=reason.value, metrics=metrics, **claim)

    async def _may_be_scored(self, trial_id: str, reason: EndReason) -> bool:
        """As by a reward function: what ran to its end, and what failed or was ended at its time limit after its first turn."""
        if reason in (EndReason.COMPLETED, EndReason.NO_REWARD):
            return True
        if reason in (EndReason.TIMEOUT, EndReason.EXIT_CODE, EndReason.REWARD_ERROR):
            return bool((await self._client.session(trial_id)).counts.turns)
        return False

    async def _recorded(self, assignment: Assignment, error: StenoError) -> Session:
        try:
            return await self._client.session(assignment.trial_id)
        except (Gone, NotFound):
            return deleted(assignment.trial.session)
        except StenoError:
            raise error from None


async def _told(report: Callable[[TrialResult], None], closing: Awaitable[TrialResult]) -> None:
    report(await closing)
