"""Spare trials: a group of which enough trials have a reward does not wait for the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from steno.client.client import Client
from steno.contracts.records import Session
from steno_rollouts.groups import trial_pool
from steno_rollouts.groups.claims import Claims
from steno_rollouts.groups.plan import epochs
from steno_rollouts.trials.containers.launcher import Launcher
from steno_rollouts.trials.executor import Exit, TrialJob
from tests.integration.rollouts.stand import Stand, prepared, rolled
from tests.support.programs.stack import Stack
from tests.support.records.groups import unaccounted
from tests.support.waiting import until

Sessions = Callable[[str], list[Session]]


@dataclass
class Slow(Stand):
    """Trials whose numbers are in `slow` have a turn, and then go on for ever."""

    slow: str = ""
    stopped: list[str] = field(default_factory=list)

    async def run(self, job: TrialJob) -> Exit:
        if job.trial_id[-1] not in self.slow:
            return await super().run(job)
        self.started.append(job.trial_id)
        try:
            await self.ask(job)
            await asyncio.Event().wait()
        finally:
            self.stopped.append(job.trial_id)
        raise AssertionError


@pytest.fixture(autouse=True)
def looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_pool, "OTHERS_S", 0.2)


def ends(found: list[Any]) -> Counter[str]:
    return Counter(f"{one.trial_id[-1]} {one.status} {one.end_reason}" for one in found)


async def test_the_slowest_are_ended_once_enough_have_a_reward(
    stack: Stack, tmp_path: Path, client: Client, sessions: Sessions
) -> None:
    """One that runs, and one that has not begun. Each is told of once, and its tokens are accounted for."""
    stand = Slow(slow="0")
    found = prepared(stack, tmp_path, "spare", spare_trials=2, in_flight=2)
    async with asyncio.timeout(60):
        results = await rolled(found, stand)
    kinds = {"0 aborted spare": 1, "1 completed completed": 1, "2 completed completed": 1, "3 aborted spare": 1}
    assert ends(results) == ends(sessions("spare")) == kinds
    assert [name[-1] for name in stand.started] == ["0", "1", "2"] and len(stand.stopped) == 1
    assert not any(result.failed for result in results) and not list((tmp_path / "work").iterdir())
    view = client.run("spare")
    assert view.groups.running == 0 and unaccounted(view) == {}


async def test_a_trial_without_a_reward_is_replaced(stack: Stack, tmp_path: Path) -> None:
    class Fails(Slow):
        async def run(self, job: TrialJob) -> Exit:
            if not job.trial_id.endswith(".0"):
                return await super().run(job)
            await self.ask(job)
            return Exit(1)

    found = prepared(stack, tmp_path, "replaced", spare_trials=2, in_flight=1)
    async with asyncio.timeout(60):
        results = await rolled(found, Fails(slow="3"))
    assert ends(results) == {
        "0 aborted exit_code": 1, "1 completed completed": 1, "2 completed completed": 1, "3 aborted spare": 1,
    }  # fmt: skip


async def test_a_later_start_does_not_run_what_is_not_needed(stack: Stack, tmp_path: Path, sessions: Sessions) -> None:
    """The first was killed, as far as anyone can see, when two of four had ended."""
    stand = Slow(slow="2")
    first = asyncio.create_task(rolled(prepared(stack, tmp_path, "later", group_size=4, in_flight=1), stand))
    await until(lambda: len(stand.started) == 3)
    first.cancel()
    await asyncio.wait({first})
    assert [one.status for one in sessions("later")] == ["completed", "completed", "aborted", "open"]
    second = Stand()
    async with asyncio.timeout(60):
        results = await rolled(prepared(stack, tmp_path, "later", spare_trials=2), second)
    assert second.started == [] and ends(results)["3 aborted spare"] == 1 and len(results) == 4


async def test_each_launcher_stops_what_it_runs_itself(stack: Stack, tmp_path: Path, sessions: Sessions) -> None:
    """In one folder, whose trials nobody else clears. It learns of the other's trials while all its own places are taken, and
    each trial is told of once by both."""
    stands = Slow(slow="01"), Slow()
    found = prepared(stack, tmp_path, "shared-spare", spare_trials=2, in_flight=2)
    rows = []
    async with asyncio.timeout(60):
        for name, stand in zip(("one", "two"), stands, strict=True):
            rows.append(asyncio.create_task(_as(name, found, stand)))
            await until(lambda stand=stand: len(stand.started) == 2)  # type: ignore[misc]
        results = [await one for one in rows]
    kinds = {"0 aborted spare": 1, "1 aborted spare": 1, "2 completed completed": 1, "3 completed completed": 1}
    assert [ends(found) for found in results] == [kinds, kinds] and ends(sessions("shared-spare")) == kinds
    assert sorted(stands[0].stopped) == sorted(stands[0].started) and stands[1].stopped == []
    assert not set(stands[1].cleared) & set(stands[0].started)


async def _as(name: str, found: Any, stand: Stand) -> list[Any]:
    async with found.client() as client:
        claims = Claims(client, Launcher(f"{name}-host", 1, "1"))
        return await found.rollouts(client, executor=stand, claims=claims).run(epochs(found.tasks, 1))


async def test_one_that_posts_its_end_is_not_stopped(stack: Stack, tmp_path: Path) -> None:
    """Both end at once: the group has one trial more than it needs."""
    found = prepared(stack, tmp_path, "at-once", spare_trials=1, in_flight=3)
    async with asyncio.timeout(60):
        results = await rolled(found, Slow(gate=asyncio.Barrier(3)))
    assert Counter(one.end_reason for one in results)["completed"] >= 2 and len(results) == 3
    assert all((one.end_reason == "completed") == (one.reward == 1.0) for one in results)


async def test_ctrl_c_ends_what_runs_as_cancelled(stack: Stack, tmp_path: Path, sessions: Sessions) -> None:
    """As without spare trials: each is ended and told of, and no agent is left."""
    stand = Slow(slow="012")
    running = asyncio.create_task(
        rolled(prepared(stack, tmp_path, "stopped-spare", spare_trials=1, in_flight=3), stand)
    )
    await until(lambda: len(stand.started) == 3)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled() and len(stand.stopped) == 3
    assert [one.end_reason for one in sessions("stopped-spare")] == ["cancelled"] * 3


async def test_a_group_that_is_scored_together_is_scored_without_its_slowest(
    stack: Stack, tmp_path: Path, sessions: Sessions
) -> None:
    (tmp_path / "score.py").write_text("def rank(trials):\n    return [float(len(trials))] * len(trials)\n")
    found = prepared(
        stack, tmp_path, "together-spare", spare_trials=1, in_flight=3, group_reward=f"{tmp_path / 'score.py'}:rank"
    )
    async with asyncio.timeout(60):
        results = await rolled(found, Slow(slow="1"))
    assert {(one.trial_id[-1], one.reward, one.end_reason) for one in results} == {
        ("0", 2.0, "completed"), ("1", None, "spare"), ("2", 2.0, "completed"),
    }  # fmt: skip
