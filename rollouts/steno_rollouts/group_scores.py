"""Groups whose trials are scored together, by one function, once all of them have ended.

Until then each trial awaits its reward at the proxy (`Session.awaits_reward`), which holds its group back. Whoever finds that a
group has ended as a whole scores it, from what is on record: these rollouts, another launcher of the run, or a later start. Of
several launchers the one scores that claims the trial which ended last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from steno.client.client import AsyncSteno
from steno.contracts.errors import Conflict, Gone, NotFound
from steno.contracts.records import Session
from steno.contracts.rest import Completion, GroupTrials, Trial
from steno_rollouts.calls.posts import to_its_end
from steno_rollouts.claims import Claims
from steno_rollouts.groups import Planned
from steno_rollouts.outcome import CommandOutcome, EndReason, RewardError, TrialResult, deleted, recorded_result
from steno_rollouts.trials.group_reward import GroupRewardFunction, TrialOfGroup

Report = Callable[[TrialResult], None]
log = logging.getLogger(__name__)


@dataclass
class _Group:
    """trials: those on record, in order. held: results of trials that have ended and await their rewards, and who is told."""

    plan: Planned
    trials: dict[str, Trial]
    held: dict[str, tuple[TrialResult, Report]] = field(default_factory=dict)
    scoring: asyncio.Lock = field(default_factory=asyncio.Lock)


class GroupScores:
    """Of one `Rollouts`. Args: function: None: each trial has its own reward. claims: None: nobody else works on this run."""

    def __init__(self, client: AsyncSteno, function: GroupRewardFunction | None, claims: Claims | None) -> None:
        self._client = client
        self._function = function
        self._claims = claims
        self._groups: dict[str, _Group] = {}

    def started(self, plan: Planned, group: GroupTrials) -> None:
        if not self.together:
            return
        trials = {trial.session.trial_id: trial for trial in group.trials}
        self._groups.setdefault(group.group.group_id, _Group(plan, trials))

    def holds(self, result: TrialResult, report: Report) -> bool:
        """Whether this result is kept until its group is scored; it is reported then."""
        group = self._groups.get(result.group_id)
        if group is None or not result.awaits_reward:
            return False
        group.held[result.trial_id] = result, report
        return True

    @property
    def together(self) -> bool:
        return self._function is not None

    @property
    def held(self) -> list[str]:
        """Groups of which results are held."""
        return [name for name, group in self._groups.items() if group.held]

    def look(self, running: asyncio.TaskGroup, own: Collection[str]) -> None:
        """Score the groups that nobody here is about to: their last trial ended elsewhere, or earlier, or was given up.

        Args: own: trials that run here, each of which looks at its group itself."""
        for group_id in self.held:
            if not self._groups[group_id].scoring.locked() and self._groups[group_id].trials.keys().isdisjoint(own):
                running.create_task(self.score(group_id, own))

    async def score(self, group_id: str, own: Collection[str]) -> None:
        """Report the results that were held of a group; nothing as long as a trial of it runs, or another launcher scores it.

        Args: own: trials that run here: of one that its limit has ended, nobody has said yet what it was worth alone.
        Cancelled: the group is as it was, or all of it is posted. Raises: StenoError: the proxy could not be reached, or refuses.
        """
        group = self._groups.get(group_id)
        if group is None:
            return
        async with group.scoring:
            if not group.held or not group.trials.keys().isdisjoint(own):
                return
            sessions = [session async for session in self._client.sessions(group_id=group_id, limit=1000)]
            if any(session.status == "open" for session in sessions):
                return
            awaiting = [session for session in sessions if session.awaits_reward]
            if not awaiting:
                self._let_go(group_id, {session.trial_id: session for session in sessions}, {})
                return
            last = max(awaiting, key=lambda session: (session.ended_at or 0.0, session.trial_id))
            if await self._runs_elsewhere(group_id, awaiting) or not await self._claimed(group_id, last.trial_id):
                return
            try:
                outcomes = await self._asked(group_id, sessions)
            except (Gone, NotFound):  # one was deleted: what is left of the group is scored at the next look
                return
            if await self._claimed(group_id, last.trial_id):
                await to_its_end(self._post(group_id, awaiting, last, outcomes))

    async def give_up(self) -> None:
        """Trials that await a reward get none: their groups wait for nothing any more."""
        for group_id in self.held:
            held = [result for result, _ in self._groups[group_id].held.values()]
            ended = {one.trial_id: await self._end(group_id, one.trial_id, one.end_reason, _NONE) for one in held}
            self._let_go(group_id, ended, {})

    async def _runs_elsewhere(self, group_id: str, awaiting: Sequence[Session]) -> bool:
        """Whether another launcher has not let go of a trial yet that its limit has ended."""
        held = self._groups[group_id].held
        for trial_id in [session.trial_id for session in awaiting]:
            ended_here = trial_id in held and not held[trial_id][0].earlier
            if not ended_here and not await self._claimed(group_id, trial_id):
                return True
        return False

    async def _claimed(self, group_id: str, trial_id: str) -> bool:
        """Whether these rollouts are the ones to score the group; asked again, the claim is renewed."""
        if self._claims is None:
            return True
        mine = (await self._claims.take(group_id, self._groups[group_id].trials[trial_id])).mine
        if not mine:
            self._claims.over(trial_id)
        return mine

    async def _asked(self, group_id: str, sessions: Sequence[Session]) -> dict[str, CommandOutcome]:
        """Also of trials that have their rewards: whoever posted them was killed before the group's last one."""
        assert self._function is not None
        plan, order = self._groups[group_id].plan, list(self._groups[group_id].trials)
        scored = [
            one for one in sessions if one.awaits_reward or (one.status == "completed" and one.reward is not None)
        ]
        scored.sort(key=lambda session: order.index(session.trial_id))
        try:
            trials = [await TrialOfGroup.read(self._client, session) for session in scored]
            return await self._function(group_id, plan.task.arguments(), plan.task.folder, trials)
        except RewardError as error:
            log.warning("group %s is not scored: %s", group_id, error.message)
            failed = CommandOutcome(EndReason.REWARD_ERROR, detail=error.message)
            return dict.fromkeys((session.trial_id for session in scored), failed)

    async def _post(
        self,
        group_id: str,
        awaiting: Sequence[Session],
        last: Session,
        outcomes: dict[str, CommandOutcome],
    ) -> None:
        """The trial that is claimed comes last: until it is posted, whoever takes over finds that the group is not scored."""
        sessions = {}
        for session in sorted(awaiting, key=lambda session: session.trial_id == last.trial_id):
            trial_id = session.trial_id
            sessions[trial_id] = await self._end(group_id, trial_id, session.end_reason or "", outcomes[trial_id])
        if self._claims is not None:
            for trial_id in sessions:
                self._claims.over(trial_id)
        self._let_go(group_id, sessions, outcomes)

    async def _end(self, group_id: str, trial_id: str, reason: str, outcome: CommandOutcome) -> Session:
        failed = outcome.reward is None and reason in (EndReason.TIMEOUT, EndReason.EXIT_CODE)
        status = "aborted" if failed else "completed"
        end = Completion(reward=outcome.reward, status=status, end_reason=reason, metrics=outcome.metrics)
        try:
            return await self._client.complete(trial_id, end)
        except (Conflict, Gone, NotFound) as error:
            log.warning("trial %s: its reward was not taken: %s", trial_id, error.message)
        try:
            return await self._client.session(trial_id)
        except (Gone, NotFound):
            return deleted(self._groups[group_id].trials[trial_id].session)

    def _let_go(self, group_id: str, sessions: dict[str, Session], outcomes: dict[str, CommandOutcome]) -> None:
        """Report what is held, as it is on record now."""
        group = self._groups.pop(group_id)
        for trial_id, (held, report) in group.held.items():
            session = sessions.get(trial_id) or deleted(group.trials[trial_id].session)
            now = recorded_result(session, task_id=held.task_id, round_name=held.round, earlier=held.earlier)
            said = outcomes.get(trial_id, _NONE).detail
            report(
                replace(
                    held, status=now.status, end_reason=now.end_reason, reward=now.reward, metrics=now.metrics,
                    detail=said or held.detail, awaits_reward=False,
                )
            )  # fmt: skip
        group.held.clear()


_NONE = CommandOutcome(EndReason.NO_REWARD)
