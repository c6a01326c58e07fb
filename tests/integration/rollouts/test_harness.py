"""Rollouts in process, against a real proxy; what runs a command is the test's own, so that it can say when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno.client.client import AsyncClient, Client
from steno.contracts.errors import Conflict, Unreachable
from steno.contracts.records import Session
from steno.contracts.rest import Completion, GroupSpec, GroupTrials
from steno_rollouts.build import Prepared
from steno_rollouts.evaluation import Evaluator, greedy
from steno_rollouts.groups.plan import epochs
from steno_rollouts.tasks.task import group_id
from steno_rollouts.trials import runner
from steno_rollouts.trials.executor import Exit, TrialJob
from tests.integration.rollouts.stand import Stand, prepared, rolled
from tests.support.programs.stack import Stack
from tests.support.waiting import until

Sessions = Callable[[str], list[Session]]


def _name(found: Prepared) -> str:
    return group_id(found.run_id, found.tasks[0].task_id, "epoch-0")


async def test_so_many_trials_run_at_a_time_and_no_more(stack: Stack, tmp_path: Path, sessions: Sessions) -> None:
    stand = Stand(gate=asyncio.Event())
    running = asyncio.create_task(rolled(prepared(stack, tmp_path, "flight", tasks=3, in_flight=4), stand, 2))
    await until(lambda: stand.running == 4)
    stand.gate.set()
    results = await running
    assert stand.most == 4 and len(results) == 12 and {r.reward for r in results} == {1.0}
    assert len({r.group_id for r in results}) == 6 and {r.round for r in results} == {"epoch-0", "epoch-1"}
    assert [s.status for s in sessions("flight")] == ["completed"] * 12


async def test_sequential_is_one_after_the_other_in_order(stack: Stack, tmp_path: Path) -> None:
    stand = Stand()
    results = await rolled(prepared(stack, tmp_path, "sequential", tasks=2, sequential=True), stand)
    assert stand.most == 1 and [r.task_id for r in results] == ["t0", "t0", "t1", "t1"]
    assert stand.started == [r.trial_id for r in results]


async def test_cancelled_rollouts_end_what_runs_and_leave_the_rest_for_the_next_start(
    stack: Stack, tmp_path: Path, sessions: Sessions
) -> None:
    stand = Stand(gate=asyncio.Event())
    found = prepared(stack, tmp_path, "cancelled", group_size=3, in_flight=2)
    running = asyncio.create_task(rolled(found, stand))
    await until(lambda: sum(session.counts.turns for session in sessions("cancelled")) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stand.running == 0
    ends = [(session.status, session.end_reason) for session in sessions("cancelled")]
    assert ends == [("aborted", "cancelled")] * 2 + [("open", None)]
    again = Stand()
    results = await rolled(found, again)
    assert again.started == [sessions("cancelled")[2].trial_id]
    assert [(r.end_reason, r.earlier) for r in results] == [("cancelled", True)] * 2 + [("completed", False)]


async def test_a_run_that_nobody_can_name_leaves_nothing_open(stack: Stack, tmp_path: Path, sessions: Sessions) -> None:
    stand = Stand(gate=asyncio.Event())
    found = prepared(stack, tmp_path, "unnamed", group_size=3, in_flight=1)
    found = Prepared(found.settings.model_copy(update={"run": None}), "unnamed", found.tasks, None)
    running = asyncio.create_task(rolled(found, stand))
    await until(lambda: sum(session.counts.turns for session in sessions("unnamed")) == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [session.end_reason for session in sessions("unnamed")] == ["cancelled"] * 3


@pytest.mark.parametrize(("named", "end"), [(False, "cancelled"), (True, None)])
async def test_a_trial_whose_attempt_can_not_go_on_is_ended_with_the_rest_or_left_for_the_next_start(
    stack: Stack, tmp_path: Path, sessions: Sessions, named: bool, end: str | None
) -> None:
    class Cut(Stand):
        async def run(self, job: TrialJob) -> Exit:
            await super().run(job)
            raise Unreachable("the proxy can't be reached from the sandbox")

    run, stand = f"cut-{named}", Cut()
    found = prepared(stack, tmp_path, run, group_size=2, in_flight=1)
    found = Prepared(found.settings.model_copy(update={"run": run if named else None}), run, found.tasks, None)
    with pytest.raises(Unreachable, match="from the sandbox"):
        await rolled(found, stand)
    assert len(stand.started) == 1 and len(stand.cleared) == (1 if named else 3)
    assert [session.end_reason for session in sessions(run)] == [end] * 2


async def test_a_group_that_is_being_registered_when_they_are_cancelled_is_ended_too(
    stack: Stack, tmp_path: Path, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, answered = AsyncClient.create_group, asyncio.Event()

    async def answered_late(client: AsyncClient, spec: GroupSpec) -> GroupTrials:
        group = await create(client, spec)
        await answered.wait()
        return group

    monkeypatch.setattr(AsyncClient, "create_group", answered_late)
    found = prepared(stack, tmp_path, "registering")
    found = Prepared(found.settings.model_copy(update={"run": None}), "registering", found.tasks, None)
    running = asyncio.create_task(rolled(found, Stand()))
    await until(lambda: len(sessions("registering")) == 2)
    running.cancel()
    await asyncio.sleep(0)
    answered.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [session.end_reason for session in sessions("registering")] == ["cancelled"] * 2


async def test_trials_that_ran_when_their_rollouts_were_killed_are_interrupted_not_repeated(
    stack: Stack, tmp_path: Path, sessions: Sessions
) -> None:
    found = prepared(stack, tmp_path, "killed", group_size=3)
    task = found.tasks[0]
    spec = GroupSpec(group_id=_name(found), run_id="killed", task=dict(task.fields), size=3)
    async with found.client() as steno:  # what rollouts that were killed have left: one has ended, one has begun
        group = await steno.create_group(spec)
        ended, begun, fresh = group.trials
        await steno.complete(ended.session.trial_id, Completion(reward=0.5))
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {begun.api_key}"}, timeout=60) as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        (await http.post(f"{begun.urls['openai']}/chat/completions", json=body)).raise_for_status()
    stand = Stand()
    results = await rolled(found, stand)
    assert stand.started == [fresh.session.trial_id] and begun.session.trial_id in stand.cleared
    by_trial = {r.trial_id: (r.end_reason, r.reward, r.earlier) for r in results}
    assert by_trial == {
        ended.session.trial_id: ("completed", 0.5, True),
        begun.session.trial_id: ("interrupted", None, False),
        fresh.session.trial_id: ("completed", 1.0, False),
    }


async def test_a_trial_is_not_begun_once_its_groups_deadline_has_passed(
    stack: Stack, tmp_path: Path, client: Client, sessions: Sessions
) -> None:
    """It would be late, and trained by nobody: neither when it has waited for a place for so long, nor by the next start."""
    found = prepared(stack, tmp_path, "due", tasks=2, in_flight=1, deadline_s=15.0)
    name = group_id("due", "t1", "epoch-0")
    earlier = client.create_group(
        GroupSpec(group_id=name, run_id="due", task=dict(found.tasks[1].fields), size=2, deadline_s=15.0)
    )
    stand = Stand(gate=asyncio.Event())
    running = asyncio.create_task(rolled(found, stand))
    await until(lambda: len(stand.started) == 1)
    waits = client.group(_name(found)).created_at + 15.0 - time.time()
    await asyncio.sleep(max(0.0, waits) + 0.2)
    assert stand.gate is not None
    stand.gate.set()
    ends = {result.trial_id: (result.end_reason, result.turns) for result in await running}
    late = [trial.session.trial_id for trial in earlier.trials]
    begun, waited = f"{_name(found)}.0", f"{_name(found)}.1"
    assert ends == {begun: ("completed", 1), **dict.fromkeys([waited, *late], ("deadline", 0))}
    assert stand.started == [begun]
    assert [session.status for session in sessions("due")].count("aborted") == 3
    again = [(result.round, result.end_reason) for result in await rolled(found, Stand()) if result.task_id == "t1"]
    assert again == [("epoch-0+1", "completed")] * 2, "of that group nothing had begun"


async def test_an_evaluation_counts_whatever_its_deadline(stack: Stack, tmp_path: Path, client: Client) -> None:
    """No trainer is waited for, and the results have its reward."""
    found = prepared(stack, tmp_path, "late-eval", deadline_s=0.5, purpose="eval")
    spec = {"group_id": _name(found), "run_id": "late-eval", "size": 2, "deadline_s": 0.5, "purpose": "eval"}
    client.create_group(GroupSpec(task=dict(found.tasks[0].fields), **spec))
    await asyncio.sleep(0.7)
    assert [(result.end_reason, result.reward) for result in await rolled(found, Stand())] == [("completed", 1.0)] * 2


async def test_finished_groups_are_not_even_looked_up(stack: Stack, tmp_path: Path) -> None:
    found = prepared(stack, tmp_path, "known")
    results = await rolled(found, Stand())
    async with AsyncClient("http://127.0.0.1:9", retries=0) as nobody:
        again = found.rollouts(nobody, executor=Stand())
        known = await again.run(epochs(found.tasks, 1), done={r.trial_id: r for r in results})
    assert [(r.trial_id, r.reward, r.earlier) for r in known] == [(f"{_name(found)}.{i}", 1.0, True) for i in range(2)]


async def test_an_attempt_is_repeated_only_while_nothing_is_on_record(
    stack: Stack, tmp_path: Path, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SETTLE_S", 0.1)

    async def ran(run: str, stand: Stand) -> Any:
        return (await rolled(prepared(stack, tmp_path, run, group_size=1, retries=2), stand))[0]

    flaky = await ran("flaky", Stand(exits=lambda trial, attempt: Exit(0 if attempt == 3 else 1)))
    assert (flaky.end_reason, flaky.attempts) == ("completed", 3)
    broken = await ran("broken", Stand(exits=lambda trial, attempt: Exit(None, error="agent: No such file")))
    assert (broken.end_reason, broken.attempts, broken.detail) == ("start_failed", 3, "agent: No such file")

    class Fails(Stand):
        async def run(self, job: TrialJob) -> Exit:
            await super().run(job)
            return Exit(1)

    late = Fails(reward=None)
    result = await ran("late", late)
    assert (result.end_reason, result.attempts, result.turns) == ("exit_code", 1, 1)
    assert sessions("late")[0].status == "aborted"


async def test_one_trial_is_brought_to_its_first_turn_before_the_others_begin(stack: Stack, tmp_path: Path) -> None:
    """The first one fails and is left; the second is the first to have a turn, and all others follow while it runs."""
    stand = Stand(gate=asyncio.Event(), exits=lambda trial, attempt: Exit(1 if trial.endswith(".0") else 0))
    running = asyncio.create_task(rolled(prepared(stack, tmp_path, "pilot", group_size=4, in_flight=4), stand))
    await until(lambda: stand.running == 3)
    started = [trial.rsplit(".", 1)[1] for trial in stand.started]
    assert started[:2] == ["0", "1"] and sorted(started[2:]) == ["2", "3"] and stand.most == 3
    stand.gate.set()
    results = await running
    assert sorted(r.end_reason for r in results) == ["completed"] * 3 + ["exit_code"]


async def test_failures_before_a_first_turn_stop_nothing_while_later_trials_have_turns(
    stack: Stack, tmp_path: Path, sessions: Sessions
) -> None:
    """Three fail, and no trial has ended yet: but some of those that run began after them, and have had turns."""
    others_speak = asyncio.Event()

    class Flaky(Stand):
        async def run(self, job: TrialJob) -> Exit:
            if job.trial_id[-1] in "123":
                await others_speak.wait()
                return Exit(1)
            return await super().run(job)

    stand = Flaky(gate=asyncio.Event())
    found = prepared(stack, tmp_path, "flaky-starts", group_size=8, in_flight=8, stop_after_failures=3)
    running = asyncio.create_task(rolled(found, stand))
    await until(lambda: sum(session.counts.turns for session in sessions("flaky-starts")) == 5)
    others_speak.set()
    await until(lambda: [session.end_reason for session in sessions("flaky-starts")].count("exit_code") == 3)
    assert stand.gate is not None
    stand.gate.set()
    results = await running
    assert sorted(r.end_reason for r in results) == ["completed"] * 5 + ["exit_code"] * 3


async def test_a_group_that_failed_as_a_whole_is_made_anew_by_the_next_start(
    stack: Stack, tmp_path: Path, sessions: Sessions
) -> None:
    found = prepared(stack, tmp_path, "anew", stop_after_failures=0)
    burned = await rolled(found, Stand(exits=lambda trial, attempt: Exit(1)))
    assert [(r.end_reason, r.failed_early) for r in burned] == [("exit_code", True)] * 2
    for done in ({}, {r.trial_id: r for r in burned}):
        stand = Stand()
        async with found.client() as client:
            results = await found.rollouts(client, executor=stand).run(epochs(found.tasks, 1), done=done)
        assert [(r.round, r.reward) for r in results] == [("epoch-0+1", 1.0)] * 2
        assert len(stand.started) == (0 if done else 2), "the second start finds it done"
    assert len(sessions("anew")) == 4


async def test_a_session_that_ended_by_itself_keeps_its_reason(stack: Stack, tmp_path: Path, client: Client) -> None:
    class Ends(Stand):
        async def run(self, job: TrialJob) -> Exit:
            await asyncio.to_thread(client.complete, job.trial_id, Completion(status="aborted", end_reason="operator"))
            return Exit(0)

    result = (await rolled(prepared(stack, tmp_path, "itself", group_size=1), Ends()))[0]
    assert (result.status, result.end_reason, result.reward) == ("aborted", "operator", None)


async def test_a_task_that_has_changed_is_a_conflict_and_what_ran_is_ended(
    stack: Stack, tmp_path: Path, sessions: Sessions
) -> None:
    await rolled(prepared(stack, tmp_path, "changed", group_size=1), Stand())
    with pytest.raises(Conflict, match=r"registered already, with other values of: limits .*give another --run"):
        await rolled(prepared(stack, tmp_path, "changed", group_size=1, max_turns=3), Stand())


async def test_an_evaluation_is_greedy_never_trained_and_its_own_for_each_version(
    stack: Stack, tmp_path: Path, client: Client, sessions: Sessions
) -> None:
    found = greedy(prepared(stack, tmp_path, "evaluated", tasks=2, groups_per_step=1, spare_trials=2))
    assert found.settings.trials_of_group == found.settings.group_size
    async with found.client() as steno:
        stand = Stand(reward="0.5")
        evaluator = Evaluator(found.rollouts(steno, executor=stand), found.tasks, every_steps=10)
        assert [step for step in range(25) if evaluator.due(step)] == [0, 10, 20]
        first = await evaluator.run(0, "a/0")
        assert (first.mean, first.scalars()["eval/trials"]) == (0.5, 4.0)
        stand.reward = "1.0"
        assert (await evaluator.run(0, "a/0")).mean == 0.5 and len(stand.started) == 4
        assert (await evaluator.run(0, "b/0")).mean == 1.0
    for session in sessions("evaluated"):
        assert session.group_id is not None
        group = client.group(session.group_id)
        assert group.purpose == "eval" and group.sampling.force == {"temperature": 0.0}
        assert client.turn_page(session.trial_id).items[0].law["temperature"] == 0.0
