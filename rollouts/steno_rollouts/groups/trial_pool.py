"""Trials of groups: each is begun once there is a place for it and it is these rollouts' to run, and is told of as it ends.

Where several launchers work on one run, each trial is claimed first (`claims.py`). One that another launcher has is looked at
until it has ended, or until that launcher has gone: then it is run here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from functools import partial

from steno.client.client import AsyncClient
from steno.contracts.errors import Conflict, Gone, NotFound
from steno.contracts.records import Session
from steno.contracts.rest import GroupTrials
from steno_rollouts.calls.patience import AWAY
from steno_rollouts.calls.posts import to_its_end
from steno_rollouts.groups.claims import Claims
from steno_rollouts.groups.first_turns import Begun, FirstTurns
from steno_rollouts.groups.plan import GroupOptions, Observer, Planned
from steno_rollouts.groups.scores import GroupScores
from steno_rollouts.groups.spare import SpareTrials
from steno_rollouts.outcome import EndReason, TrialResult, has_no_end, is_scored_later
from steno_rollouts.trials.group_reward import GroupRewardFunction
from steno_rollouts.trials.play import Assignment
from steno_rollouts.trials.runner import ClaimLost, FailedTrial, TrialRunner

FIRST_TURN_S = 0.5
"""Between two looks at whether the first trial has had its first turn."""
OTHERS_S = 3.0
"""Between two looks at the trials that other launchers run."""


class TrialPool:
    """Of one call of `Rollouts.run`.

    Attributes:
        places: one for each trial that may run at a time.
        results: of trials that have ended, in that order.
    """

    def __init__(
        self,
        client: AsyncClient,
        runner: TrialRunner,
        options: GroupOptions,
        first: FirstTurns,
        observers: Sequence[Observer],
        claims: Claims | None,
        group_reward: GroupRewardFunction | None,
    ) -> None:
        self._client = client
        self._runner = runner
        self._options = options
        self._first = first
        self._observers = observers
        self._claims = claims
        self._scores = GroupScores(client, group_reward, claims, self.ended)
        self.places = asyncio.Semaphore(1 if options.sequential else options.in_flight)
        self.results: list[TrialResult] = []
        self._spare = SpareTrials(options.needed)
        self._waiting: dict[str, Assignment] = {}
        self._others: dict[str, Assignment] = {}
        self._taken_back: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._numbers: dict[str, int] = {}
        self._turn_to_others = asyncio.Event()
        self._running: asyncio.TaskGroup

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """What is begun meanwhile has ended when this is over. Raises: a group of what went wrong, the first of it first."""
        kept = contextlib.nullcontext() if self._claims is None else self._claims.kept(self._lost)
        async with kept, asyncio.TaskGroup() as self._running:
            looking = self._running.create_task(self._look_at_groups())
            try:
                yield
                if self._tasks:  # the rollouts are stopped, and what runs goes on
                    await asyncio.wait([*self._tasks.values()])
            finally:
                looking.cancel()

    def add(self, plan: Planned, group: GroupTrials) -> list[Assignment]:
        """A group that is registered. Returns: its trials that have not ended, each to be begun; those that have are told of."""
        self._scores.started(plan, group)
        found = []
        for trial in group.trials:
            assignment = Assignment(trial, plan.task, plan.round, group.harness_key)
            if not self._has_no_end(trial.session):
                self.ended(assignment.recorded())
            else:
                found.append(assignment)
                self._waiting[assignment.trial_id] = assignment
        return found

    async def begin(self, waiting: Assignment) -> asyncio.Task[None] | None:
        """Start a trial once there is a place. None: it has ended, another launcher has it, or the rollouts are stopped."""
        await self.places.acquire()
        trial = None
        try:
            assignment = await self._claimed(waiting)
            if assignment is None:
                return None
            begun = await self._first.begin()
            if self._first.stopped is None:
                trial = self._running.create_task(self._one(assignment, begun))
                self._tasks[assignment.trial_id] = trial
                trial.add_done_callback(partial(self._over, assignment.trial_id, begun))
            else:
                self._first.over(begun)
            return trial
        finally:
            if trial is None:
                self.places.release()

    async def until_all_ended(self) -> None:
        """Wait until no trial runs here or at another launcher, and every group is scored; or until the rollouts are stopped.
        Meanwhile another launcher may take over a trial that runs here."""
        while self._first.stopped is None and (self._tasks or self._waits_for_others()):
            await self.look_at_others()
            if self._first.stopped is not None:
                return
            if (
                not self._tasks
            ):  # no trial here can show why the held ones failed, and another launcher may wait for them
                await self.give_up(self._first.let_go())
            if self._tasks:  # one of these may be lost yet
                self._turn_to_others.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._turn_to_others.wait(), OTHERS_S)
            elif self._waits_for_others():
                await asyncio.sleep(OTHERS_S)  # the proxy is asked: nobody tells

    def _waits_for_others(self) -> bool:
        return bool(self._others or self._taken_back or self._scores.held)

    async def look_at_others(self) -> None:
        """Trials of other launchers: those that have ended are told of, those of one that has gone are run."""
        for trial_id in list(self._others):
            if trial_id in self._others and not self.places.locked():
                await self.begin(self._others.pop(trial_id))

    async def settle_failed(self) -> bool:
        """Called when no trial can begin. If none runs here either, no later trial can show why the held ones failed before their
        first turn. So these are given up if any trial of the run has had a turn, here, elsewhere or earlier. They stay open if
        the rollouts are stopped. Returns: False: no trial has had a turn."""
        if self._tasks or not self._first.held or self._first.stopped is not None:
            return True
        if not self._first.proven and not await self._proven_elsewhere():
            return False
        await self.give_up(self._first.let_go())
        return True

    async def give_up(self, found: Sequence[FailedTrial]) -> None:
        """Post the end of trials that failed before their first turn: of all, even if cancelled meanwhile. They are not held any
        more, so nothing else would end them."""
        await to_its_end(self._give_up_each(found))

    async def abandon_waiting(self) -> None:
        """End what was not begun."""
        for trial_id, assignment in list(self._waiting.items()):
            del self._waiting[trial_id]
            self.ended(await self._runner.abandon(assignment, EndReason.CANCELLED))

    async def score_none(self) -> None:
        """Trials that await a reward get none: their groups wait for nothing any more."""
        await self._scores.give_up()

    def ended(self, result: TrialResult) -> None:
        """Tell of a trial's end, now or once its group is scored."""
        self._spare.ended(result)
        if self._claims is not None and not self._scores.claims(result.trial_id):
            self._claims.over(result.trial_id)
        if self._scores.holds(result):
            for observer in self._observers:
                observer.trial_waits(result)
            return
        self.results.append(result)
        for observer in self._observers:
            observer.trial_ended(result)

    def _over(self, trial_id: str, begun: Begun, trial: asyncio.Task[None]) -> None:
        self.places.release()
        self._first.over(begun)
        if self._tasks.get(trial_id) is trial:
            del self._tasks[trial_id]
        if self._others or not self._tasks:
            self._turn_to_others.set()

    def _lost(self, trial_id: str) -> None:
        """Another launcher has it."""
        if (trial := self._tasks.get(trial_id)) is not None:
            if trial_id in self._waiting:  # the task has not taken its first step, and never will
                self._others[trial_id] = self._waiting.pop(trial_id)
            trial.cancel()

    async def _claimed(self, waiting: Assignment) -> Assignment | None:
        """Claim a trial. Returns: what to run; None: it has ended, or another launcher runs it. It is ended here if it has a turn
        on record (its launcher is gone), if its group's deadline has passed, or if its group does not need it."""
        assignment, trial_id, late = waiting, waiting.trial_id, False
        if self._claims is not None:
            taken = await self._claims.take(waiting.group_id, waiting.trial)
            assignment, late = replace(waiting, trial=taken.trial, claim=taken.epoch), taken.past_deadline
            if not taken.mine and self._has_no_end(taken.trial.session):
                self._others[trial_id] = assignment
                self._waiting.pop(trial_id, None)
                return None
        session = assignment.trial.session
        spare = session.status == "open" and self._spare.enough(assignment.group_id)
        if session.status == "open" and not session.counts.turns and not late and not spare:
            self._waiting[trial_id] = assignment
            return assignment
        if not self._has_no_end(session):
            self._waiting.pop(trial_id, None)
            self.ended(assignment.recorded())
            return None
        self._waiting[trial_id] = assignment  # until it has its end: who is cancelled meanwhile ends what waits
        unbegun = EndReason.SPARE if spare else EndReason.DEADLINE
        try:
            result = await self._runner.abandon(assignment, EndReason.INTERRUPTED if session.counts.turns else unbegun)
        except ClaimLost:
            self._others[trial_id] = assignment
        else:
            self.ended(result)
        del self._waiting[trial_id]
        return None

    def _has_no_end(self, session: Session) -> bool:
        """As `outcome.has_no_end`. Raises: Conflict: it is to be scored with its group; these rollouts score each by itself."""
        if is_scored_later(session) and not self._scores.together:
            raise Conflict(
                f"trial {session.trial_id} is to be scored together with its group: all launchers of a run need the same "
                "--group-reward",
                field="group_reward",
            )
        return has_no_end(session)

    async def _anew(self, assignment: Assignment) -> Assignment:
        """The assignment with a new claim and key (without claims: unchanged): a lost attempt, which may still run, has the old
        key. Raises: ClaimLost."""
        if self._claims is None:
            return assignment
        taken = await self._claims.anew(assignment.group_id, assignment.trial)
        if not taken.mine and self._has_no_end(taken.trial.session):
            raise ClaimLost(f"trial {assignment.trial_id}: another launcher has taken it over")
        return replace(assignment, trial=taken.trial, claim=taken.epoch)

    async def _one(self, assignment: Assignment, begun: Begun) -> None:
        if await self._played(assignment, begun):
            await self._scores.score(assignment.group_id)

    async def _look_at_groups(self) -> None:
        """Score groups whose last trial did not end here, or was given up. Tell trials to stop that their group does not need any
        more, since other trials have ended elsewhere."""
        while True:
            await asyncio.sleep(OTHERS_S)
            with contextlib.suppress(*AWAY):  # it is looked at again
                await self._look_at_ended(self._spare.groups)
                for trial_id in [name for name, one in self._others.items() if self._spare.enough(one.group_id)]:
                    await self._end_left(trial_id)
            self._scores.look(self._running, self._numbers)

    async def _end_left(self, trial_id: str) -> None:
        """End a trial of another launcher that its group does not need, if that launcher has gone. That takes no place."""
        if (assignment := self._others.pop(trial_id, None)) is None:
            return
        self._taken_back.add(trial_id)
        try:
            await self._claimed(assignment)
        except BaseException:
            self._others.setdefault(trial_id, assignment)
            raise
        finally:
            self._taken_back.discard(trial_id)

    async def _look_at_ended(self, group_ids: Collection[str]) -> None:
        """Count the trials of these groups that other launchers have run to their end. One that waits for a place here is
        reported later, when its turn comes."""
        for trial_id, assignment in [*self._others.items(), *self._waiting.items()]:
            if assignment.group_id not in group_ids:
                continue
            try:
                session = await self._client.session(trial_id)
            except (Gone, NotFound):
                continue
            if self._has_no_end(session):
                continue
            trial = assignment.trial.model_copy(update={"session": session})
            result = replace(assignment, trial=trial).recorded()
            if self._others.pop(trial_id, None) is not None:
                self.ended(result)
            else:
                self._spare.ended(result)

    async def _played(self, assignment: Assignment, begun: Begun) -> bool:
        """Run a trial. Returns: False: another launcher has taken it over."""
        trial_id = assignment.trial_id
        del self._waiting[trial_id]
        for observer in self._observers:
            observer.trial_started(trial_id)
        self._numbers[trial_id] = begun.number
        looking = asyncio.create_task(self._until_first_turn(trial_id, begun)) if begun.alone else None
        has_ended = unproven = False

        def report(result: TrialResult) -> None:
            nonlocal has_ended, unproven
            has_ended = True
            unproven = result.end_reason == EndReason.SPARE and not result.turns
            self.ended(result)

        try:
            hold = bool(self._options.stop_after_failures)
            not_needed = self._spare.begun(assignment.group_id, trial_id)
            try:
                failed = await self._runner.run(assignment, report, hold=hold, anew=self._anew, not_needed=not_needed)
            except Exception as error:
                if not (has_ended or isinstance(error, ClaimLost)):
                    self._waiting[trial_id] = assignment  # it ends with those that have not begun
                raise
            if unproven:
                return True
            if failed is None:
                await self.give_up(self._first.reached(begun.number))
            else:
                await self._failed_early(failed, begun.number)
            return True
        except ClaimLost:
            self._others[trial_id] = assignment
            return False
        finally:
            del self._numbers[trial_id]
            self._spare.over(assignment.group_id, trial_id)
            if looking is not None:
                looking.cancel()
                await asyncio.wait({looking})
                if not looking.cancelled():
                    looking.result()

    async def _until_first_turn(self, trial_id: str, begun: Begun) -> None:
        try:
            while not await self._has_turned(trial_id):  # noqa: ASYNC110  # the proxy is asked: nobody tells
                await asyncio.sleep(FIRST_TURN_S)
            await self.give_up(self._first.reached(begun.number))
        finally:
            self._first.over(begun)

    async def _failed_early(self, failed: FailedTrial, number: int) -> None:
        for observer in self._observers:
            observer.trial_failed(failed)
        if not self._first.failed(number, failed):
            return
        for trial_id, later in list(self._numbers.items()):
            if later > min(self._first.held, default=later) and later != number and await self._has_turned(trial_id):
                await self.give_up(self._first.reached(later))
        if self._first.too_many:
            self._first.stop()

    async def _has_turned(self, trial_id: str) -> bool:
        try:
            return bool((await self._client.session(trial_id)).counts.turns)
        except (Gone, NotFound):  # deleted: its end is its runner's to find
            return False

    async def _proven_elsewhere(self) -> bool:
        """Whether another launcher's trial, or one of an earlier start, has had a turn."""
        if (await self._client.run(self._options.run_id)).sampled:
            return True
        for trial_id in list(self._others):
            if await self._has_turned(trial_id):
                return True
        return False

    async def _give_up_each(self, found: Sequence[FailedTrial]) -> None:
        for failed in found:
            try:
                self.ended(await self._runner.give_up(failed))
            except ClaimLost:
                self._others[failed.trial_id] = failed.assignment
