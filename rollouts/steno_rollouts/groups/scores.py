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

from steno.client.client import AsyncClient
from steno.contracts.errors import Conflict, Gone, NotFound, StenoError
from steno.contracts.records import Session
from steno.contracts.rest import Completion, GroupTrials, Trial
from steno_rollouts.calls.patience import AWAY
from steno_rollouts.calls.posts import to_its_end
from steno_rollouts.groups.claims import Claims
from steno_rollouts.groups.plan import Planned
from steno_rollouts.outcome import (
    CommandOutcome,
    EndReason,
    RewardError,
    TrialResult,
    deleted,
    has_no_end,
    recorded_result,
)
from steno_rollouts.trials.group_reward import GroupRewardFunction, TrialOfGroup

AT_ONCE = 32
"""Groups that are scored at a time."""
Report = Callable[[TrialResult], None]
log = logging.getLogger(__name__)


@dataclass
class _Group:
    """trials: those on record, in order. held: results of trials that await their rewards. told: trials whose results were
    reported. runs: the trial that ran when the group was last looked at. elsewhere: the trial by which another launcher scores
    the group; claimed: by which these rollouts do."""

    group_id: str
    plan: Planned
    trials: dict[str, Trial]
    held: dict[str, TrialResult] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    runs: str | None = None
    elsewhere: str | None = None
    claimed: str | None = None
    scoring: asyncio.Lock = field(default_factory=asyncio.Lock)


class GroupScores:
    """Of one call of `Rollouts.run`.

    Args:
        function: None: each trial has its own reward.
        claims: None: nobody else works on this run.
        report: is told of results that were held.
    """

    def __init__(
        self, client: AsyncClient, function: GroupRewardFunction | None, claims: Claims | None, report: Report
    ) -> None:
        self._client = client
        self._function = function
        self._claims = claims
        self._report = report
        self._groups: dict[str, _Group] = {}
        self._at_once = asyncio.Semaphore(AT_ONCE)

    @property
    def together(self) -> bool:
        return self._function is not None

    def started(self, plan: Planned, group: GroupTrials) -> None:
        if self.together:
            name, trials = group.group.group_id, {trial.session.trial_id: trial for trial in group.trials}
            self._groups.setdefault(name, _Group(name, plan, trials))

    def holds(self, result: TrialResult) -> bool:
        """Whether the result of a trial that has ended is kept until its group is scored; it is reported then."""
        group = self._groups.get(result.group_id)
        if group is None:
            return False
        if result.awaits_reward:
            group.held[result.trial_id] = result
            return True
        group.told.add(result.trial_id)
        if group.told >= group.trials.keys():
            del self._groups[result.group_id]
        return False

    @property
    def held(self) -> bool:
        """Whether a result is held."""
        return any(group.held for group in self._groups.values())

    def claims(self, trial_id: str) -> bool:
        """Whether this trial's claim is how these rollouts score its group."""
        return any(group.claimed == trial_id for group in self._groups.values())

    def look(self, running: asyncio.TaskGroup, own: Collection[str]) -> None:
        """Score the groups that nobody here is about to: their last trial ended elsewhere, or earlier, or was given up.

        Args: own: trials that run here, each of which looks at its group itself."""
        for group_id, group in self._groups.items():
            if group.held and not group.scoring.locked() and group.trials.keys().isdisjoint(own):
                running.create_task(self.score(group_id))

    async def score(self, group_id: str) -> None:
        """Report the results that are held of a group; nothing as long as a trial of it runs, or another launcher scores it.

        Cancelled: nothing is posted, or all of it is. Raises: StenoError: the proxy could not be reached, or refuses.
        """
        group = self._groups.get(group_id)
        if group is None:
            return
        async with group.scoring:
            if not group.held or await self._scored_elsewhere(group):
                return
            sessions = await self._ended(group)
            if sessions is None:
                return
            awaiting = [session for session in sessions if session.awaits_reward]
            if not awaiting:
                self._let_go(group, {session.trial_id: session for session in sessions}, {})
                return
            last = max(awaiting, key=lambda session: (session.ended_at or 0.0, session.trial_id))
            group.claimed = last.trial_id
            try:
                async with self._at_once:
                    await self._scored_by(group, sessions, awaiting, last)
            except (Gone, NotFound):  # one was deleted: what is left of the group is scored at the next look
                return
            finally:
                group.claimed = None
                if self._claims is not None:
                    self._claims.over(last.trial_id)

    async def _scored_by(
        self, group: _Group, sessions: Sequence[Session], awaiting: Sequence[Session], last: Session
    ) -> None:
        """Score the group if these rollouts get the claim of its trial `last`, before the function is called and again after."""
        granted, _ = await self._claimed(group, last.trial_id)
        if not granted:
            group.elsewhere = last.trial_id
            return
        outcomes = await self._asked(group, sessions)
        granted, claim = await self._claimed(group, last.trial_id)
        if granted:
            await to_its_end(self._post(group, awaiting, last, claim, outcomes))

    async def _scored_elsewhere(self, group: _Group) -> bool:
        """Whether the launcher that has the group's claim still scores it. Of a large group one trial is asked for."""
        if group.elsewhere is None or self._claims is None:
            return False
        taken = await self._claims.take(group.group_id, group.trials[group.elsewhere])
        self._claims.over(group.elsewhere)
        if not taken.mine and taken.trial.session.awaits_reward:
            return True
        group.elsewhere = None
        return False

    async def give_up(self) -> None:
        """Trials that await a reward get none: their groups wait for nothing any more."""
        for group in [group for group in self._groups.values() if group.held]:
            held = list(group.held.values())
            ended = {one.trial_id: await self._end(group, one.trial_id, one.end_reason, _NONE) for one in held}
            self._let_go(group, ended, {})

    async def _ended(self, group: _Group) -> list[Session] | None:
        """The group's trials that are on record, in order; None: one of them runs, or its launcher has not said how it ended."""
        found: dict[str, Session] = {}
        in_turn = sorted(group.trials, key=lambda name: (name != group.runs, name in group.held or name in group.told))
        for trial_id in in_turn:  # those that may run come first: one is enough
            try:
                session = await self._client.session(trial_id)
            except (Gone, NotFound):  # deleted
                continue
            if has_no_end(session):
                group.runs = trial_id
                return None
            found[trial_id] = session
        group.runs = None
        return [found[trial_id] for trial_id in group.trials if trial_id in found]

    async def _claimed(self, group: _Group, trial_id: str) -> tuple[bool, int | None]:
        """Whether these rollouts are the ones to score the group, and the epoch; asked again, the claim is renewed."""
        if self._claims is None:
            return True, None
        taken = await self._claims.take(group.group_id, group.trials[trial_id])
        return taken.mine, taken.epoch

    async def _asked(self, group: _Group, sessions: Sequence[Session]) -> dict[str, CommandOutcome]:
        """What the function says of each trial. It gets also those with rewards: their launcher may have been killed while it
        posted them."""
        assert self._function is not None
        scored = [
            one for one in sessions if one.awaits_reward or (one.status == "completed" and one.reward is not None)
        ]
        task = group.plan.task
        try:
            trials = [await self._read(session) for session in scored]
            return await self._function(group.group_id, task.arguments(), task.folder, trials)
        except RewardError as error:
            log.warning("group %s is not scored: %s", group.group_id, error.message)
            failed = CommandOutcome(EndReason.REWARD_ERROR, detail=error.message)
            return dict.fromkeys((session.trial_id for session in scored), failed)

    async def _read(self, session: Session) -> TrialOfGroup:
        """Raises: RewardError: it can't be read; Gone, NotFound, or as `AWAY`."""
        try:
            return await TrialOfGroup.read(self._client, session)
        except (Gone, NotFound, *AWAY):
            raise
        except StenoError as error:
            raise RewardError(f"transcript of {session.trial_id}: {error.message}") from error

    async def _post(
        self,
        group: _Group,
        awaiting: Sequence[Session],
        last: Session,
        claim: int | None,
        outcomes: dict[str, CommandOutcome],
    ) -> None:
        """The trial that is claimed comes last: until it is posted, whoever takes over finds that the group is not scored."""
        sessions = {}
        for session in sorted(awaiting, key=lambda session: session.trial_id == last.trial_id):
            trial_id = session.trial_id
            epoch = claim if trial_id == last.trial_id else None
            sessions[trial_id] = await self._end(group, trial_id, session.end_reason or "", outcomes[trial_id], epoch)
        if not sessions[last.trial_id].awaits_reward:  # else another launcher has taken the group over
            self._let_go(group, sessions, outcomes)

    async def _end(
        self, group: _Group, trial_id: str, reason: str, outcome: CommandOutcome, claim: int | None = None
    ) -> Session:
        failed = outcome.reward is None and reason in (EndReason.TIMEOUT, EndReason.EXIT_CODE)
        end = Completion(
            reward=outcome.reward, status="aborted" if failed else "completed", end_reason=reason, metrics=outcome.metrics,
            **({"claim": claim} if claim is not None else {}),
        )  # fmt: skip
        try:
            return await self._client.complete(trial_id, end)
        except (Conflict, Gone, NotFound) as error:
            log.warning("trial %s: the proxy refused its reward: %s", trial_id, error.message)
        try:
            return await self._client.session(trial_id)
        except (Gone, NotFound):
            return deleted(group.trials[trial_id].session)

    def _let_go(self, group: _Group, sessions: dict[str, Session], outcomes: dict[str, CommandOutcome]) -> None:
        """Report what is held, as it is on record now."""
        held = list(group.held.items())
        group.held.clear()
        for trial_id, before in held:
            session = sessions.get(trial_id) or deleted(group.trials[trial_id].session)
            self._report(_scored(before, session, outcomes.get(trial_id, _NONE)))


_NONE = CommandOutcome(EndReason.NO_REWARD)


def _scored(held: TrialResult, session: Session, outcome: CommandOutcome) -> TrialResult:
    """The result of a trial that has its reward, or gets none."""
    now = recorded_result(session, task_id=held.task_id, round_name=held.round, earlier=held.earlier)
    reason, detail = now.end_reason, held.detail
    if reason == EndReason.COMPLETED:
        reason, detail = (reason, "") if now.reward is not None else (outcome.reason.value, outcome.detail or detail)
    elif outcome.detail:
        detail = f"{detail}; {outcome.detail}" if detail else outcome.detail
    return replace(
        held,
        status=now.status,
        end_reason=reason,
        reward=now.reward,
        metrics=now.metrics,
        detail=detail,
        awaits_reward=False,
    )
