"""The staleness bound: how many groups are in hand, and what those wait for that may not begin."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steno.client.client import AsyncClient, Client
from steno.contracts.errors import StoreFull
from steno.contracts.records import Session
from steno.contracts.rest import GroupSpec, GroupTrials
from steno.contracts.runs.leases import RunView
from steno_rollouts import harness
from steno_rollouts.calls.patience import PatientClient
from steno_rollouts.groups.plan import epochs
from steno_rollouts.harness import RolloutsStopped
from steno_rollouts.outcome import TrialResult
from steno_rollouts.tasks.task import group_id
from steno_rollouts.trials.executor import Exit
from tests.integration.rollouts.stand import Stand, prepared, rolled
from tests.support.programs.stack import Stack
from tests.support.waiting import until

Sessions = Callable[[str], list[Session]]


async def test_no_more_groups_are_in_hand_than_the_trainer_can_use_in_time(
    stack: Stack, tmp_path: Path, sessions: Sessions
) -> None:
    """B(S+1) = 2 groups are registered; the third waits until the trainer has taken one, however many trials may run."""
    acknowledged = 0

    async def in_hand() -> int:
        return len({session.group_id for session in await asyncio.to_thread(sessions, "bound")}) - acknowledged

    found = prepared(stack, tmp_path, "bound", tasks=4, in_flight=64, groups_per_step=1, max_staleness_steps=1)
    stand = Stand()
    running = asyncio.create_task(rolled(found, stand, in_hand=in_hand))
    await until(lambda: len(stand.started) == 4 and stand.running == 0)
    await asyncio.sleep(1.5)
    assert len(stand.started) == 4 and not running.done()
    acknowledged = 1
    await until(lambda: len(stand.started) == 6)
    acknowledged = 4
    assert len(await running) == 8


async def test_a_runs_own_key_registers_groups_that_the_bound_admits(
    stack: Stack, tmp_path: Path, client: Client
) -> None:
    """Of a group that is not there it is told 403, as of another run's."""
    bound = {"groups_per_step": 1, "max_staleness_steps": 0}
    found = prepared(stack, tmp_path, "own-key", key=client.run_key("own-key"), tasks=2, **bound)
    assert [result.reward for result in await rolled(found, Stand())] == [1.0] * 4


async def test_what_is_in_hand_is_asked_of_the_proxy(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of a scripted engine bring nothing to a trainer: they leave its hand as they end, one after the other. The ledger,
    which gets longer with each policy version, is not read twice a second."""
    asked, run = list[dict[str, bool]](), AsyncClient.run

    async def noted(client: AsyncClient, run_id: str, **which: bool) -> RunView:
        asked.append(which)
        return await run(client, run_id, **which)

    monkeypatch.setattr(AsyncClient, "run", noted)
    stand = Stand(gate=asyncio.Barrier(2))
    found = prepared(stack, tmp_path, "own-bound", tasks=3, in_flight=64, groups_per_step=1, max_staleness_steps=0)
    await rolled(found, stand)
    assert stand.most == 2
    assert len(asked) >= 3 and all(which == {"ledger": False} for which in asked)


async def test_groups_that_killed_rollouts_have_left_are_gone_on_with_whatever_is_in_hand(
    stack: Stack, tmp_path: Path
) -> None:
    found = prepared(stack, tmp_path, "left", tasks=2, groups_per_step=1, max_staleness_steps=0)
    async with found.client() as client:
        for task in found.tasks:
            name = group_id("left", task.task_id, "epoch-0")
            await client.create_group(GroupSpec(group_id=name, run_id="left", task=dict(task.fields), size=2))
        assert (await client.run("left")).groups.in_hand == 2
    async with asyncio.timeout(120):
        assert len(await rolled(found, Stand())) == 4


async def test_held_back_rollouts_say_what_they_wait_for(stack: Stack, tmp_path: Path) -> None:
    told: list[str | None] = []

    class Told:
        def __getattr__(self, name: str) -> Any:
            return told.append if name == "held_back" else lambda *_: None

    held = True

    async def in_hand() -> int:
        return 2 if held else 0

    found = prepared(stack, tmp_path, "waiting", groups_per_step=1, max_staleness_steps=1)
    running = asyncio.create_task(rolled(found, Stand(), in_hand=in_hand, observers=[Told()]))
    await until(lambda: bool(told))
    held = False
    await running
    assert told[0] is not None and "0 groups are started and not yet trained" in told[0] and told[-1] is None


async def test_a_full_store_holds_new_groups_back_and_ends_nothing_that_runs(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it says so. Rollouts of a trainer's own process are told after a while, as they may be what it waits for."""
    monkeypatch.setattr(harness, "FULL_S", 0.01)
    create, refused, told, stand = AsyncClient.create_group, [0], [], Stand(gate=asyncio.Event())

    async def full(client: AsyncClient, spec: GroupSpec) -> GroupTrials:
        if stand.started and refused[0] < 20:
            refused[0] += 1
            raise StoreFull("Redis uses 85% of its memory")
        return await create(client, spec)

    class Told:
        def __getattr__(self, name: str) -> Any:
            return told.append if name == "held_back" else lambda *_: None

    monkeypatch.setattr(PatientClient, "create_group", full)
    monkeypatch.setattr(AsyncClient, "create_group", full)
    found = prepared(stack, tmp_path, "full", tasks=2, stop_after_failures=5)
    async with found.client(patient=True) as client:
        running = asyncio.create_task(
            found.rollouts(client, executor=stand, observers=[Told()]).run(epochs(found.tasks, 1))
        )
        await until(lambda: len(stand.started) == 4)
        assert stand.gate is not None
        stand.gate.set()
        assert ends(await running) == ["t0 completed"] * 2 + ["t1 completed"] * 2
    assert told == ["Redis uses 85% of its memory"] * 20 + [None]
    refused[0] = 0
    found = prepared(stack, tmp_path, "full-bounded", tasks=2)
    with pytest.raises(StoreFull):
        await rolled(found, stand)


def ends(results: list[TrialResult]) -> list[str]:
    return sorted(f"{result.task_id} {result.end_reason}" for result in results)


async def test_the_last_trial_that_may_begin_is_waited_for_by_nobody_once_it_has_failed(
    stack: Stack, tmp_path: Path
) -> None:
    """Whether it was its own fault a later one would tell: but none begins before its group has ended."""
    found = prepared(
        stack, tmp_path, "last-fails", tasks=2, groups_per_step=1, max_staleness_steps=0, stop_after_failures=5
    )
    stand = Stand(exits=lambda trial, attempt: Exit(int(trial == f"{group_id('last-fails', 't0', 'epoch-0')}.1")))
    async with asyncio.timeout(120):
        results = await rolled(found, stand)
    assert ends(results) == ["t0 completed", "t0 exit_code", "t1 completed", "t1 completed"]


@pytest.mark.parametrize(("well", "in_a_row"), [(0, 2), (1, 3)], ids=["from the beginning", "later"])
async def test_failures_stop_rollouts_that_are_held_back_too(
    stack: Stack, tmp_path: Path, sessions: Sessions, well: int, in_a_row: int
) -> None:
    """So many in a row, of whichever groups; fewer where no trial ever had a turn, and no other may begin."""
    run = f"all-fail-{well}"
    found = prepared(stack, tmp_path, run, tasks=4, groups_per_step=1, max_staleness_steps=0, stop_after_failures=3)
    stand = Stand()
    stand.exits = lambda trial, attempt: Exit(int(len(stand.started) > well))
    async with asyncio.timeout(120):
        with pytest.raises(
            RolloutsStopped, match=f"stopped: {in_a_row} trials in a row failed before their first turn"
        ):
            await rolled(found, stand)
    assert len(stand.started) == well + in_a_row
    assert [session.status for session in sessions(run)].count("open") == 2


@pytest.mark.parametrize("held", [1, 0], ids=["held back", "admitted"])
async def test_what_failed_stays_open_where_rollouts_stop_while_a_group_waits_to_begin(
    stack: Stack, tmp_path: Path, sessions: Sessions, held: int
) -> None:
    """It is not given up as where no trial can begin: none will, and no group is made any more."""
    run = f"stopped-{held}"
    found = prepared(stack, tmp_path, run, tasks=3, groups_per_step=1, max_staleness_steps=0, stop_after_failures=2)
    stand, asked = Stand(), itertools.count(1)
    stand.exits = lambda trial, attempt: Exit(int(len(stand.started) > 2))

    async def in_hand() -> int:
        if next(asked) <= 2:
            return 0
        await until(lambda: rollouts._first.stopped is not None and not rollouts._pool._tasks)
        return held

    async with found.client() as client:
        rollouts = found.rollouts(client, executor=stand, in_hand=in_hand)
        with pytest.raises(RolloutsStopped, match="stopped: 2 trials in a row"):
            await rollouts.run(epochs(found.tasks, 1))
    assert Counter(session.status for session in sessions(run)) == {"completed": 2, "open": 2}


async def test_a_full_store_gives_up_nothing_of_what_failed_once_rollouts_have_stopped(
    stack: Stack, tmp_path: Path, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may say so long after it was asked: a launcher waits for a proxy that is away."""
    monkeypatch.setattr(harness, "FULL_S", 0.01)
    create, asked = PatientClient.create_group, itertools.count(1)

    async def full(client: PatientClient, spec: GroupSpec) -> GroupTrials:
        if next(asked) <= 2:
            return await create(client, spec)
        await until(lambda: rollouts._first.stopped is not None and not rollouts._pool._tasks)
        raise StoreFull("Redis uses 85% of its memory")

    monkeypatch.setattr(PatientClient, "create_group", full)
    found = prepared(stack, tmp_path, "stopped-full", tasks=3, stop_after_failures=2)
    stand = Stand()
    stand.exits = lambda trial, attempt: Exit(int(len(stand.started) > 2))
    async with found.client(patient=True) as client:
        rollouts = found.rollouts(client, executor=stand)
        with pytest.raises(RolloutsStopped, match="stopped: 2 trials in a row"):
            await rollouts.run(epochs(found.tasks, 1))
    assert Counter(session.status for session in sessions("stopped-full")) == {"completed": 2, "open": 2}


async def test_failures_in_a_row_count_over_rollouts_that_follow_each_other(stack: Stack, tmp_path: Path) -> None:
    """As those of a trainer that asks for one group at a time."""
    found = prepared(stack, tmp_path, "one-by-one", tasks=3, stop_after_failures=3)
    stand = Stand(exits=lambda trial, attempt: Exit(1))
    async with found.client() as client:
        rollouts = found.rollouts(client, executor=stand)
        one, two, _ = epochs(found.tasks, 1)
        assert ends(await rollouts.run([one])) == ["t0 exit_code", "t0 exit_code"]
        with pytest.raises(RolloutsStopped, match="stopped: 3 trials in a row failed"):
            await rollouts.run([two])
    assert len(stand.started) == 3


async def test_one_rollouts_is_run_once_at_a_time(stack: Stack, tmp_path: Path) -> None:
    """What it counts and claims is of one call. The first one goes on."""
    found = prepared(stack, tmp_path, "twice-at-once", tasks=2)
    one, two = epochs(found.tasks, 1)
    async with found.client() as client:
        rollouts = found.rollouts(client, executor=Stand())
        first = asyncio.create_task(rollouts.run([one]))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="make another Rollouts"):
            await rollouts.run([two])
        assert ends(await first) == ["t0 completed", "t0 completed"]
        assert ends(await rollouts.run([two])) == ["t1 completed", "t1 completed"]
