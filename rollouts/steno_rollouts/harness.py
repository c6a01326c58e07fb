"""Runs groups: decides when each is registered and which of its trials run, and collects their results.

    rollouts = Rollouts(client, runner, GroupOptions("my-run", size=8), admission=Admission(groups_per_step=8))
    results = await rollouts.run(epochs(tasks, 3))

A group is registered when there is a free place for its first trial and the staleness bound admits it. Its id follows from
run, task and round, so rollouts that were killed find their groups again: trials that have ended are not run again, those
that were running are aborted as `interrupted`, those that had not begun are run. Where several launchers work on one run, each
trial is run by the one that has claimed it, and the others wait for its end (`groups/trial_pool.py`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from steno.client.client import AsyncClient
from steno.contracts.errors import StenoError, StoreFull
from steno.contracts.rest import Trial
from steno_rollouts.calls.posts import to_its_end
from steno_rollouts.groups.admission import Admission, InHand
from steno_rollouts.groups.claims import Claims
from steno_rollouts.groups.first_turns import FirstTurns
from steno_rollouts.groups.plan import GroupOptions, Observer, Planned
from steno_rollouts.groups.registration import Registration
from steno_rollouts.groups.trial_pool import TrialPool
from steno_rollouts.outcome import TrialResult
from steno_rollouts.tasks.task import group_id
from steno_rollouts.trials.group_reward import GroupRewardFunction
from steno_rollouts.trials.play import Assignment
from steno_rollouts.trials.runner import FailedTrial, TrialRunner

FULL_S = 5.0
"""Between two looks at whether a full store takes a new group."""
LOOKS = 10
"""While no group is admitted, each `LOOKS`-th look at the groups in hand also tells observers why, and looks at trials of other
launchers."""


class RolloutsStopped(StenoError):
    """Too many trials failed before their first turn, one after the other."""

    code = "rollouts_stopped"


class Rollouts:
    """Groups of one run. `run` may be called again once it has ended: an evaluation, or another round of the same tasks."""

    def __init__(
        self,
        client: AsyncClient,
        runner: TrialRunner,
        options: GroupOptions,
        *,
        admission: Admission | None = None,
        in_hand: InHand | None = None,
        observers: Sequence[Observer] = (),
        claims: Claims | None = None,
        group_reward: GroupRewardFunction | None = None,
        patient: bool = False,
    ) -> None:
        """
        Args:
            in_hand: groups of the run that are not acknowledged yet, for `admission`; default: as the proxy counts them.
            claims: None: nobody else works on this run.
            group_reward: scores a group's trials together; None: each trial has its own reward.
            patient: new groups wait for room in a full store, and observers are told why; else that ends the rollouts.
        """
        self._client = client
        self._runner = runner
        self.options = options
        self._admission = admission or Admission()
        self._in_hand = in_hand or self._recorded_in_hand
        self._observers = list(observers)
        self._claims = claims
        self._group_reward = group_reward
        self._patient = patient
        self._first = FirstTurns(options.stop_after_failures)
        self._runs = False
        self._registration: Registration
        self._pool: TrialPool

    async def run(
        self, planned: Iterable[Planned], *, done: Mapping[str, TrialResult] = MappingProxyType({})
    ) -> list[TrialResult]:
        """Run every group of `planned` to its end.

        Args: done: trials known to have ended, by id (`results.ended_trials`); a group of nothing else is not looked up again.
        Returns: results of all trials, in the order in which they ended.
        Cancelled: trials that run are ended as `cancelled`; those that have not begun too, unless the run is resumable.
        Raises: RolloutsStopped: too many trials failed before their first turn. Trials that ran have ended; those that failed so
            are open if the run is resumable. StenoError: the proxy refuses, or can't be reached. All that ran has been ended; on
            record, the trial whose attempt raised this is open if the run is resumable, like those that have not begun.
        """
        if self._runs:
            raise RuntimeError(
                "Rollouts.run is called while it runs; make another Rollouts for what is to run beside it"
            )
        self._runs = True
        self._registration = Registration(self._client, self.options)
        self._pool = TrialPool(
            self._client, self._runner, self.options, self._first, self._observers, self._claims, self._group_reward
        )
        try:
            async with self._pool.open():
                await self._run(planned, done)
        except BaseExceptionGroup as errors:
            raise first_failure(errors) from errors
        finally:
            try:
                if self.options.resumable:
                    self._registration.forget()
                else:
                    await to_its_end(self._give_up(), stopping=True)
            finally:
                self._runs = False
        if self._first.stopped is not None:
            raise self._stopped(self._first.stopped)
        return self._pool.results

    async def _run(self, planned: Iterable[Planned], done: Mapping[str, TrialResult]) -> None:
        for plan in planned:
            if self._first.stopped is not None:
                break
            await self._plan(plan, done)
        await self._pool.until_all_ended()
        if self._first.stopped is None:
            await self._pool.give_up(self._first.let_go())
            await self._pool.until_all_ended()

    async def _plan(self, plan: Planned, done: Mapping[str, TrialResult]) -> None:
        """Start a group, or report one that has ended. If all its trials had failed before their first turn before these rollouts
        began, a new group with another name takes its place: the old one says nothing of the policy."""
        for again in itertools.count():
            named = replace(plan, round=f"{plan.round}+{again}") if again else plan
            identity = group_id(self.options.run_id, named.task.task_id, named.round)
            ended = [done.get(f"{identity}.{i}") for i in range(self.options.size)]
            known = [replace(result, earlier=True) for result in ended if result is not None]
            if len(known) < len(ended):
                if await self._start(named, identity):
                    return
            elif not all(result.failed_early for result in known):
                for result in known:
                    self._pool.ended(result)
                return

    async def _start(self, plan: Planned, identity: str) -> bool:
        """Register a group and start its trials, each as soon as there is a place for it. False: it is on record, and all of it
        failed before its first turn."""
        # One that is on record is in hand already, and must be gone on with, also where another launcher has just registered it.
        admitted = not self._admission.bounded or await self._registration.is_registered(identity)
        looks, group = 0, None
        while True:
            # A group is not made before its first trial can run: until then it would only grow old.
            async with self._pool.places:
                full = None
                admits = admitted or await self._admission.admits(self._in_hand)
                if self._first.stopped is not None:  # by a trial that ended meanwhile
                    return True
                if admits:
                    try:
                        group = await self._registration.register(plan, identity)
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
                    found = self._pool.add(plan, group)
                    break
            await self._held_back(looks, full)
            if self._first.stopped is not None:
                return True
            looks += 1
            admitted = not self._admission.bounded or await self._registration.is_registered(identity)
        trials = []
        for assignment in found:
            if (trial := await self._pool.begin(assignment)) is not None:
                trials.append(trial)
            if self._first.stopped is not None:
                break
        if self.options.sequential and trials:
            await asyncio.wait(trials)
        return True

    async def _held_back(self, looks: int, full: StoreFull | None) -> None:
        """No group can be made now: the staleness bound admits none, or the store is full. What the groups in hand wait for may
        be these rollouts' to do."""
        if not await self._pool.settle_failed() and full is None:  # a later trial would tell, and there can be none
            self._first.stop()
        if full is not None or looks % LOOKS == 0:
            why = full.message if full is not None else await self._waits_for()
            for observer in self._observers:
                observer.held_back(why)
            await self._pool.look_at_others()
        await asyncio.sleep(self._admission.ask_again_s if full is None else FULL_S)  # the proxy is asked: nobody tells

    async def _waits_for(self) -> str:
        return self._admission.waits_for(await self._client.run(self.options.run_id, ledger=False))

    async def _recorded_in_hand(self) -> int:
        return (await self._client.run(self.options.run_id, ledger=False)).groups.in_hand

    async def _give_up(self) -> None:
        """What has no end yet gets none later."""
        await self._pool.give_up(self._first.let_go())
        await self._pool.abandon_waiting()
        for plan, group in await self._registration.answered():
            self._pool.add(plan, group)
        await self._pool.abandon_waiting()
        await self._pool.score_none()

    def _stopped(self, last: FailedTrial) -> RolloutsStopped:
        then = "start the same --run again, which runs them again" if self.options.resumable else "start again"
        return RolloutsStopped(
            f"stopped: {self._first.in_a_row} trials in a row failed before their first turn. The last was "
            f"{last.trial_id}: {last.verdict.detail} (see {last.folder}). Mend that, then {then} (--stop-after-failures)"
        )


def _failed_early(trial: Trial, plan: Planned) -> bool:
    return Assignment(trial, plan.task, plan.round).recorded().failed_early


def first_failure(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first: the rest was cancelled because of it."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
