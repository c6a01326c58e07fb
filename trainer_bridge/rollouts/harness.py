"""Groups on their way: which are registered when, which of their trials run, and what has become of them.

    rollouts = Rollouts(client, runner, GroupOptions("my-run", size=8), admission=Admission(groups_per_step=8))
    results = await rollouts.run(epochs(tasks, 3))

A group is registered when there is a free place for its first trial and the staleness bound admits it. Its id follows from
run, task and round, so rollouts that were killed find their groups again: trials that have ended are not run again, those
that were running are aborted as `interrupted`, those that had not begun are run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, Protocol

from proxy.client import AsyncSteno
from proxy.contracts.errors import Conflict, NotFound
from proxy.contracts.records import Limits, SamplingPolicy
from proxy.contracts.rest import GroupSpec, GroupTrials
from trainer_bridge.rollouts.admission import Admission, InHand
from trainer_bridge.rollouts.outcome import EndReason, TrialResult, recorded_result
from trainer_bridge.rollouts.runner import Assignment, TrialRunner
from trainer_bridge.rollouts.tasks import Task, group_id


@dataclass(frozen=True)
class Planned:
    """A task in one round of a run."""

    task: Task
    round: str


@dataclass(frozen=True)
class GroupOptions:
    """What groups are registered with. resumable: trials that had not begun stay open when the rollouts are cancelled."""

    run_id: str
    size: int
    purpose: Literal["train", "eval"] = "train"
    in_flight: int = 8
    sequential: bool = False
    sampling: SamplingPolicy = field(default_factory=SamplingPolicy)
    limits: Limits = field(default_factory=Limits)
    deadline_s: float | None = None
    resumable: bool = True


class Observer(Protocol):
    """Who is told. Called on the event loop; must not wait."""

    def group_started(self, group: GroupTrials) -> None: ...
    def trial_started(self, trial_id: str) -> None: ...
    def trial_ended(self, result: TrialResult) -> None: ...
    def held_back(self, held: bool) -> None:
        """The staleness bound admits no group now, or does again."""


def epochs(tasks: Sequence[Task], count: int, shuffle_seed: int | None = None) -> Iterator[Planned]:
    """Each task once per epoch. Shuffled: the same seed gives the same order, so that a resumed run goes on in it."""
    for epoch in range(count):
        order = list(tasks)
        if shuffle_seed is not None:
            random.Random(f"{shuffle_seed}:{epoch}").shuffle(order)
        yield from (Planned(task, f"epoch-{epoch}") for task in order)


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
    ) -> None:
        """
        Args:
            in_hand: groups of the run that are not acknowledged yet, for `admission`; default: as the proxy counts them.
        """
        self._client = client
        self._runner = runner
        self.options = options
        self._admission = admission or Admission()
        self._in_hand = in_hand or self._recorded_in_hand
        self._observers = list(observers)
        self._slots = asyncio.Semaphore(1 if options.sequential else options.in_flight)
        self._waiting: dict[str, Assignment] = {}

    async def run(
        self, planned: Iterable[Planned], *, done: Mapping[str, TrialResult] = MappingProxyType({})
    ) -> list[TrialResult]:
        """Run every group of `planned` to its end.

        Args: done: trials known to have ended, by id (`results.ended_trials`); a group of nothing else is not looked up again.
        Returns: results of all trials, in the order in which they ended.
        Cancelled: trials that run are ended as `cancelled`; those that have not begun too, unless the run is resumable.
        Raises: StenoError: the proxy refuses, or can't be reached. OSError: no folder could be made. All that ran has been ended.
        """
        results: list[TrialResult] = []
        try:
            async with asyncio.TaskGroup() as running:
                for plan in planned:
                    identity = group_id(self.options.run_id, plan.task.task_id, plan.round)
                    trials = [f"{identity}.{i}" for i in range(self.options.size)]
                    if all(trial in done for trial in trials):
                        for trial in trials:
                            self._ended(replace(done[trial], earlier=True), results)
                    else:
                        await self._start(plan, identity, running, results)
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            if self._waiting and not self.options.resumable:
                await asyncio.shield(self._give_up(results))
        return results

    async def _start(
        self, plan: Planned, identity: str, running: asyncio.TaskGroup, results: list[TrialResult]
    ) -> None:
        """Register a group and start its trials, each as soon as there is a place for it."""
        async with self._slots:  # a group is not made before its first trial can run: until then it would only grow old
            await self._admitted(identity)
            group = await self._register(plan, identity)
            found = await self._open(group, plan, results)
        trials = []
        for assignment in found:
            await self._slots.acquire()
            trial = running.create_task(self._one(assignment, results))
            trial.add_done_callback(lambda _: self._slots.release())
            trials.append(trial)
        if self.options.sequential and trials:
            await asyncio.wait(trials)

    async def _one(self, assignment: Assignment, results: list[TrialResult]) -> None:
        trial_id = assignment.trial.session.trial_id
        del self._waiting[trial_id]
        for observer in self._observers:
            observer.trial_started(trial_id)
        await self._runner.run(assignment, lambda result: self._ended(result, results))

    async def _register(self, plan: Planned, identity: str) -> GroupTrials:
        options = self.options
        spec = GroupSpec(
            group_id=identity,
            run_id=options.run_id,
            task=dict(plan.task.fields),
            size=options.size,
            deadline_s=options.deadline_s,
            purpose=options.purpose,
            sampling=options.sampling,
            limits=options.limits,
        )
        try:
            group = await self._client.create_group(spec)
        except Conflict as error:
            raise Conflict(f"{error.message}: its task or its settings have changed; give another --run") from None
        for observer in self._observers:
            observer.group_started(group)
        return group

    async def _open(self, group: GroupTrials, plan: Planned, results: list[TrialResult]) -> list[Assignment]:
        """The trials that have not begun. Those that had when earlier rollouts were killed are ended here."""
        found = []
        for trial in group.trials:
            assignment = Assignment(trial, plan.task, plan.round, group.harness_key)
            session = trial.session
            if session.status != "open":
                earlier = recorded_result(session, task_id=plan.task.task_id, round_name=plan.round, earlier=True)
                self._ended(earlier, results)
            elif session.counts.turns:
                self._ended(await self._runner.abandon(assignment, EndReason.INTERRUPTED), results)
            else:
                found.append(assignment)
                self._waiting[session.trial_id] = assignment
        return found

    async def _give_up(self, results: list[TrialResult]) -> None:
        for trial_id, assignment in list(self._waiting.items()):
            del self._waiting[trial_id]
            self._ended(await self._runner.abandon(assignment, EndReason.CANCELLED), results)

    def _ended(self, result: TrialResult, results: list[TrialResult]) -> None:
        results.append(result)
        for observer in self._observers:
            observer.trial_ended(result)

    async def _admitted(self, identity: str) -> None:
        """Until the staleness bound admits this group. One that is on record is in hand already, and must be gone on with."""
        if not self._admission.bounded or await self._is_registered(identity):
            return
        if await self._admission.admits(self._in_hand):
            return
        for observer in self._observers:
            observer.held_back(True)
        while not await self._admission.admits(self._in_hand):  # noqa: ASYNC110  # the proxy is asked: nobody tells
            await asyncio.sleep(self._admission.ask_again_s)
        for observer in self._observers:
            observer.held_back(False)

    async def _is_registered(self, identity: str) -> bool:
        try:
            await self._client.group(identity)
        except NotFound:
            return False
        return True

    async def _recorded_in_hand(self) -> int:
        return (await self._client.run(self.options.run_id)).groups.in_hand


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first: the rest was cancelled because of it."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
