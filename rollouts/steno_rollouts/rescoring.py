"""New rewards for a recorded run, in a run of their own, which has the recorded turns and samples nothing.

First every trial is scored; where one can't be, nothing is made. Then each group is made, and its trials are completed one by
one: a group is ready when all of them are. Killed on the way it goes on when it is started again: groups are found by their
names, which come of the run, of the group and of the reward function's code, and what has a reward keeps it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from steno.client.client import AsyncClient
from steno.contracts.errors import ConfigError, Conflict, NotFound, StenoError
from steno.contracts.records import Group, Session
from steno.contracts.rest import Completion, GroupSpec
from steno_rollouts.outcome import OWN_REWARD, CommandOutcome
from steno_rollouts.tasks.task import Task, kept_on_record
from steno_rollouts.trials.group_reward import GroupRewardFunction, TrialOfGroup
from steno_rollouts.trials.reward import RECORDED_INPUTS, RecordedTrial, RewardFunction
from steno_rollouts.trials.transcript import read_transcript

T = TypeVar("T")
AT_ONCE = 8
"""Groups that are scored, or made, at a time."""
MOST_FAILURES = 20
"""After so many trials, or groups, that can't be scored, no more are tried. The error names all of these."""
_LONGEST_STEM = 96


class CannotScore(StenoError):
    """Trials or groups that the function could not score: it raised, took too long, gave no finite number. Nothing was made."""

    code = "reward_error"


@dataclass(slots=True)
class RescoredTrial:
    """What is kept of a trial until its group is made: of thousands, so little. completed: as recorded. before: the recorded
    reward. ended: the recorded reason, or status. outcome: what the function says of it; None: it was not asked. earlier: on
    record of the new run already, with `after`."""

    trial_id: str
    completed: bool
    before: float | None
    ended: str
    outcome: CommandOutcome | None = None
    earlier: bool = False
    after: float | None = None


@dataclass(slots=True)
class RescoredGroup:
    """name: of the new group. made: all of it was on record already."""

    group_id: str
    created_at: float
    name: str
    trials: list[RescoredTrial]
    made: bool = False

    @property
    def order_changed(self) -> bool:
        """Whether two of its trials compare otherwise than before."""
        both = [(one.before, one.after) for one in self.trials if one.before is not None and one.after is not None]
        return any(_sign(a - b) != _sign(c - d) for (a, c), (b, d) in combinations(both, 2))


@dataclass
class Rescoring:
    """One run into another.

    into: the new run. function: of single trials, for which `check_inputs` has passed, or of whole groups. tasks: by name; of
    fields that are not on record. purpose: of groups to score. to_score: trials of the groups that are looked at, of which
    `scored` were. made: groups.
    """

    client: AsyncClient
    run_id: str
    into: str
    function: RewardFunction | GroupRewardFunction
    tasks: Mapping[str, Task] = field(default_factory=dict)
    purpose: str = "train"
    groups: list[RescoredGroup] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    to_score: int = 0
    scored: int = 0
    made: int = 0

    async def run(self) -> None:
        """Score everything, then make it, and say that no more comes. Raises: ConfigError, CannotScore, Conflict, StenoError."""
        found = await self._groups()
        failures: list[str] = []
        await _each(found, lambda pair: self._score(*pair, failures))
        if failures:
            what = "groups" if isinstance(self.function, GroupRewardFunction) else "trials"
            raise CannotScore(_named(failures, what), field=self.function.field)
        if not self.groups:
            raise ConfigError(f"--run: run {self.run_id} has no group to score: {self.without()}", field="run")
        self.groups.sort(key=lambda group: group.created_at)
        await _each([group for group in self.groups if not group.made], self._make)
        await self.client.rollouts_over(self.into)

    def line(self) -> str:
        """How far this is, for people."""
        return f"{self.scored} of {self.to_score} trials scored, {self.made} groups made"

    def without(self) -> str:
        """What was left out, in words."""
        return ", ".join(f"{count} {why}" for why, count in sorted(self.left_out.items()))

    async def _groups(self) -> list[tuple[str, str | None]]:
        """Groups to score, and in which state they are in the new run; None: they are not there."""
        view = await self.client.run(self.run_id)
        counted = view.groups if self.purpose == "train" else view.eval_groups
        places = await self.client.groups(self.run_id)
        if not places:
            raise ConfigError(
                f"--run: no group of run {self.run_id!r} is on record; `steno runs list` shows all runs that are",
                field="run",
            )
        code = self.function.digest()
        there = {place.group_id: place.state for place in await self.client.groups(self.into)}
        if strange := [name for name in there if not name.endswith(f".{code}")]:
            raise ConfigError(
                f"--as: run {self.into} has groups, such as {strange[0]}, that the present code of {self.function.where} "
                "did not score; give another name",
                field="as",
            )
        found = []
        for place in places:
            if place.purpose != self.purpose:
                self.left_out[f"groups of purpose {place.purpose}"] += 1
            elif place.state == "running":
                self.left_out["groups that still run"] += 1
            else:
                self.to_score += place.size
                found.append((place.group_id, there.get(self._name(place.group_id, code))))
        listed = sum(place.purpose == self.purpose for place in places)
        if (more := sum(counted.model_dump().values()) - listed) > 0:
            self.left_out["groups that were deleted, or are too old to be listed"] += more
        return found

    def _name(self, group_id: str, code: str | None = None) -> str:
        digest = blake2b(f"{self.into}\0{group_id}".encode(), digest_size=5).hexdigest()
        return f"{group_id[:_LONGEST_STEM]}.{digest}.{code or self.function.digest()}"

    # -- scoring

    async def _score(self, group_id: str, state: str | None, failures: list[str]) -> None:
        name = self._name(group_id)
        try:
            record = await self.client.group(group_id)
        except NotFound:
            self.left_out["groups that were deleted meanwhile"] += 1
            return
        known = {} if state is None else {s.trial_id: s for s in await self._sessions(name)}
        trials = []
        sessions = await self._sessions(group_id)
        for session in sessions:
            if session.status == "open":
                self.left_out["groups that still run"] += 1
                return
            trials.append(_to_score(session, known.get(self._trial(name, session.trial_id))))
        if not any(trial.completed for trial in trials):
            self.left_out["groups of which no trial was completed"] += 1
            return
        task, _, folder = self._task(record)
        waiting = [trial for trial in trials if trial.completed and not trial.earlier]
        if isinstance(self.function, GroupRewardFunction):
            if waiting and len(failures) < MOST_FAILURES:
                await self._ask_together(self.function, group_id, sessions, waiting, task, folder, failures)
        else:
            for trial in waiting:
                if len(failures) < MOST_FAILURES:
                    await self._ask(self.function, trial, task, folder, failures)
        made = state not in (None, "running")
        self.groups.append(RescoredGroup(group_id, record.created_at, name, trials, made))

    async def _sessions(self, group_id: str) -> list[Session]:
        """All of a group's. Raises: ArchiveUnreadable: some can't be read now."""
        return [session async for session in self.client.sessions(group_id=group_id, limit=1000)]

    async def _ask(
        self,
        function: RewardFunction,
        trial: RescoredTrial,
        task: dict[str, Any],
        folder: Path | None,
        failures: list[str],
    ) -> None:
        try:
            takes = function.takes("transcript")
            session = await self.client.session(trial.trial_id) if takes else None
            transcript = None if session is None else await read_transcript(self.client, session)
            trial.outcome = await function(RecordedTrial(task, trial.trial_id, transcript, folder))
        except StenoError as error:
            failures.append(f"{trial.trial_id}: {error.message}")
            return
        trial.after = trial.outcome.reward
        self.scored += 1

    async def _ask_together(
        self, function: GroupRewardFunction, group_id: str, sessions: Sequence[Session], waiting: Sequence[RescoredTrial],
        task: dict[str, Any], folder: Path | None, failures: list[str],
    ) -> None:  # fmt: skip
        """About all trials of a group that were completed, also those that have their new rewards already."""
        completed = [session for session in sessions if session.status == "completed"]
        recorded = not any(OWN_REWARD in session.metrics for session in completed)
        try:
            trials = [await TrialOfGroup.read(self.client, session, recorded=recorded) for session in completed]
            outcomes = await function(group_id, task, folder, trials)
        except StenoError as error:
            failures.append(f"{group_id}: {error.message}")
            return
        for trial in waiting:
            trial.outcome = outcomes[trial.trial_id]
            trial.after = trial.outcome.reward
            self.scored += 1

    def _task(self, record: Group) -> tuple[dict[str, Any], Mapping[str, Any], Path | None]:
        """A group's task as the function gets it, what of it is withheld, and its folder. Raises: ConfigError."""
        recorded = dict(record.task)
        if not self.tasks:
            if not recorded and self.function.needs("task"):
                raise ConfigError(
                    f"{self.function.field}: {self.function.where} takes `task`, and group {record.group_id} has none on "
                    "record: give --tasks",
                    field=self.function.field,
                )
            return {**recorded, **record.withheld}, record.withheld, None
        task = self.tasks.get(str(recorded.get("task_id")))
        if task is None:
            raise ConfigError(
                f"--tasks: no task {recorded.get('task_id')!r}, which group {record.group_id} was made of",
                field="tasks",
            )
        if dict(task.fields) != recorded:
            names = sorted(n for n in {*task.fields, *recorded} if task.fields.get(n) != recorded.get(n))
            raise ConfigError(
                f"--tasks: task {task.task_id!r} differs from the one on record of group {record.group_id} in "
                f"{', '.join(names)} (name a field with --hide if it was hidden then)",
                field="tasks",
            )
        return task.arguments(), task.hidden, task.folder

    # -- making

    @staticmethod
    def _trial(name: str, trial_id: str) -> str:
        """The trial of a new group that scores this one anew."""
        return f"{name}.{trial_id.rpartition('.')[2]}"

    async def _make(self, group: RescoredGroup) -> None:
        record = await self.client.group(group.group_id)
        kept = kept_on_record(self._task(record)[1])
        withheld: dict[str, Any] = {"withheld": kept} if kept else {}
        made = await self.client.create_group(
            GroupSpec(
                group_id=group.name, run_id=self.into, task=record.task, size=record.size, purpose=record.purpose,
                rescore_of=record.group_id, **withheld,
            )
        )  # fmt: skip
        waiting = {trial.session.trial_id for trial in made.trials if trial.session.status == "open"}
        for trial in group.trials:
            name = self._trial(group.name, trial.trial_id)
            if name in waiting:
                waiting.discard(name)
                await self._complete(name, trial)
        for name in waiting:  # the recorded one was deleted
            await self.client.complete(name, _GONE)
        self.made += 1

    async def _complete(self, name: str, trial: RescoredTrial) -> None:
        outcome = trial.outcome
        if outcome is None:
            await self.client.complete(name, Completion(status="aborted", end_reason=trial.ended))
            return
        reason = trial.ended if trial.ended.startswith("limit:") else outcome.reason.value
        try:
            await self.client.complete(
                name, Completion(reward=outcome.reward, end_reason=reason, metrics=outcome.metrics)
            )
        except Conflict as error:
            if error.field != "rescore_of":
                raise
            self.left_out["trials that were deleted meanwhile"] += 1
            trial.after = None
            await self.client.complete(name, _GONE)


def _to_score(session: Session, mine: Session | None) -> RescoredTrial:
    """Args: mine: its trial in the new run, if there is one."""
    completed = session.status == "completed"
    return RescoredTrial(
        session.trial_id, completed, session.reward if completed else None, session.end_reason or session.status,
        earlier=mine is not None and mine.status != "open", after=mine.reward if mine is not None else None,
    )  # fmt: skip


_GONE = Completion(status="aborted", end_reason="deleted")


@dataclass(frozen=True)
class RescoreSummary:
    """What a rescoring did to rewards. Means are None where nothing has a reward. flat: groups whose rewards are all equal."""

    groups: int
    trials: int
    rewards_before: int
    rewards_after: int
    mean_before: float | None
    mean_after: float | None
    flat_before: int
    flat_after: int
    order_changed: int


def summary(groups: Sequence[RescoredGroup]) -> RescoreSummary:
    """Of whole groups, those that were on record already included."""
    before = [[trial.before for trial in group.trials if trial.before is not None] for group in groups]
    after = [[trial.after for trial in group.trials if trial.after is not None] for group in groups]
    return RescoreSummary(
        groups=len(groups), trials=sum(len(group.trials) for group in groups),
        rewards_before=sum(map(len, before)), rewards_after=sum(map(len, after)),
        mean_before=_mean(before), mean_after=_mean(after),
        flat_before=sum(len(set(rewards)) < 2 for rewards in before), flat_after=sum(len(set(rewards)) < 2 for rewards in after),
        order_changed=sum(group.order_changed for group in groups),
    )  # fmt: skip


def check_inputs(function: RewardFunction | GroupRewardFunction, *, with_tasks: bool) -> None:
    """Raises: ConfigError: the function asks for what is not on record."""
    together = isinstance(function, GroupRewardFunction)
    known = ["task", "group_id", "trials"] if together else RECORDED_INPUTS
    of_what = "of a recorded group" if together else "of a recorded trial"
    function.check_inputs([*known, "task_folder"] if with_tasks else known, of_what)


def default_name(run_id: str, function: RewardFunction | GroupRewardFunction) -> str:
    """Of the new run: another one for another function."""
    return f"{run_id[:100]}-rescored-{function.digest()}"


def _mean(rewards: Sequence[Sequence[float]]) -> float | None:
    found = [reward for group in rewards for reward in group]
    return sum(found) / len(found) if found else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _named(failures: Sequence[str], what: str) -> str:
    more = f"; no more than {MOST_FAILURES} are tried" if len(failures) >= MOST_FAILURES else ""
    return f"{len(failures)} {what} can't be scored, so nothing was made{more}:\n" + "\n".join(sorted(failures))


async def _each(items: Sequence[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Do the work for each, some at a time. The first failure cancels the rest."""
    queue = iter(items)

    async def worker() -> None:
        for item in queue:
            await work(item)

    tasks = [asyncio.create_task(worker()) for _ in range(min(AT_ONCE, len(items)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
