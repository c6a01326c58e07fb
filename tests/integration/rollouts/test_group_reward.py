"""Groups whose trials are scored together, against a real proxy: once, by one launcher, from what is on record."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno.client.client import Client
from steno.contracts.errors import Conflict, StoreUnavailable
from steno.contracts.records import Session
from steno.contracts.runs.claims import ClaimRequest
from steno_rollouts.build import Prepared
from steno_rollouts.groups import trial_pool
from steno_rollouts.groups.claims import Claims
from steno_rollouts.groups.plan import epochs
from steno_rollouts.outcome import TrialResult
from steno_rollouts.trials.containers.launcher import Launcher
from steno_rollouts.trials.executor import Exit, TrialJob
from tests.integration.rollouts.conftest import Rollout
from tests.integration.rollouts.stand import Stand, prepared, rolled
from tests.support.programs.stack import Stack
from tests.support.records.groups import unaccounted
from tests.support.waiting import until

Sessions = Callable[[str], list[Session]]
SCORES = """
import json, pathlib, time
HERE = pathlib.Path(__file__).parent

def rank(task, group_id, trials):
    told = [[one.trial_id, one.reward, one.end_reason, len(one.transcript.turns), one.transcript.last_reply] for one in trials]
    with (HERE / "told").open("a") as file:
        file.write(json.dumps(told) + "\\n")
    while (HERE / "hold").exists():
        time.sleep(0.02)
    return [{"reward": 1.0 - place, "place": place} for place, _ in enumerate(trials)]

def choose(trials):
    return {one.trial_id: None if one.end_reason == "exit_code" else 0.5 for one in trials}

def broken(trials):
    raise ValueError("no judge")

def short(trials):
    return [1.0]
"""


@pytest.fixture(autouse=True)
def looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_pool, "OTHERS_S", 0.2)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A function that is held when the test is over goes on in its thread until it is let go."""
    (tmp_path / "score.py").write_text(SCORES)
    yield tmp_path
    (tmp_path / "hold").unlink(missing_ok=True)


def told(folder: Path) -> list[list[list[Any]]]:
    """What the function was asked, a list of trials for each call."""
    path = folder / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def scored(stack: Stack, folder: Path, run: str, function: str = "rank", **settings: Any) -> Prepared:
    return prepared(stack, folder, run, group_reward=f"{folder / 'score.py'}:{function}", **settings)


@dataclass
class Ends(Stand):
    """Each trial has its turns, and then ends as it is told to."""

    async def run(self, job: TrialJob) -> Exit:
        self.started.append(job.trial_id)
        for _ in range(self.turns):
            await self.ask(job)
        return self.exits(job.trial_id, 1)


async def test_a_group_waits_until_all_have_ended_and_gets_its_rewards_together(
    stack: Stack, folder: Path, client: Client, sessions: Sessions
) -> None:
    """The own rewards are told to the function, and stay as a metric."""
    go = asyncio.Event()

    class HoldsTheLast(Ends):
        async def run(self, job: TrialJob) -> Exit:
            ended = await super().run(job)
            (job.workdir / "reward.txt").write_text("0.25")
            if job.trial_id.endswith(".1"):
                await go.wait()
            return ended

    running = asyncio.create_task(rolled(scored(stack, folder, "together", in_flight=1), HoldsTheLast()))
    await until(lambda: sum(session.counts.turns for session in sessions("together")) == 2)
    waiting, other = sessions("together")
    assert (waiting.status, waiting.awaits_reward, waiting.reward) == ("completed", True, None)
    assert other.status == "open" and client.run("together").groups.running == 1 and told(folder) == []
    go.set()
    results = await running
    assert [(one.trial_id[-2:], one.reward, one.end_reason) for one in results] == [
        (".0", 1.0, "completed"), (".1", 0.0, "completed"),
    ]  # fmt: skip
    recorded = sessions("together")
    assert told(folder) == [[[one.trial_id, 0.25, "completed", 1, "hello"] for one in recorded]]
    for place, session in enumerate(recorded):
        assert (session.reward, session.awaits_reward) == (1.0 - place, False)
        assert (session.metrics["own_reward"], session.metrics["place"]) == (0.25, place)
        assert session.metrics["rollout/wall_s"] == results[place].metrics["rollout/wall_s"]
    view = client.run("together")
    assert view.groups.running == 0 and unaccounted(view) == {}
    assert not list((folder / "work").iterdir()), "they have not failed"
    assert [one.detail for one in results] == ["", ""]


@pytest.mark.parametrize(
    ("function", "said"),
    [("broken", "score.py:broken raised ValueError: no judge"), ("short", "must be a list of 2 rewards, or a dict")],
)
async def test_a_function_that_fails_leaves_its_group_unscored_and_waited_for_by_nobody(
    stack: Stack, folder: Path, client: Client, sessions: Sessions, function: str, said: str
) -> None:
    results = await rolled(scored(stack, folder, function, function), Stand())
    assert [(one.reward, one.end_reason) for one in results] == [(None, "reward_error")] * 2
    assert all(said in one.detail for one in results)
    assert [(one.status, one.awaits_reward) for one in sessions(function)] == [("completed", False)] * 2
    view = client.run(function)
    assert view.groups.running == 0 and unaccounted(view) == {}


async def test_what_failed_after_its_first_turn_is_scored_too_unless_the_function_says_nothing(
    stack: Stack, folder: Path, sessions: Sessions
) -> None:
    ends = {"0": Exit(0), "1": Exit(1), "2": Exit(-15, timed_out=True)}
    stand = Ends(exits=lambda trial, _: ends[trial[-1]])
    results = {
        one.trial_id[-1]: one for one in await rolled(scored(stack, folder, "ends", "choose", group_size=3), stand)
    }
    assert {name: (one.status, one.end_reason, one.reward) for name, one in results.items()} == {
        "0": ("completed", "completed", 0.5), "1": ("aborted", "exit_code", None), "2": ("completed", "timeout", 0.5),
    }  # fmt: skip

    class Silent(Ends):
        async def run(self, job: TrialJob) -> Exit:
            if job.trial_id.endswith(".2"):
                (job.workdir / "reward.txt").write_text("0.75")
            return await super().run(job)

    silent = Silent(turns=0, exits=lambda trial, _: ends[trial[-1]])
    none = await rolled(scored(stack, folder, "silent", "choose", group_size=3, stop_after_failures=0), silent)
    assert not any("own_reward" in one.metrics for one in none), "a file does not count without a turn"
    assert {one.trial_id[-1]: (one.status, one.reward) for one in none} == {
        "0": ("completed", 0.5), "1": ("aborted", None), "2": ("aborted", None),
    }  # fmt: skip


async def test_a_trial_that_its_limit_ended_is_scored_with_the_others(
    stack: Stack, folder: Path, sessions: Sessions
) -> None:
    class Asks(Stand):
        async def ask(self, job: TrialJob) -> None:
            with contextlib.suppress(AssertionError):  # the second one is refused
                await super().ask(job)

    results = await rolled(scored(stack, folder, "limit", max_turns=1), Asks(turns=2))
    assert [one.end_reason for one in results] == ["limit:max_turns"] * 2
    assert sorted(one.reward for one in results) == [0.0, 1.0]
    assert [one[2] for one in told(folder)[0]] == ["limit:max_turns"] * 2


async def test_a_trial_whose_agent_still_runs_after_its_limit_is_waited_for(
    stack: Stack, folder: Path, sessions: Sessions
) -> None:
    """What it was worth alone is not known before."""
    go = asyncio.Event()

    class Lingers(Stand):
        async def run(self, job: TrialJob) -> Exit:
            lingers = job.trial_id.endswith(".0")
            self.turns = 2 if lingers else 1
            with contextlib.suppress(AssertionError):  # the second turn is refused
                await super().run(job)
            (job.workdir / "reward.txt").write_text("0.25" if lingers else "0.5")
            if lingers:
                await go.wait()
            return Exit(0)

    running = asyncio.create_task(rolled(scored(stack, folder, "lingers", max_turns=1), Lingers()))
    await until(lambda: [one.awaits_reward for one in sessions("lingers")] == [True, True])
    await asyncio.sleep(1.0)
    assert told(folder) == [] and not running.done()
    go.set()
    assert sorted(one.reward or 0.0 for one in await running) == [0.0, 1.0]
    assert [one[1:3] for one in told(folder)[0]] == [[0.25, "limit:max_turns"], [0.5, "completed"]]


async def test_rollouts_that_end_before_a_group_is_scored_leave_that_to_the_next_start(
    stack: Stack, folder: Path, sessions: Sessions
) -> None:
    """Its agents are not run again."""
    (folder / "hold").touch()
    stand = Stand()
    running = asyncio.create_task(rolled(scored(stack, folder, "later"), stand))
    await until(lambda: len(told(folder)) == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [one.awaits_reward for one in sessions("later")] == [True, True]
    (folder / "hold").unlink()
    again = Stand()
    results = await rolled(scored(stack, folder, "later"), again)
    assert again.started == [] and len(told(folder)) == 2 and told(folder)[0] == told(folder)[1]
    assert {one.trial_id: one.reward for one in results} == {one.trial_id: one.reward for one in sessions("later")}
    assert sorted(one.reward for one in sessions("later")) == [0.0, 1.0]
    assert all(one.wall_s == round(one.metrics["rollout/wall_s"], 3) > 0 for one in results), "as it is on record"


async def test_without_a_name_nobody_goes_on_with_a_run_so_that_its_groups_wait_for_nothing(
    stack: Stack, folder: Path, client: Client
) -> None:
    (folder / "hold").touch()
    found = scored(stack, folder, "anonymous")
    found = replace(found, settings=found.settings.model_copy(update={"run": None}))
    running = asyncio.create_task(rolled(found, Stand()))
    await until(lambda: len(told(folder)) == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (folder / "hold").unlink()
    assert client.run("anonymous").groups.running == 0


async def launched(
    stack: Stack, folder: Path, client: Client, run: str, stand: Stand, name: str, ttl_s: float = 60.0, **settings: Any
) -> list[TrialResult]:
    """With the run's key, which is what most have. ttl_s: of its claims, which nobody is to lose where it is long."""
    found = scored(stack, folder, run, key=client.run_key(run), **settings)
    async with found.client() as client:
        claims = Claims(client, Launcher(f"{name}-host", 1, "1"), ttl_s)
        return await found.rollouts(client, executor=stand, claims=claims).run(epochs(found.tasks, 1))


async def test_launchers_that_share_a_group_score_it_once_and_all_tell_of_it(
    stack: Stack, folder: Path, client: Client, sessions: Sessions
) -> None:
    run, barrier = "shared-group", asyncio.Barrier(3)
    stands = [Stand(gate=barrier) for _ in range(3)]
    one_each = {"in_flight": 1, "group_size": 3}
    found = await asyncio.gather(
        *(
            launched(stack, folder, client, run, stand, name, **one_each)
            for stand, name in zip(stands, "abc", strict=True)
        )
    )
    assert [len(stand.started) for stand in stands] == [1, 1, 1] and len(told(folder)) == 1
    recorded = {one.trial_id: one.reward for one in sessions(run)}
    assert list(recorded.values()) == [1.0, 0.0, -1.0]
    assert [{one.trial_id: one.reward for one in results} for results in found] == [recorded] * 3


async def test_a_launcher_that_has_gone_while_it_scored_is_taken_over_from(
    stack: Stack, folder: Path, client: Client, sessions: Sessions
) -> None:
    run = "gone-judge"
    (folder / "hold").touch()
    gone = asyncio.create_task(launched(stack, folder, client, run, Stand(), "a", ttl_s=3.0))
    await until(lambda: len(told(folder)) == 1)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    (folder / "hold").unlink()
    results = await launched(stack, folder, client, run, Stand(), "b")
    assert len(told(folder)) == 2, "once its claim has run out"
    assert {one.trial_id: one.reward for one in results} == {one.trial_id: one.reward for one in sessions(run)}


async def test_a_group_of_which_the_last_trial_was_interrupted_is_scored_by_the_next_start(
    stack: Stack, folder: Path, client: Client, sessions: Sessions
) -> None:
    run, go, settings = "interrupted-last", asyncio.Event(), {"group_size": 3, "in_flight": 1}

    class HoldsTheSecond(Ends):
        async def run(self, job: TrialJob) -> Exit:
            ended = await super().run(job)
            if job.trial_id.endswith(".1"):
                await go.wait()
            return ended

    running = asyncio.create_task(rolled(scored(stack, folder, run, **settings), HoldsTheSecond()))
    await until(lambda: sum(session.counts.turns for session in sessions(run)) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    first, _, last = sessions(run)
    [claim] = client.claim(first.group_id or "", ClaimRequest(launcher="killed", trial_ids=[last.trial_id], ttl_s=1))
    headers = {"authorization": f"Bearer {claim.trial.api_key}"}
    body = {"model": "m", "messages": [{"role": "user", "content": "of an agent that was killed"}]}
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        assert (await http.post(f"{claim.trial.urls['openai']}/chat/completions", json=body)).is_success
    again = Stand()
    results = {one.trial_id[-1]: one for one in await rolled(scored(stack, folder, run, **settings), again)}
    assert {name: (one.end_reason, one.reward) for name, one in results.items()} == {
        "0": ("completed", 1.0), "1": ("cancelled", None), "2": ("interrupted", None),
    }  # fmt: skip
    assert again.started == [] and len(told(folder)) == 1


async def test_a_group_of_which_the_last_trial_had_no_turn_is_scored(
    stack: Stack, folder: Path, sessions: Sessions
) -> None:
    """It is held, and given up once it is known that the fault is its own."""
    stand = Stand(exits=lambda trial, _: Exit(1) if trial.endswith(".0") else Exit(0))
    results = {
        one.trial_id[-1]: one
        for one in await rolled(scored(stack, folder, "no-turn", "choose", stop_after_failures=5, in_flight=1), stand)
    }
    assert {name: (one.status, one.reward) for name, one in results.items()} == {
        "0": ("aborted", None),
        "1": ("completed", 0.5),
    }


async def test_rollouts_that_failed_may_be_run_again(stack: Stack, folder: Path, sessions: Sessions) -> None:
    """As an evaluation every so many steps, of which one meets a proxy that is away: with the same object."""

    class Fails(Stand):
        async def run(self, job: TrialJob) -> Exit:
            if job.trial_id.endswith(".1") and not told(folder) and len(self.started) == 1:
                self.started.append("failed")
                raise StoreUnavailable("away")
            return await super().run(job)

    found = scored(stack, folder, "again", in_flight=1)
    async with found.client() as client:
        rollouts = found.rollouts(client, executor=Fails())
        with pytest.raises(StoreUnavailable):
            await rollouts.run(epochs(found.tasks, 1))
        assert [(one.status, one.awaits_reward) for one in sessions("again")] == [("completed", True), ("open", False)]
        async with asyncio.timeout(60):
            results = await rollouts.run(epochs(found.tasks, 1))
    assert (
        sorted((one.trial_id[-1], one.reward) for one in results) == [("0", 1.0), ("1", 0.0)] and len(told(folder)) == 1
    )


async def test_a_start_that_scores_each_trial_by_itself_is_refused_and_harms_nothing(
    stack: Stack, folder: Path, sessions: Sessions
) -> None:
    (folder / "hold").touch()
    running = asyncio.create_task(rolled(scored(stack, folder, "otherwise"), Stand()))
    await until(lambda: len(told(folder)) == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(Conflict, match="all launchers of a run need the same --group-reward") as refused:
        await rolled(prepared(stack, folder, "otherwise"), Stand())
    assert refused.value.field == "group_reward" and [one.awaits_reward for one in sessions("otherwise")] == [
        True,
        True,
    ]


@pytest.mark.parametrize(("which", "asked"), [("first", 1), ("last", 2)])
async def test_a_trial_that_is_deleted_is_missed_by_nobody(
    stack: Stack, folder: Path, client: Client, sessions: Sessions, which: str, asked: int
) -> None:
    """The one that ended last is the one by which its group is scored: without it, the function is asked about the rest."""
    run = f"deleted-{which}"
    (folder / "hold").touch()
    running = asyncio.create_task(rolled(scored(stack, folder, run, group_size=3), Stand()))
    await until(lambda: len(told(folder)) == 1)
    in_order = sorted(sessions(run), key=lambda one: (one.ended_at or 0.0, one.trial_id))
    gone = in_order[0 if which == "first" else -1].trial_id
    client.delete(gone)
    (folder / "hold").unlink()
    results = {one.trial_id: one for one in await running}
    assert results.pop(gone).end_reason == "deleted" and len(told(folder)) == asked
    places = [one[0] for one in told(folder)[-1]]
    assert {name: one.reward for name, one in results.items()} == {name: 1.0 - places.index(name) for name in results}


def test_the_command_writes_a_line_once_a_trial_is_scored(rollout: Rollout, sessions: Sessions) -> None:
    (rollout.folder / "score.py").write_text(SCORES)
    code = (
        "import json, os, urllib.request\n"
        "body = json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': 'hi'}]}).encode()\n"
        "headers = {'content-type': 'application/json', 'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()\n"
    )
    said = rollout(
        rollout.tasks({"id": "t"}), "--run", "cli-together", "--group-size", "2",
        "--group-reward", f"{rollout.folder / 'score.py'}:rank", command=["python3", "-c", code],
    )  # fmt: skip
    assert "2/2 trials" in said and "mean reward 0.500" in said and "0 failed" in said
    rows = {row["trial_id"]: row["reward"] for row in rollout.rows()}
    assert rows == {one.trial_id: one.reward for one in sessions("cli-together")} and sorted(rows.values()) == [
        0.0,
        1.0,
    ]
    assert all("awaits_reward" not in row for row in rollout.rows())
