"""Runs groups: decides when each is registered and which of its trials run, and collects their results.

    rollouts = Rollouts(client, runner, GroupOptions("my-run", size=8), admission=Admission(groups_per_step=8))
    results = await rollouts.run(epochs(tasks, 3))

A group is registered when there is a free place for its first trial and the staleness bound admits it. Its id follows from
run, task and round, so rollouts that were killed find their groups again: trials that have ended are not run again, those
that were running are aborted as `interrupted`, those that had not begun are run. Where several launchers work on one run, each
trial is run by the one that has claimed it (`groups/claims.py`), and the others wait for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from steno.client.client import AsyncSteno
from steno.contracts.errors import Conflict, Forbidden, Gone, NotFound, StenoError, StoreFull
from steno.contracts.records import Session
from steno.contracts.rest import GroupTrials, Trial
from steno_rollouts.calls.posts import Stop, posted, to_its_end
from steno_rollouts.groups.admission import Admission, InHand
from steno_rollouts.groups.claims import Claims
from steno_rollouts.groups.first_turns import Begun, FirstTurns
from steno_rollouts.groups.plan import GroupOptions, Observer, Planned
from steno_rollouts.groups.scores import GroupScores
from steno_rollouts.outcome import EndReason, TrialResult, has_no_end, is_scored_later
from steno_rollouts.tasks.task import group_id
from steno_rollouts.trials.play import Assignment
from steno_rollouts.trials.runner import ClaimLost, FailedTrial, TrialRunner

FIRST_TURN_S = 0.5
"""Between two looks at whether the first trial has had its first turn."""
OTHERS_S = 3.0
"""Between two looks at the trials that other launchers run."""
FULL_S = 5.0
"""Between two looks at whether a full store takes a new group."""
LOOKS = 10
"""Looks at what is in hand between two at whom a held back group waits for, and at other launchers' trials."""


class RolloutsStopped(StenoError):
    """Too many trials failed before their first turn, one after the other."""

    code = "rollouts_stopped"


class Rollouts:
    """Groups of one run. `run` may be called again, also while it runs: an evaluation, or another round of the same tasks."""

    def __init__(
        self,
        client: AsyncSteno,
        runner: TrialRunner,
        options: GroupOptions,
        *,
        admission: Admission | None = None,
        in_hand: InHand | None = None,
        observers: Sequence[Observer] = (),
        claims: Claims | None = None,
        scores: GroupScores | None = None,
        patient: bool = False,
    ) -> None:
        """
        Args:
            claims: None: nobody else works on this run.
            scores: of groups whose trials are scored together; None: each trial has its own reward.
            in_hand: groups of the run that are not acknowledged yet, for `admission`; default: as the proxy counts them.
            patient: new groups wait for room in a full store, and observers are told why; else that ends the rollouts.
        """
        self._client = client
        self._runner = runner
        self.options = options
        self._admission = admission or Admission()
        self._in_hand = in_hand or self._recorded_in_hand
        self._observers = list(observers)
        self._slots = asyncio.Semaphore(1 if options.sequential else options.in_flight)
        self._waiting: dict[str, Assignment] = {}
        self._unanswered: list[tuple[Planned, asyncio.Future[GroupTrials]]] = []
        self._first = FirstTurns(options.stop_after_failures)
        self._running: dict[str, int] = {}
        self._claims = claims
        self._scores = scores or GroupScores(client, None, claims)
        self._patient = patient
        self._others: dict[str, tuple[Assignment, list[TrialResult]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turn_to_others = asyncio.Event()

    async def run(
        self, planned: Iterable[Planned], *, done: Mapping[str, TrialResult] = MappingProxyType({})
    ) -> list[TrialResult]:
        """Run every group of `planned` to its end.

        Args: done: trials known to have ended, by id (`results.ended_trials`); a group of nothing else is not looked up again.
        Returns: results of all trials, in the order in which they ended.
        Cancelled: trials that run are ended as `cancelled`; those that have not begun too, unless the run is resumable.
        Raises: RolloutsStopped: too many trials failed before their first turn; those that ran have ended, those that failed so
            are open. StenoError: the proxy refuses, or can't be reached. All that ran has been ended.
        """
        results: list[TrialResult] = []
        try:
            async with (
                contextlib.nullcontext() if self._claims is None else self._claims.kept(self._lost),
                asyncio.TaskGroup() as running,
            ):
                with self._groups_looked_at(running, results):
                    for plan in planned:
                        if self._first.stopped is not None:
                            break
                        await self._plan(plan, done, running, results)
                    await self._until_others_ended(running, results)
                    if self._first.stopped is None:
                        await self._give_up_failed(self._first.let_go(), results)
                        await self._until_others_ended(running, results)
        except BaseExceptionGroup as errors:
            raise first_failure(errors) from errors
        finally:
            try:
                if self.options.resumable:
                    for _, asked in self._unanswered:
                        asked.cancel()
                    self._unanswered.clear()
                else:
                    await to_its_end(self._give_up(results), stopping=True)
            finally:
                self._scores.forget(results)
                for trial_id in self._others_of(results):
                    del self._others[trial_id]
        if self._first.stopped is not None:
            raise self._stopped(self._first.stopped)
        return results

    async def _plan(
        self, plan: Planned, done: Mapping[str, TrialResult], running: asyncio.TaskGroup, results: list[TrialResult]
    ) -> None:
        """Start a group; or tell of one that has ended. One of which every trial failed before its first turn, when these
        rollouts had not begun, is made anew under another name: what its trials were to say is not known yet."""
        for again in itertools.count():
            named = replace(plan, round=f"{plan.round}+{again}") if again else plan
            identity = group_id(self.options.run_id, named.task.task_id, named.round)
            ended = [done.get(f"{identity}.{i}") for i in range(self.options.size)]
            known = [replace(result, earlier=True) for result in ended if result is not None]
            if len(known) < len(ended):
                if await self._start(named, identity, running, results):
                    return
            elif not all(result.failed_early for result in known):
                for result in known:
                    self._ended(result, results)
                return

    async def _start(
        self, plan: Planned, identity: str, running: asyncio.TaskGroup, results: list[TrialResult]
    ) -> bool:
        """Register a group and start its trials, each as soon as there is a place for it. False: it is on record, and all of it
        failed before its first turn."""
        # One that is on record is in hand already, and must be gone on with, also where another launcher has just registered it.
        admitted = not self._admission.bounded or await self._is_registered(identity)
        looks, group = 0, None
        while True:
            # A group is not made before its first trial can run: until then it would only grow old.
            async with self._slots:
                full = None
                if admitted or await self._admission.admits(self._in_hand):
                    try:
                        group = await self._register(plan, identity)
                    except StoreFull as error:
                        if not self._patient:
                            raise
                        full = error
                if group is not None:
                    for observer in self._observers if looks else ():
                        observer.held_back(None)
                    if group.trials and all(_failed_early(trial, plan) for trial in group.trials):
                        return False
                    for observer in self._observers:
                        observer.group_started(group)
                    found = await self._open(group, plan, results)
                    break
            await self._held_back(looks, full, running, results)
            if self._first.stopped is not None:
                return True
            looks += 1
            admitted = not self._admission.bounded or await self._is_registered(identity)
        trials = []
        for assignment in found:
            if (trial := await self._begin(assignment, running, results)) is not None:
                trials.append(trial)
            if self._first.stopped is not None:
                break
        if self.options.sequential and trials:
            await asyncio.wait(trials)
        return True

    async def _begin(
        self, waiting: Assignment, running: asyncio.TaskGroup, results: list[TrialResult]
    ) -> asyncio.Task[None] | None:
        """Once there is a place for it. None: it has ended, is another launcher's, or the rollouts have been stopped."""
        await self._slots.acquire()
        trial = None
        try:
            assignment = await self._claimed(waiting, results)
            if assignment is None:
                return None
            begun = await self._first.begin()
            if self._first.stopped is None:
                trial = running.create_task(self._one(assignment, results, begun))
                self._tasks[assignment.trial_id] = trial
                trial.add_done_callback(partial(self._over, assignment.trial_id))
            elif begun.alone:
                self._first.over()
            return trial
        finally:
            if trial is None:
                self._slots.release()

    def _over(self, trial_id: str, trial: asyncio.Task[None]) -> None:
        self._slots.release()
        if self._tasks.get(trial_id) is trial:
            del self._tasks[trial_id]
        if self._others or not self._tasks:
            self._turn_to_others.set()

    async def _claimed(self, waiting: Assignment, results: list[TrialResult]) -> Assignment | None:
        """A trial that is these rollouts' to run. One with a turn on record is not: whoever ran it is gone, and it is ended. Nor
        is one whose group is past its deadline."""
        assignment, trial_id, late = waiting, waiting.trial_id, False
        if self._claims is not None:
            taken = await self._claims.take(waiting.trial.session.group_id or "", waiting.trial)
            assignment, late = replace(waiting, trial=taken.trial, claim=taken.epoch), taken.past_deadline
            if not taken.mine and self._has_no_end(taken.trial.session):
                self._others[trial_id] = assignment, results
                self._waiting.pop(trial_id, None)
                return None
        session = assignment.trial.session
        if session.status == "open" and not session.counts.turns and not late:
            self._waiting[trial_id] = assignment
            return assignment
        self._waiting.pop(trial_id, None)
        if not self._has_no_end(session):
            self._ended(assignment.recorded(), results)
            return None
        try:
            reason = EndReason.INTERRUPTED if session.counts.turns else EndReason.DEADLINE
            self._ended(await self._runner.abandon(assignment, reason), results)
        except ClaimLost:
            self._others[trial_id] = assignment, results
        return None

    def _has_no_end(self, session: Session) -> bool:
        """Raises: Conflict: it is to be scored with its group, and these rollouts score each trial by itself."""
        if is_scored_later(session) and not self._scores.together:
            raise Conflict(
                f"trial {session.trial_id} is to be scored together with its group: all launchers of a run need the same "
                "--group-reward",
                field="group_reward",
            )
        return has_no_end(session)

    async def _anew(self, assignment: Assignment) -> Assignment:
        """With another key, of which what may still run of a lost attempt knows nothing. Raises: ClaimLost."""
        if self._claims is None:
            return assignment
        taken = await self._claims.anew(assignment.trial.session.group_id or "", assignment.trial)
        if not taken.mine and self._has_no_end(taken.trial.session):
            raise ClaimLost(f"trial {assignment.trial_id}: another launcher has taken it over")
        return replace(assignment, trial=taken.trial, claim=taken.epoch)

    async def _until_others_ended(self, running: asyncio.TaskGroup, results: list[TrialResult]) -> None:
        """Until no trial of other launchers is waited for, and every group is scored. A trial of ours that is lost may become one
        of theirs."""
        while self._first.stopped is None and (self._others_of(results) or self._tasks or self._scores.held(results)):
            await self._look_at_others(running, results)
            if not self._tasks:  # none of ours tells whose fault it was, and another launcher may wait for these
                await self._give_up_failed(self._first.let_go(), results)
            if self._tasks:  # one of these may be lost yet
                self._turn_to_others.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._turn_to_others.wait(), OTHERS_S)
            elif self._others_of(results) or self._scores.held(results):
                await asyncio.sleep(OTHERS_S)  # the proxy is asked: nobody tells

    async def _look_at_others(self, running: asyncio.TaskGroup, results: list[TrialResult]) -> None:
        """Trials of other launchers: those that have ended are told of, those of one that has gone are run."""
        for trial_id in self._others_of(results):
            if trial_id in self._others and not self._slots.locked():
                assignment, _ = self._others.pop(trial_id)
                await self._begin(assignment, running, results)

    def _others_of(self, results: list[TrialResult]) -> list[str]:
        """Trials of other launchers that this call of `run` waits for."""
        return [trial_id for trial_id, (_, whose) in self._others.items() if whose is results]

    def _lost(self, trial_id: str) -> None:
        """Another launcher has it."""
        if (trial := self._tasks.get(trial_id)) is not None:
            trial.cancel()

    async def _one(self, assignment: Assignment, results: list[TrialResult], begun: Begun) -> None:
        if await self._played(assignment, results, begun):
            await self._scores.score(assignment.trial.session.group_id or "")

    @contextlib.contextmanager
    def _groups_looked_at(self, running: asyncio.TaskGroup, results: list[TrialResult]) -> Iterator[None]:
        """Meanwhile groups are scored of which the last trial did not end here, or was given up."""

        async def look() -> None:
            while True:
                await asyncio.sleep(OTHERS_S)
                self._scores.look(running, results, self._running)

        looking = running.create_task(look())
        try:
            yield
        finally:
            looking.cancel()

    async def _played(self, assignment: Assignment, results: list[TrialResult], begun: Begun) -> bool:
        """Whether its end was these rollouts' to tell."""
        trial_id = assignment.trial_id
        del self._waiting[trial_id]
        for observer in self._observers:
            observer.trial_started(trial_id)
        self._running[trial_id] = begun.number
        looking = asyncio.create_task(self._until_first_turn(trial_id, begun, results)) if begun.alone else None
        try:
            hold = bool(self.options.stop_after_failures)
            failed = await self._runner.run(
                assignment, lambda result: self._ended(result, results), hold=hold, anew=self._anew
            )
            if failed is None:
                await self._give_up_failed(self._first.reached(begun.number), results)
            else:
                await self._failed_early(failed, begun.number, results)
            return True
        except ClaimLost:
            self._others[trial_id] = assignment, results
            return False
        finally:
            del self._running[trial_id]
            if looking is not None:
                looking.cancel()
                await asyncio.wait({looking})
                if not looking.cancelled():
                    looking.result()

    async def _until_first_turn(self, trial_id: str, begun: Begun, results: list[TrialResult]) -> None:
        try:
            while not await self._has_turned(trial_id):  # noqa: ASYNC110  # the proxy is asked: nobody tells
                await asyncio.sleep(FIRST_TURN_S)
            await self._give_up_failed(self._first.reached(begun.number), results)
        finally:
            self._first.over()

    async def _failed_early(self, failed: FailedTrial, number: int, results: list[TrialResult]) -> None:
        for observer in self._observers:
            observer.trial_failed(failed)
        if not self._first.failed(number, failed):
            return
        for trial_id, later in list(self._running.items()):
            if later > min(self._first.held, default=later) and later != number and await self._has_turned(trial_id):
                await self._give_up_failed(self._first.reached(later), results)
        if self._first.in_a_row >= self.options.stop_after_failures:
            self._first.stop()

    async def _has_turned(self, trial_id: str) -> bool:
        try:
            return bool((await self._client.session(trial_id)).counts.turns)
        except (Gone, NotFound):  # deleted: its end is its runner's to find
            return False

    async def _register(self, plan: Planned, identity: str) -> GroupTrials:
        stop = Stop()
        asked = posted(self._client.create_group(self.options.spec(plan.task, identity)), stop)
        try:
            return await asyncio.shield(asked)
        except Conflict as error:
            if (error.field or "").startswith("fork_of"):
                raise
            if error.field == "group_id":  # somebody else's session has an id of its trials
                raise Conflict(f"{error.message}: give another --run", field=error.field) from None
            raise Conflict(f"{error.message}: its task or its settings have changed; give another --run") from None
        except asyncio.CancelledError:
            stop.told = True
            asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if nobody waits
            self._unanswered.append((plan, asked))  # the proxy may have registered it by now
            raise

    async def _open(self, group: GroupTrials, plan: Planned, results: list[TrialResult]) -> list[Assignment]:
        """The trials that have not ended."""
        self._scores.started(plan, group, results)
        found = []
        for trial in group.trials:
            assignment = Assignment(trial, plan.task, plan.round, group.harness_key)
            if not self._has_no_end(trial.session):
                self._ended(assignment.recorded(), results)
            else:
                found.append(assignment)
                self._waiting[assignment.trial_id] = assignment
        return found

    def _stopped(self, last: FailedTrial) -> RolloutsStopped:
        then = "start the same --run again, which runs them again" if self.options.resumable else "start again"
        return RolloutsStopped(
            f"stopped: {self._first.in_a_row} trials in a row failed before their first turn. The last was "
            f"{last.trial_id}: {last.verdict.detail} (see {last.folder}). Mend that, then {then} (--stop-after-failures)"
        )

    async def _give_up_failed(self, found: Sequence[FailedTrial], results: list[TrialResult]) -> None:
        """To the last of them also where it is cancelled meanwhile: they are held no more, so nobody else ends them."""
        await to_its_end(self._give_up_each(found, results))

    async def _give_up_each(self, found: Sequence[FailedTrial], results: list[TrialResult]) -> None:
        for failed in found:
            try:
                self._ended(await self._runner.give_up(failed), results)
            except ClaimLost:
                self._others[failed.trial_id] = failed.assignment, results

    async def _give_up(self, results: list[TrialResult]) -> None:
        await self._give_up_failed(self._first.let_go(), results)
        await self._abandon_waiting(results)
        for plan, asked in self._unanswered:
            await asyncio.wait({asked})
            if not asked.cancelled() and asked.exception() is None:
                await self._open(asked.result(), plan, results)
        self._unanswered.clear()
        await self._abandon_waiting(results)
        await self._scores.give_up(results)

    async def _abandon_waiting(self, results: list[TrialResult]) -> None:
        for trial_id, assignment in list(self._waiting.items()):
            del self._waiting[trial_id]
            self._ended(await self._runner.abandon(assignment, EndReason.CANCELLED), results)

    def _ended(self, result: TrialResult, results: list[TrialResult]) -> None:
        if self._claims is not None and not self._scores.claims(result.trial_id):
            self._claims.over(result.trial_id)
        if self._scores.holds(result, lambda scored: self._ended(scored, results)):
            for observer in self._observers:
                observer.trial_waits(result)
            return
        results.append(result)
        for observer in self._observers:
            observer.trial_ended(result)

    async def _held_back(
        self, looks: int, full: StoreFull | None, running: asyncio.TaskGroup, results: list[TrialResult]
    ) -> None:
        """No group can be made now: the staleness bound admits none, or the store is full. What the groups in hand wait for may
        be these rollouts' to do."""
        if not self._tasks and self._first.held:  # a later trial would tell whose fault it was, and there can be none
            if self._first.proven or await self._proven_elsewhere():
                await self._give_up_failed(self._first.let_go(), results)
            elif full is None:
                self._first.stop()
        if full is not None or looks % LOOKS == 0:
            why = full.message if full is not None else await self._waits_for()
            for observer in self._observers:
                observer.held_back(why)
            await self._look_at_others(running, results)
        await asyncio.sleep(self._admission.ask_again_s if full is None else FULL_S)  # the proxy is asked: nobody tells

    async def _waits_for(self) -> str:
        return self._admission.waits_for(await self._client.run(self.options.run_id))

    async def _proven_elsewhere(self) -> bool:
        """Whether another launcher's trial, or one of an earlier start, has had a turn."""
        if (await self._client.run(self.options.run_id)).sampled:
            return True
        for trial_id in list(self._others):
            if await self._has_turned(trial_id):
                return True
        return False

    async def _is_registered(self, identity: str) -> bool:
        try:
            await self._client.group(identity)
        except (Forbidden, NotFound):  # a run's own key is told no more of a group that is not there
            return False
        return True

    async def _recorded_in_hand(self) -> int:
        return (await self._client.run(self.options.run_id)).groups.in_hand


def _failed_early(trial: Trial, plan: Planned) -> bool:
    return Assignment(trial, plan.task, plan.round).recorded().failed_early


def first_failure(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first: the rest was cancelled because of it."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
