"""Rollouts with Harbor, without Harbor: what its results mean, how agents are pointed, which tasks there are, what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from steno.client.client import AsyncClient
from steno.contracts.errors import Forbidden, Gone, StenoError, StoreUnavailable, Unreachable
from steno.contracts.records import Counts, Session
from steno.contracts.rest import Completion, Trial
from steno_rollouts.config import RolloutSettings
from steno_rollouts.outcome import EndReason, RewardError, TrialResult
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import Exit
from steno_rollouts.trials.harbor import task_steps
from steno_rollouts.trials.harbor.executor import HarborExecutor
from steno_rollouts.trials.harbor.interpreter import HarborPython
from steno_rollouts.trials.harbor.outcome import HarborOutcome
from steno_rollouts.trials.harbor.plan import HarborPlan
from steno_rollouts.trials.harbor.pointing import POINTINGS, Addresses
from steno_rollouts.trials.harbor.task_steps import NotTold, TaskSteps
from steno_rollouts.trials.play import Assignment, ExecutorPlayer, RunnerOptions
from steno_rollouts.trials.runner import TrialRunner
from tests.support.clock import ClockAhead

RAN = {"started_at": "2026-11-23T12:00:00Z"}
URL = "http://proxy:8000/steno/g.0"
ADDRESSES = Addresses({"openai": f"{URL}/v1", "anthropic": URL, "gemini": URL}, "sk-trial")


def outcome(
    tmp_path: Path, error: str | None = None, rewards: dict[str, Any] | None = None, **more: Any
) -> HarborOutcome:
    """As the driver writes it."""
    found = {
        "exception_info": {"exception_type": error, "exception_message": "it\n said no"} if error else None,
        "verifier_result": {"rewards": rewards} if rewards is not None else None,
        "step_results": None,
        "agent_execution": RAN,
        "verifier": None,
        "modes": ["separate"],
        "only_host": None,
        "unreachable": None,
        "image": None,
        **more,
    }
    (tmp_path / "answer.json").write_text(json.dumps(found))
    read = HarborOutcome.read(tmp_path / "answer.json")
    assert read is not None
    return read


def test_a_reward_is_named_and_the_others_are_metrics(tmp_path: Path) -> None:
    found = outcome(tmp_path, rewards={"reward": 0.5, "tests": 3}, modes=["shared"], only_host="proxy")
    verdict = found.worth("reward")
    assert found.exit == Exit(0) and verdict is not None
    assert (verdict.reason, verdict.reward) == (EndReason.COMPLETED, 0.5)
    assert verdict.metrics == {"tests": 3.0, "shared_verifier": 1.0, "only_proxy": 1.0}
    with pytest.raises(RewardError, match="reward_key: the verifier gave no 'score'; it gave reward, tests"):
        found.worth("score")
    with pytest.raises(RewardError, match="must be within"):
        outcome(tmp_path, rewards={"reward": 1e9}).worth("reward")
    for value in (10**400, -(10**400), None, float("inf")):  # None: how Harbor's JSON has NaN
        with pytest.raises(RewardError, match="must be within"):
            outcome(tmp_path, rewards={"reward": value}).worth("reward")
        step = {"step_name": "one", "exception_info": None, "agent_execution": RAN, "verifier": RAN}
        steps = [step | {"verifier_result": {"rewards": {"reward": 1, "n": value}}}]
        other = outcome(tmp_path, rewards={"reward": 1, "n": value}, step_results=steps).worth("reward")
        assert other is not None and other.metrics == {"step/one/reward": 1.0}, "no metric"
    silent = outcome(tmp_path).worth("reward")
    assert silent is not None and silent.reason is EndReason.NO_REWARD


def test_a_step_s_rewards_are_metrics(tmp_path: Path) -> None:
    def step(name: str, rewards: dict[str, float] | None, error: str | None = None) -> dict[str, Any]:
        info = {"exception_type": error, "exception_message": "late"} if error else None
        given = None if rewards is None else {"rewards": rewards}
        return {
            "step_name": name,
            "exception_info": info,
            "verifier_result": given,
            "agent_execution": RAN,
            "verifier": RAN,
        }

    steps = [step("one", {"reward": 1.0, "n": 2}), step("two", {"reward": 0.0}, "AgentTimeoutError")]
    found = outcome(tmp_path, rewards={"reward": 0.5}, step_results=steps, agent_execution=None)
    assert found.exit == Exit(None, timed_out=True, error="AgentTimeoutError: late")
    verdict = found.worth("reward")
    assert verdict is not None and verdict.reward == 0.5
    assert verdict.metrics == {"step/one/reward": 1.0, "step/one/n": 2.0, "step/two/reward": 0.0}
    steps = [step("one", {"reward": 1.0}), step("two", None, "AddTestsDirError")]
    found = outcome(tmp_path, rewards={"reward": 1.0}, step_results=steps, agent_execution=None)
    with pytest.raises(RewardError, match="verifier: step 'two' has no reward: AddTestsDirError: late"):
        found.worth("reward")  # Harbor's is the mean of the others


async def test_the_proxy_is_told_of_each_step_before_its_agent_begins(tmp_path: Path) -> None:
    told: list[str] = []

    async def begin(name: str) -> None:
        told.append(name)
        if name == "ended":
            raise Gone("by a limit")

    async def asked(number: int) -> None:
        """As the driver does."""
        file = tmp_path / "steps" / str(number)
        file.touch()
        while file.exists():
            await asyncio.sleep(0)

    steps = TaskSteps(tmp_path / "steps", ["write it", "ended", "prüfen"], begin)
    async with steps.told(), asyncio.timeout(60):
        for number in (1, 2, 3):
            await asked(number)
            assert len(told) == number
    assert told == ["write it", "ended", "prüfen"]


async def test_a_step_waits_for_a_proxy_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_steps, "RETRY_S", 0.0)
    left = [StoreUnavailable("away"), *[Unreachable("no answer")] * 5]

    async def begin(name: str) -> None:
        if left:
            raise left.pop()

    async with TaskSteps(tmp_path / "steps", ["one"], begin).told(), asyncio.timeout(60):
        file = tmp_path / "steps" / "1"
        file.touch()
        while file.exists():
            await asyncio.sleep(0)
    assert not left


@pytest.mark.parametrize("error", [Unreachable("no answer"), Forbidden("no answer")])
async def test_what_runs_is_ended_where_the_proxy_can_not_be_told_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StenoError
) -> None:
    """Its turns would be named after the step before."""
    monkeypatch.setattr(task_steps, "RETRY_S", 0.0)
    clock = ClockAhead()
    monkeypatch.setattr(task_steps, "time", clock)
    asked = 0

    async def begin(name: str) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            clock.by_s = 1000.0
        raise error

    ended = False
    with pytest.raises(NotTold, match="can't be told of step 'one': no answer"):
        async with asyncio.timeout(60), TaskSteps(tmp_path / "steps", ["one"], begin).told():
            (tmp_path / "steps" / "1").touch()
            try:
                await asyncio.Event().wait()
            finally:
                ended = True
    assert ended and (tmp_path / "steps" / "1").exists(), "the driver still waits when it is ended"
    assert (asked > 1) == error.retryable


async def test_a_step_does_not_wait_longer_where_the_client_never_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of `steno rollout` asks until the proxy answers."""
    monkeypatch.setattr(task_steps, "PATIENCE_S", 0.05)

    async def begin(name: str) -> None:
        await asyncio.Event().wait()

    with pytest.raises(NotTold, match=r"can't be told of step 'one': no answer for 0\.05 s"):
        async with asyncio.timeout(60), TaskSteps(tmp_path / "steps", ["one"], begin).told():
            (tmp_path / "steps" / "1").touch()
            await asyncio.Event().wait()


ANSWERED = """#!{python}
import json, sys, time
from pathlib import Path

request = json.loads(Path(sys.argv[3]).read_text())
answer = {{"exception_info": None, "agent_execution": {ran}, "modes": [], "only_host": None, "unreachable": None, "image": None,
          "verifier_result": {{"rewards": {{"reward": 0.5}}}}, "step_results": None}}
Path(request["answer"]).write_text(json.dumps(answer))
"""
"""A driver of trials that are worth 0.5."""
PLAYED = (
    ANSWERED
    + """
for number in (1, 2):
    asked = Path(request["steps"], str(number))
    asked.touch()
    while asked.exists():
        time.sleep(0.01)
"""
)
"""A driver of trials of two steps. Its answer is there from the beginning: of a trial that is ended, it must not count."""


@pytest.mark.parametrize(("step", "turns", "reason"), [("one", 0, "start_failed"), ("two", 1, "exit_code")])
async def test_only_the_trial_of_which_the_proxy_can_not_be_told_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, turns: int, reason: str
) -> None:
    """The other one, of which it can be told later, goes on to its end. Their folders are named from where the rollouts run."""
    monkeypatch.chdir(tmp_path)
    ended_first = asyncio.Event()
    posted: dict[str, Completion] = {}
    sessions = {
        trial_id: Session(trial_id=trial_id, group_id="g", created_at=0.0, updated_at=0.0, counts=Counts(turns=turns))
        for trial_id in ("g.0", "g.1")
    }

    async def begin(trial_id: str, name: str) -> None:
        if name == step and trial_id == "g.0":
            raise Forbidden("no answer")
        if name == step:
            await ended_first.wait()

    async def recorded(trial_id: str) -> Session:
        return sessions[trial_id]

    async def complete(trial_id: str, end: Completion) -> Session:
        posted[trial_id] = end
        ended_first.set()
        return sessions[trial_id].model_copy(update=end.model_dump(exclude={"metrics"}))

    python = tmp_path / "python"
    python.write_text(PLAYED.format(python=sys.executable, ran=RAN))
    python.chmod(0o700)
    plan = HarborPlan(HarborPython(python, "", frozenset(), frozenset()), "codex", None, POINTINGS["codex"])
    settings = RolloutSettings(harbor="x", agent="codex", environment="daytona", work_dir=Path("trials"))
    client = cast(AsyncClient, SimpleNamespace(session=recorded, complete=complete))
    options = RunnerOptions((), settings.work_dir, retries=0)
    runner = TrialRunner(client, ExecutorPlayer(client, HarborExecutor(plan, settings, begin), options), options)
    task = Task("t", {"steps": [{"name": "one"}, {"name": "two"}]}, folder=tmp_path / "task")
    results: list[TrialResult] = []
    async with asyncio.timeout(60), asyncio.TaskGroup() as running:
        for session in sessions.values():
            trial = Trial(session=session, urls=dict(ADDRESSES.urls))
            running.create_task(runner.run(Assignment(trial, task, "epoch-0"), results.append))
    results.sort(key=lambda result: result.trial_id)
    assert [(result.trial_id, result.end_reason, result.reward) for result in results] == [
        ("g.0", reason, None), ("g.1", "completed", 0.5),
    ]  # fmt: skip
    assert posted["g.0"].status == "aborted" and posted["g.0"].reward is None
    assert results[0].detail.endswith(f"the proxy can't be told of step {step!r}: no answer")


async def test_a_clean_up_that_fails_is_said_and_the_verdict_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine answers before the trial, and not after it."""
    folder = tmp_path / "trials" / "g.0"
    (tmp_path / "podman").write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && exec echo podman version 4.3\n'
        f"[ ! -e {folder / 'answer.json'} ] || {{ echo the database is locked >&2; exit 125; }}\n"
    )
    python = tmp_path / "python"
    python.write_text(ANSWERED.format(python=sys.executable, ran=RAN))
    for program in (tmp_path / "podman", python):
        program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    plan = HarborPlan(HarborPython(python, "", frozenset(), frozenset()), "codex", None, POINTINGS["codex"])
    settings = RolloutSettings(harbor="x", agent="codex", environment="podman", work_dir=folder.parent)
    options = RunnerOptions((), settings.work_dir)
    player = ExecutorPlayer(cast(AsyncClient, SimpleNamespace()), HarborExecutor(plan, settings), options)
    session = Session(trial_id="g.0", created_at=0.0, updated_at=0.0)
    trial = Trial(session=session, urls=dict(ADDRESSES.urls))
    task = Task("t", {}, folder=tmp_path / "task")
    async with asyncio.timeout(60):
        ended, verdict = await player.play(Assignment(trial, task, "epoch-0"), folder)
    assert (ended.code, verdict.reason, verdict.reward) == (0, EndReason.COMPLETED, 0.5)
    assert "g.0: its containers may be left:" in caplog.text and "the database is locked" in caplog.text


UNREACHABLE = """#!{python}
import json, sys, time
from pathlib import Path

request = json.loads(Path(sys.argv[3]).read_text())
folder = Path(request["answer"]).parent
began = folder.parent / f"{{folder.name}}.began"
lost = not began.exists() and {lost}
began.touch()
while not (folder.parent / "g.0.began").exists():
    time.sleep(0.01)
answer = {{"exception_info": {{"exception_type": "NotReached", "exception_message": ""}} if lost else None, "modes": [],
          "agent_execution": None if lost else {ran}, "only_host": None, "unreachable": "no such host" if lost else None,
          "image": None, "verifier_result": {{"rewards": {{"reward": 0.5}}}}, "step_results": None}}
Path(request["answer"]).write_text(json.dumps(answer))
"""
"""A driver whose sandboxes do not reach the proxy for a moment, if `lost`."""


async def reached(tmp_path: Path, trials: list[str], lost: str) -> list[TrialResult]:
    """Trials that run at a time: what became of them."""

    async def recorded(trial_id: str) -> Session:
        return Session(trial_id=trial_id, created_at=0.0, updated_at=0.0)

    async def complete(trial_id: str, end: Completion) -> Session:
        return (await recorded(trial_id)).model_copy(update=end.model_dump(exclude={"metrics"}))

    python = tmp_path / "python"
    python.write_text(UNREACHABLE.format(python=sys.executable, ran=RAN, lost=lost))
    python.chmod(0o700)
    plan = HarborPlan(HarborPython(python, "", frozenset(), frozenset()), "codex", None, POINTINGS["codex"])
    settings = RolloutSettings(harbor="x", agent="codex", environment="daytona", work_dir=tmp_path / "trials")
    client = cast(AsyncClient, SimpleNamespace(session=recorded, complete=complete))
    options = RunnerOptions((), settings.work_dir, retries=1)
    runner = TrialRunner(client, ExecutorPlayer(client, HarborExecutor(plan, settings), options), options)
    task = Task("t", {}, folder=tmp_path / "task")
    results: list[TrialResult] = []

    async def ran(trial_id: str) -> None:
        trial = Trial(session=await recorded(trial_id), urls=dict(ADDRESSES.urls))
        await runner.run(Assignment(trial, task, "epoch-0"), results.append)

    async with asyncio.timeout(60):
        await asyncio.gather(*(ran(trial_id) for trial_id in trials))
    return results


async def test_a_later_sandbox_that_does_not_reach_the_proxy_is_tried_again_and_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steno_rollouts.trials.runner.SETTLE_S", 0.0)
    results = await reached(tmp_path, ["g.0", "g.1"], lost='folder.name == "g.1"')
    assert sorted((result.trial_id, result.end_reason, result.reward, result.attempts) for result in results) == [
        ("g.0", "completed", 0.5, 1), ("g.1", "completed", 0.5, 2),
    ]  # fmt: skip


async def test_where_the_first_sandbox_does_not_reach_the_proxy_no_other_would(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"can't be reached from the sandbox of g\.0: .* failed: no such host"):
        await reached(tmp_path, ["g.0"], lost="True")


@pytest.mark.parametrize(
    ("error", "more", "ended", "worth"),
    [
        ("AgentTimeoutError", {}, Exit(None, timed_out=True, error="AgentTimeoutError: it said no"), None),
        ("ApiRateLimitError", {}, Exit(1), None),
        (
            "AgentSetupTimeoutError",
            {"agent_execution": None},
            Exit(None, error="AgentSetupTimeoutError: it said no"),
            None,
        ),
        ("OSError", {"agent_execution": None}, Exit(None, error="OSError: it said no"), None),
        ("OSError", {}, Exit(1), None),
        (
            "EnvironmentStartTimeoutError",
            {"verifier": RAN},
            Exit(0),
            "verifier: EnvironmentStartTimeoutError: it said no",
        ),
        ("RewardFileNotFoundError", {"verifier": RAN}, Exit(0), "verifier: RewardFileNotFoundError: it said no"),
        ("StillRunning", {"verifier": RAN}, Exit(0), "verifier: StillRunning: it said no"),
        ("PodEvicted", {"agent_execution": None}, Exit(None, error="PodEvicted: it said no"), None),
        ("PodEvicted", {}, Exit(None, error="PodEvicted: it said no", lost=True), None),
        ("PodEvicted", {"verifier": RAN}, Exit(0), "verifier: PodEvicted: it said no"),
        ("PodOutOfMemory", {}, Exit(1), None),
    ],
)
def test_each_exception_is_an_end(
    tmp_path: Path, error: str, more: dict[str, Any], ended: Exit, worth: str | None
) -> None:
    found = outcome(tmp_path, error, **more)
    assert found.exit == ended
    if worth is None:
        assert found.worth("reward") is None
    else:
        with pytest.raises(RewardError) as refused:
            found.worth("reward")
        assert refused.value.message == worth


def test_of_a_long_message_the_end_stays_which_says_why(tmp_path: Path) -> None:
    said = f"command failed: podman compose {'-f file ' * 200}: unknown shorthand flag"
    found = outcome(tmp_path, exception_info={"exception_type": "RuntimeError", "exception_message": said})
    assert found.error.startswith("RuntimeError: command failed: podman compose -f file")
    assert found.error.endswith("-f file : unknown shorthand flag") and len(found.error) < 500


def test_a_driver_that_came_to_no_end_has_no_outcome(tmp_path: Path) -> None:
    assert HarborOutcome.read(tmp_path / "answer.json") is None
