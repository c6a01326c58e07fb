"""Trials that change hands: each is told of once, whoever ends it. The proxy and the attempts are the test's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from steno.contracts.records import Counts, Group, Session
from steno.contracts.rest import GroupTrials, Trial
from steno_rollouts.groups import trial_pool
from steno_rollouts.groups.claims import Taken
from steno_rollouts.groups.first_turns import FirstTurns
from steno_rollouts.groups.plan import GroupOptions, Planned
from steno_rollouts.groups.trial_pool import TrialPool
from steno_rollouts.outcome import CommandOutcome, EndReason, TrialResult, recorded_result
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import Exit
from steno_rollouts.trials.play import Assignment
from steno_rollouts.trials.runner import ClaimLost, FailedTrial
from tests.support.waiting import until

Attempt = Callable[[Assignment], Awaitable[FailedTrial | EndReason | None]]
TASK = Task("t", {})


def session(trial_id: str, status: Any = "open", reason: str | None = None) -> Session:
    reward = 1.0 if status == "completed" else None
    return Session(
        trial_id=trial_id, group_id="g", run_id="r", status=status, reward=reward, end_reason=reason or status, created_at=0.0,
        updated_at=0.0, counts=Counts(turns=int(status == "completed")),
    )  # fmt: skip


@dataclass
class Proxy:
    """What is on record, and whose each trial is: of those in `others` another launcher's."""

    trials: dict[str, Session]
    others: set[str] = field(default_factory=set)

    async def session(self, trial_id: str) -> Session:
        return self.trials[trial_id]

    async def take(self, group_id: str, trial: Trial) -> Taken:
        known = self.trials[trial.session.trial_id]
        mine = known.trial_id not in self.others and known.status == "open"
        return Taken(trial.model_copy(update={"session": known}), 1, mine)

    def over(self, trial_id: str) -> None: ...

    @contextlib.asynccontextmanager
    async def kept(self, lost: Callable[[str], None]) -> AsyncIterator[None]:
        self.lost = lost
        yield


@dataclass
class Attempts:
    """In the place of a `TrialRunner`: each trial does what the test says, and posts how it ended where it still may."""

    proxy: Proxy
    plays: dict[str, Attempt] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)

    async def run(
        self, assignment: Assignment, report: Callable[[TrialResult], None], *, hold: bool, anew: Any,
        not_needed: asyncio.Event | None,
    ) -> FailedTrial | None:  # fmt: skip
        self.begun.append(assignment.trial_id)
        try:
            failed = await self.plays[assignment.trial_id](assignment)
        except asyncio.CancelledError:
            report(self._post(assignment.trial_id, EndReason.CANCELLED))
            raise
        if isinstance(failed, FailedTrial):
            return failed
        report(self._post(assignment.trial_id, failed or EndReason.COMPLETED))
        return None

    async def give_up(self, failed: FailedTrial) -> TrialResult:
        return self._post(failed.trial_id, failed.verdict.reason)

    async def abandon(self, assignment: Assignment, reason: EndReason) -> TrialResult:
        return self._post(assignment.trial_id, reason)

    def _post(self, trial_id: str, reason: EndReason) -> TrialResult:
        if trial_id in self.proxy.others:
            raise ClaimLost("another launcher has it")
        self.proxy.trials[trial_id] = session(trial_id, reason.status, reason.value)
        return recorded_result(self.proxy.trials[trial_id], task_id="t", round_name="0", earlier=False)


async def plays_well(assignment: Assignment) -> None: ...


@pytest.fixture(autouse=True)
def looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_pool, "OTHERS_S", 0.01)


def made(size: int, **options: Any) -> tuple[TrialPool, Proxy, Attempts, list[Assignment], FirstTurns]:
    proxy = Proxy({f"g.{n}": session(f"g.{n}") for n in range(size)})
    attempts = Attempts(proxy, dict.fromkeys(proxy.trials, plays_well))
    first = FirstTurns(options.get("stop_after_failures", 0))
    made_pool: Any = TrialPool
    pool = made_pool(proxy, attempts, GroupOptions("r", size, **options), first, [], proxy, None)
    trials = [Trial(session=one, urls={}) for one in proxy.trials.values()]
    group = Group(group_id="g", run_id="r", task={}, size=size, created_at=0.0, trial_ids=list(proxy.trials))
    return pool, proxy, attempts, pool.add(Planned(TASK, "0"), GroupTrials(group=group, trials=trials)), first


def told(pool: TrialPool) -> list[tuple[str, str]]:
    return sorted((one.trial_id, one.end_reason) for one in pool.results)


async def fails(assignment: Assignment) -> FailedTrial:
    return FailedTrial(assignment, CommandOutcome(EndReason.EXIT_CODE), 0.0, 1, Exit(1), Path())


async def test_a_spare_trial_that_had_no_turn_says_nothing_of_those_that_failed() -> None:
    pool, _, attempts, found, first = made(3, stop_after_failures=2)
    first.proven = True

    async def is_stopped(assignment: Assignment) -> EndReason:
        return EndReason.SPARE

    attempts.plays |= {"g.0": fails, "g.1": is_stopped, "g.2": fails}
    async with asyncio.timeout(60), pool.open():
        await _begin_all(pool, found)
    assert first.stopped is not None and told(pool) == [("g.1", "spare")]


async def test_one_that_was_lost_while_it_was_given_up_is_waited_for() -> None:
    pool, proxy, attempts, found, first = made(2, stop_after_failures=5)
    first.proven = True

    attempts.plays["g.0"] = fails
    async with asyncio.timeout(60), pool.open():
        await pool.begin(found[0])
        await until(lambda: first.in_a_row == 1)
        proxy.others = {"g.0"}  # another launcher took it over
        await pool.begin(found[1])  # has its turn: the first one is given up
        await until(lambda: told(pool) == [("g.1", "completed")] and first.in_a_row == 0)
        ending = asyncio.create_task(pool.until_all_ended())
        await asyncio.sleep(0.05)
        assert not ending.done()
        proxy.trials["g.0"] = session("g.0", "completed")
        await ending
    assert told(pool) == [("g.0", "completed"), ("g.1", "completed")]


async def test_one_that_another_launcher_takes_over_and_leaves_again_is_run_again() -> None:
    pool, proxy, attempts, [one], _ = made(1)
    going = asyncio.Event()

    async def hangs_once(assignment: Assignment) -> None:
        if attempts.begun == ["g.0"]:
            await asyncio.Event().wait()
        going.set()

    attempts.plays["g.0"] = hangs_once
    async with asyncio.timeout(60), pool.open():
        await pool.begin(one)
        await until(lambda: attempts.begun == ["g.0"])
        proxy.others = {"g.0"}
        proxy.lost("g.0")
        ending = asyncio.create_task(pool.until_all_ended())
        await asyncio.sleep(0.1)
        assert not ending.done() and attempts.begun == ["g.0"]
        proxy.others = set()  # that one has gone
        await ending
    assert going.is_set() and attempts.begun == ["g.0", "g.0"] and told(pool) == [("g.0", "completed")]


async def test_the_first_trial_lost_before_its_first_step_lets_the_next_one_begin() -> None:
    pool, proxy, attempts, found, first = made(2, stop_after_failures=5)
    async with asyncio.timeout(60), pool.open():
        lost = await pool.begin(found[0])
        proxy.others = {"g.0"}
        proxy.lost("g.0")
        await pool.begin(found[1])
        await until(lambda: told(pool) == [("g.1", "completed")])
        assert lost is not None and lost.cancelled() and attempts.begun == ["g.1"] and first.proven
        proxy.others = set()  # the other launcher has gone
        await pool.until_all_ended()
    assert attempts.begun == ["g.1", "g.0"] and told(pool) == [("g.0", "completed"), ("g.1", "completed")]


async def test_trials_that_others_ended_make_one_that_waits_for_a_place_a_spare_one() -> None:
    """All places here are taken meanwhile."""
    pool, proxy, attempts, found, _ = made(3, needed=2, in_flight=1)
    gate = asyncio.Event()

    async def waits(assignment: Assignment) -> None:
        await gate.wait()

    attempts.plays["g.0"] = waits
    async with asyncio.timeout(60), pool.open():
        beginning = asyncio.create_task(_begin_all(pool, found))
        await until(lambda: attempts.begun == ["g.0"])
        proxy.trials["g.1"] = session("g.1", "completed")
        gate.set()
        await beginning
        await pool.until_all_ended()
    assert attempts.begun == ["g.0"]
    assert told(pool) == [("g.0", "completed"), ("g.1", "completed"), ("g.2", "spare")]


async def _begin_all(pool: TrialPool, found: list[Assignment]) -> None:
    for one in found:
        await pool.begin(one)


async def test_one_that_is_not_needed_is_ended_once_its_launcher_has_gone_though_no_place_is_free() -> None:
    """Its group would wait for it until the rollouts are over."""
    pool, proxy, attempts, found, _ = made(3, needed=1, in_flight=1)
    gate = asyncio.Event()

    async def waits(assignment: Assignment) -> None:
        await gate.wait()

    proxy.others = {"g.0"}
    attempts.plays["g.2"] = waits
    async with asyncio.timeout(60), pool.open():
        for one in found[:2]:
            await pool.begin(one)
        await until(lambda: told(pool) == [("g.1", "completed")])
        other = Assignment(found[2].trial.model_copy(update={"session": session("h.2")}), TASK, "0")
        proxy.trials["h.2"] = other.trial.session.model_copy(update={"group_id": "h"})
        attempts.plays["h.2"] = waits
        ending = asyncio.create_task(_begin_all(pool, [_of_group(other, "h")]))
        await until(lambda: "h.2" in attempts.begun)
        await asyncio.sleep(0.05)
        assert told(pool) == [("g.1", "completed")], "it runs elsewhere"
        proxy.others = set()
        await until(lambda: ("g.0", "spare") in told(pool))
        gate.set()
        await ending
        await pool.begin(found[2])
        await pool.until_all_ended()
    assert told(pool) == [("g.0", "spare"), ("g.1", "completed"), ("g.2", "spare"), ("h.2", "completed")]


def _of_group(assignment: Assignment, group_id: str) -> Assignment:
    known = assignment.trial.session.model_copy(update={"group_id": group_id})
    return replace(assignment, trial=assignment.trial.model_copy(update={"session": known}))
