"""Several launchers on one run: each trial is run by one of them, once; what one leaves behind, another one ends or runs."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno.client.client import Client
from steno.contracts.errors import Conflict
from steno.contracts.records import Session
from steno.contracts.rest import Completion
from steno_rollouts.build import Prepared
from steno_rollouts.groups.admission import InHand
from steno_rollouts.groups.claims import Claims
from steno_rollouts.groups.plan import epochs
from steno_rollouts.outcome import CommandOutcome, EndReason, TrialResult
from steno_rollouts.trials.containers.launcher import Launcher
from steno_rollouts.trials.executor import Exit, TrialJob
from steno_rollouts.trials.play import Assignment, Player
from tests.integration.rollouts.conftest import Rollout
from tests.integration.rollouts.stand import Stand, prepared
from tests.support.programs.stack import Stack
from tests.support.records.groups import unaccounted
from tests.support.waiting import until

Sessions = Callable[[str], list[Session]]
AGENT = """
import json, os, pathlib, time, urllib.request
folder = pathlib.Path(os.environ["STENO_TASK_DATA"])
with (folder / "ran").open("a") as ran:
    ran.write(os.environ["STENO_TRIAL_ID"] + "\\n")
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
urllib.request.urlopen(asked, timeout=60).read()
while (folder / "hold").exists():
    time.sleep(0.05)
pathlib.Path("reward.txt").write_text("1")
"""


def test_two_launchers_share_a_run_and_one_takes_over_what_the_other_leaves(
    rollout: Rollout, client: Client, sessions: Sessions
) -> None:
    """In one folder. One is killed in the middle: what it ran is interrupted, nothing runs twice, every group is whole."""
    run, hold = "shared", rollout.folder / "hold"
    hold.touch()
    (rollout.folder / "agent.py").write_text(AGENT)
    tasks = rollout.tasks(*({"id": f"t{number}", "data": str(rollout.folder)} for number in range(5)))
    other = Rollout(rollout.stack, rollout.folder)
    options = ("--run", run, "--group-size", "2", "--in-flight", "2", "--confine", "off", "--purpose", "train")
    command = [sys.executable, "-I", str(rollout.folder / "agent.py")]
    with rollout.start(tasks, *options, command=command) as one, other.start(tasks, *options, command=command) as two:
        limit = time.monotonic() + 120
        while sum(session.counts.turns for session in sessions(run)) < 4:
            assert time.monotonic() < limit and one.poll() is None and two.poll() is None
            time.sleep(0.1)
        one.send_signal(signal.SIGKILL)
        one.wait()
        hold.unlink()
        said = two.communicate(timeout=120)[1]
        assert two.returncode == 0, said
    found = sessions(run)
    ends = sorted((session.status, session.end_reason, session.counts.turns) for session in found)
    assert ends == [("aborted", "interrupted", 1)] * 2 + [("completed", "completed", 1)] * 8, said
    ran = (rollout.folder / "ran").read_text().split()
    assert sorted(ran) == sorted(session.trial_id for session in found), "each once"
    view = client.run(run)
    assert view.rollouts_over and (view.groups.running, view.groups.empty) == (0, 5), "a script spoke: nothing to train"
    assert sum(view.sampled.values()) > 0 and unaccounted(view) == {}
    assert {row["trial_id"] for row in rollout.rows()} == set(ran)


def test_a_trial_that_its_limit_ended_while_its_launcher_was_killed_is_ended_by_the_next_start(
    rollout: Rollout, sessions: Sessions
) -> None:
    """Nobody else posts its reward, and a group of trainable trials would wait for that, for ever without a deadline."""
    run, hold = "killed-at-its-limit", rollout.folder / "hold"
    hold.touch()
    ask = "urllib.request.urlopen(asked, timeout=60).read()\n"
    again = f"try: {ask}except urllib.error.HTTPError: (folder / 'refused').touch()\n"
    (rollout.folder / "agent.py").write_text(AGENT.replace(ask, ask + again))
    tasks = rollout.tasks({"id": "t", "data": str(rollout.folder)})
    options = ("--run", run, "--group-size", "1", "--max-turns", "1", "--confine", "off")
    command = [sys.executable, "-I", str(rollout.folder / "agent.py")]
    with rollout.start(tasks, *options, command=command) as killed:
        limit = time.monotonic() + 120
        while not (rollout.folder / "refused").exists():
            assert time.monotonic() < limit and killed.poll() is None
            time.sleep(0.1)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    [left] = sessions(run)
    assert (left.status, left.end_reason, left.awaits_reward) == ("completed", "limit:max_turns", True)
    rollout(tasks, *options, command=command, code=1)
    [ended] = sessions(run)
    assert (ended.status, ended.end_reason, ended.awaits_reward) == ("aborted", "limit:max_turns", False)
    assert len((rollout.folder / "ran").read_text().split()) == 1


async def test_a_launcher_that_no_longer_renews_is_taken_over_from_and_told_so(
    stack: Stack, tmp_path: Path, sessions: Sessions
) -> None:
    """A trial without a turn is run again, one with a turn is interrupted; neither its agent nor its end come on record."""
    run = "partition"
    gate = asyncio.Event()
    stuck = Stuck(gate=gate)
    lost = asyncio.create_task(launched(stack, tmp_path / "a", run, stuck, Silent))
    await until(lambda: len(stuck.started) == 2 and sum(session.counts.turns for session in sessions(run)) == 1)
    stand = Stand()
    found = {result.trial_id[-1]: result for result in await launched(stack, tmp_path / "b", run, stand, Claims)}
    assert (found["0"].end_reason, found["1"].end_reason) == ("interrupted", "completed")
    assert [trial_id[-1] for trial_id in stand.started] == ["1"]
    gate.set()
    results = {result.trial_id[-1]: result for result in await lost}
    assert {name: (result.end_reason, result.earlier) for name, result in results.items()} == {
        "0": ("interrupted", False), "1": ("completed", False),
    }  # fmt: skip
    assert stuck.refused == 403, "the key of its agent opens nothing any more"
    assert [(session.status, session.counts.turns) for session in sessions(run)] == [("aborted", 1), ("completed", 1)]


async def test_a_trial_that_is_deleted_ends_alone(
    stack: Stack, tmp_path: Path, client: Client, sessions: Sessions
) -> None:
    """Not the launcher that runs it, nor the group's other trials: their claims are renewed, and nobody takes them over. The
    launcher has the run's key, which is what most have."""
    run, gate, settings = (
        "deleted-one",
        asyncio.Event(),
        {"group_size": 4, "in_flight": 3, "key": client.run_key("deleted-one"), "ttl_s": 20.0},
    )
    stand, other = Stand(gate=gate), Stand()
    one = asyncio.create_task(launched(stack, tmp_path / "a", run, stand, Claims, **settings))
    await until(lambda: len(stand.started) == 3 and sum(session.counts.turns for session in sessions(run)) == 3)
    runs, waits = sessions(run)[0].trial_id, sessions(run)[3].trial_id
    for trial_id in (runs, waits):
        client.delete(trial_id)
    two = asyncio.create_task(launched(stack, tmp_path / "b", run, other, Claims, **settings))
    await asyncio.sleep(40.0)  # twice as long as a claim lasts
    assert not one.done()
    gate.set()
    for results in (await one, await two):
        ends = {result.trial_id: result.end_reason for result in results}
        assert ends.pop(runs, "deleted") == ends.pop(waits, "deleted") == "deleted"
        assert list(ends.values()) == ["completed"] * 2
    assert other.started == []


async def test_groups_that_wait_for_a_launcher_that_has_gone_hold_nobody_back_for_ever(
    stack: Stack, tmp_path: Path, sessions: Sessions
) -> None:
    """No other group is admitted before its trials have ended, and these nobody else runs."""
    run, gate = "gone", asyncio.Event()
    stuck = Stuck(gate=gate)
    lost = asyncio.create_task(launched(stack, tmp_path / "a", run, stuck, Silent))
    await until(lambda: len(stuck.started) == 2)
    bound = {"tasks": 2, "groups_per_step": 1, "max_staleness_steps": 0, "in_flight": 1}
    async with asyncio.timeout(120):
        results = await launched(stack, tmp_path / "b", run, Stand(), Claims, **bound)
    assert sorted((one.task_id, one.end_reason) for one in results) == [
        ("t0", "completed"), ("t0", "interrupted"), ("t1", "completed"), ("t1", "completed"),
    ]  # fmt: skip
    gate.set()
    await lost


async def test_launchers_whose_last_trials_have_failed_do_not_wait_for_each_other(
    stack: Stack, tmp_path: Path, sessions: Sessions
) -> None:
    """Each holds a trial that failed before its first turn, until a later one of its own would tell whose fault that was."""
    run, both = "both-fail", asyncio.Barrier(2)

    class Fails(Stand):
        async def run(self, job: TrialJob) -> Exit:
            self.started.append(job.trial_id)
            await both.wait()
            return Exit(1)

    stands = [Fails(), Fails()]
    async with asyncio.timeout(120):
        found = await asyncio.gather(
            *(
                launched(stack, tmp_path / name, run, stand, Claims, in_flight=1, stop_after_failures=5)
                for name, stand in zip("ab", stands, strict=True)
            )
        )
    assert [len(stand.started) for stand in stands] == [1, 1]
    assert [[result.end_reason for result in results] for results in found] == [["exit_code"] * 2] * 2
    assert [session.status for session in sessions(run)] == ["aborted"] * 2


async def test_a_launcher_joins_a_group_that_another_one_registered_before_it(
    stack: Stack, tmp_path: Path, sessions: Sessions
) -> None:
    """Both come to it unregistered, and the bound admits one group. The one that registers it dies; the other goes on with it."""
    run, gate = "both-at-once", asyncio.Event()
    bound = {"groups_per_step": 1, "max_staleness_steps": 0, "in_flight": 1}
    stuck, stand = Stuck(gate=gate), Stand()
    full = asyncio.Event()

    async def in_hand() -> int:
        """As the other launcher sees it: it looks once this one has the group, and its first trial a turn."""
        full.set()
        await until(lambda: any(session.counts.turns for session in sessions(run)))
        return 1

    two = asyncio.create_task(launched(stack, tmp_path / "b", run, stand, Claims, in_hand=in_hand, **bound))
    await full.wait()
    assert sessions(run) == []
    one = asyncio.create_task(launched(stack, tmp_path / "a", run, stuck, Silent, **bound))
    async with asyncio.timeout(120):
        results = await two
    assert sorted(result.end_reason for result in results) == ["completed", "interrupted"]
    gate.set()
    await one


async def test_one_failure_stops_no_launcher_of_a_run_in_which_others_have_had_turns(
    stack: Stack, tmp_path: Path, sessions: Sessions
) -> None:
    """The first trial that it comes to is the last that may begin, and fails."""
    run, gate = "elsewhere", asyncio.Event()
    bound = {"tasks": 2, "groups_per_step": 1, "max_staleness_steps": 0, "stop_after_failures": 5}
    stuck = Stuck(gate=gate)
    one = asyncio.create_task(launched(stack, tmp_path / "a", run, stuck, Claims, in_flight=1, **bound))
    await until(lambda: len(stuck.started) == 1 and any(session.counts.turns for session in sessions(run)))
    failing = Stand(exits=lambda trial, attempt: Exit(int(trial.endswith(".1") and "t0" in trial)))
    two = asyncio.create_task(launched(stack, tmp_path / "b", run, failing, Claims, **bound))
    await until(lambda: bool(failing.started))
    await asyncio.sleep(2.0)
    assert not two.done() or not two.exception(), "it waits for the other's trial"
    gate.set()
    async with asyncio.timeout(120):
        ends = {(each.task_id, each.trial_id[-1], each.end_reason) for each in [*await one, *await two]}
    assert ends == {
        ("t0", "0", "completed"), ("t0", "1", "exit_code"), ("t1", "0", "completed"), ("t1", "1", "completed"),
    }  # fmt: skip


async def test_a_lost_attempt_that_still_runs_has_no_way_into_the_recording_of_the_next(
    stack: Stack, tmp_path: Path, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node that Ray has given up, and that still reaches the proxy."""
    found, lossy = prepared(stack, tmp_path, "lost-attempt", group_size=1, retries=1), Lossy()
    monkeypatch.setattr(Prepared, "player", lambda *_: lossy)
    async with found.client() as client:
        (result,) = await found.rollouts(client).run(epochs(found.tasks, 1))
        with pytest.raises(Conflict, match="got claim 1, the newest is 2"):
            await client.complete(result.trial_id, Completion(reward=0.0, claim=1))
    assert (result.end_reason, result.attempts, result.turns) == ("completed", 2, 1)
    assert lossy.answers == [403, 200] and [one.claim for one in lossy.seen] == [1, 2]
    assert [session.counts.turns for session in sessions("lost-attempt")] == [1]


class Lossy(Player):
    """Its first attempt is lost before its first turn, and asks once there is a second one."""

    def __init__(self) -> None:
        self.seen: list[Assignment] = []
        self.answers: list[int] = []

    async def play(self, assignment: Assignment, folder: Path) -> tuple[Exit, CommandOutcome]:
        self.seen.append(assignment)
        if len(self.seen) == 1:
            return Exit(None), CommandOutcome(EndReason.INTERRUPTED)
        for each in self.seen:
            self.answers.append(await answer(each.trial.urls["openai"], each.trial.api_key))
        return Exit(0), CommandOutcome(EndReason.COMPLETED, reward=1.0)

    async def clear(self, folder: Path) -> None:
        raise AssertionError("nothing is left")


class Stuck(Stand):
    """Its first trial has a turn and hangs; the second one hangs before its first turn."""

    refused: int | None = None

    async def run(self, job: TrialJob) -> Exit:
        assert self.gate is not None
        self.started.append(job.trial_id)
        if len(self.started) == 1:
            await self.ask(job)
        await self.gate.wait()
        if job.trial_id != self.started[0]:
            self.refused = await answer(job.environment["OPENAI_BASE_URL"], job.environment["OPENAI_API_KEY"])
        (job.workdir / "reward.txt").write_text("1")
        return Exit(0)


async def answer(url: str, key: str | None) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60) as http:
        return (await http.post(f"{url}/chat/completions", json=body)).status_code


class Silent(Claims):
    """Of a launcher that can't reach the proxy for a while."""

    async def _keep(self, lost: Callable[[str], None]) -> None:
        await asyncio.Event().wait()


async def launched(
    stack: Stack,
    folder: Path,
    run: str,
    stand: Stand,
    kind: type[Claims],
    *,
    in_hand: InHand | None = None,
    ttl_s: float | None = None,
    **settings: Any,
) -> list[TrialResult]:
    """As from a machine of its own."""
    folder.mkdir()
    found = prepared(stack, folder, run, **settings)
    async with found.client() as client:
        ttl_s = ttl_s or (1.0 if kind is Silent else 60.0)  # who renews its claims loses none on a busy machine
        claims = kind(client, Launcher(str(folder), 1, "1"), ttl_s=ttl_s)
        return await found.rollouts(client, executor=stand, claims=claims, in_hand=in_hand).run(epochs(found.tasks, 1))
