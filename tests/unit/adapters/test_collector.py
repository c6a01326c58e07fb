"""Agent functions that end in other ways than by a number, and a collector whose parts fail. No proxy is there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steno.contracts.errors import ConfigError, Unreachable
from steno_adapters import AgentCall, Collector
from steno_adapters.collected_group import read_group
from steno_adapters.function_agents import FunctionAgents
from steno_rollouts.build import ADMIN_KEY, NO_KEYS, UNCONFINED, Prepared
from steno_rollouts.config import RolloutSettings
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import Exit, TrialJob
from tests.unit.adapters.test_rows import sample

NOWHERE = "http://127.0.0.1:1"


def played(function: Callable[[AgentCall], Any], folder: Path) -> tuple[Exit, TrialJob]:
    work = folder / "work"
    work.mkdir()
    named = {"OPENAI_BASE_URL": "o", "ANTHROPIC_BASE_URL": "a", "OPENAI_API_KEY": "k"}
    job = TrialJob("g.0", ("agent",), named, folder, work, 60, Task("t", {"task_id": "t"}))
    agents = FunctionAgents(function, 1)
    try:
        return asyncio.run(agents.run(job)), job
    finally:
        agents.close()


def exits(call: AgentCall) -> float:
    sys.exit("no disk is mounted")


def is_cancelled(call: AgentCall) -> float:
    raise asyncio.CancelledError("by its own event loop")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (exits, "SystemExit: no disk is mounted"),
        (is_cancelled, "CancelledError: by its own event loop"),
        (lambda call: "good", "TypeError: reward: the agent function returned 'good', must be a number or None"),
        (lambda call: {"reward": 1}, "TypeError: reward: the agent function returned {'reward': 1}, must be a number"),
    ],
)
def test_a_function_that_exits_or_returns_no_number_fails_its_own_trial(
    function: Callable[[AgentCall], Any], said: str, tmp_path: Path
) -> None:
    ended, job = played(function, tmp_path)
    assert (ended.code, ended.timed_out) == (1, False)
    assert job.stderr.read_text().splitlines()[-1].startswith(said)
    assert not (job.workdir / "reward.txt").exists()


def test_a_number_is_the_reward_and_none_is_no_reward(tmp_path: Path) -> None:
    for name, reward in [("scored", 1), ("unscored", None)]:
        (tmp_path / name).mkdir()
        ended, job = played(lambda call, reward=reward: reward, tmp_path / name)  # type: ignore[misc]
        written = job.workdir / "reward.txt"
        assert ended.code == 0 and (written.read_text() if written.exists() else None) == (reward and "1.0")


def test_what_exits_on_the_event_loop_of_the_rollouts_is_told_to_who_waits_and_others_go_on() -> None:
    def tasks() -> Iterator[dict[str, str]]:
        sys.exit("no more tasks")
        yield {}

    with Collector(NOWHERE, "exits", agent=lambda call: 1.0) as collector:
        rolling = collector.start(tasks(), 2, groups_per_step=1, max_staleness_steps=0)
        with pytest.raises(SystemExit, match="no more tasks"):
            rolling.result(300)
        with pytest.raises(SystemExit, match="no more tasks"):
            collector.collect(tasks(), 2)
        _serves_nothing(collector)
        assert collector.collect([], 2) == []


def test_groups_that_were_leased_before_an_error_come_with_the_next_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector(NOWHERE, "fails", agent=lambda call: 1.0) as collector:
        answers: list[Any] = [[_lease("a"), _lease("b")], Unreachable("the proxy is away"), [_lease("c")], []]

        def lease(request: Any) -> Any:
            if isinstance(answer := answers.pop(0), Exception):
                raise answer
            return answer

        monkeypatch.setattr(collector._client, "lease", lease)
        monkeypatch.setattr(collector, "_let_go", lambda lease_ids: None)
        with pytest.raises(Unreachable):
            collector.collect([], 2)
        with collector._lock:
            del collector._held["lease-b"]  # it ran out meanwhile
        assert [group.group_id for group in collector.collect([], 2)] == ["a", "c"]
        answers.append([])
        assert collector.collect([], 2) == []


def test_each_roll_out_of_a_collector_ends_what_its_executor_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Harbor's keeps a process for the pods of all trials."""
    told: list[str] = []

    def executor(self: Prepared, client: Any = None) -> Any:
        told.append("made")
        return SimpleNamespace(close=lambda: told.append("closed"))

    monkeypatch.setattr(Prepared, "executor", executor)
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "t"}\n')
    settings = RolloutSettings(tasks=tmp_path / "tasks.jsonl", command=["agent"], confine="off", work_dir=tmp_path)
    with Collector(NOWHERE, "shares", agent=settings) as collector:
        _serves_nothing(collector)
        for _ in range(2):
            assert collector.collect([], 2) == []
    assert told == ["made", "closed"] * 2


@pytest.mark.parametrize(("key", "keyless"), [(None, True), ("sk-admin", False)])
def test_what_trials_can_reach_is_told_as_steno_rollout_tells_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, key: str | None, keyless: bool
) -> None:
    monkeypatch.delenv("STENO_ADMIN_KEY", raising=False)
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "t"}\n')
    settings = RolloutSettings(tasks=tmp_path / "tasks.jsonl", command=["agent"], confine="off")
    with Collector(NOWHERE, "warns", agent=settings, key=key):
        assert UNCONFINED in caplog.text and (NO_KEYS in caplog.text) == keyless
        assert (ADMIN_KEY in caplog.text) != keyless


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train_models": "main"}, "train_models: got 'main', must be a list of names"),
        ({"agent": RolloutSettings(verifiers="words")}, "verifiers: can't be given here"),
        ({"agent": RolloutSettings(tasks=Path(), spare_trials=1)}, "spare_trials: can't be given here"),
    ],
)
def test_what_no_collector_can_be_made_of_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Collector(NOWHERE, "r", **given)


def test_each_rank_leases_groups_of_a_run_of_its_own() -> None:
    for rank, run in [(0, "mine"), (1, "mine-r1"), (12, "mine-r12")]:
        with Collector(NOWHERE, "mine", agent=lambda call: 1.0) as collector:
            collector.of_rank(rank)
            asked = _serves_nothing(collector)
            assert collector.lease() == [] and asked == [run]
            assert (collector.run, collector._options.run_id) == ("mine", run), "weights are pushed for the run itself"


def test_tokens_of_a_trial_that_was_deleted_since_the_group_was_first_leased_are_booked_as_deleted() -> None:
    """Of a group that is served again: in `tokens`, and not in `trials` any more. What a sample lacks is unreadable, as ever."""
    lease = _lease("a")
    lease.trials = [SimpleNamespace(trial_id="a.0", reward=1.0)]
    lease.tokens = {"a.0": {"l/1": 6}, "a.1": {"l/1": 3, "l/2": 4}}
    client: Any = SimpleNamespace(samples=lambda trial_id: [sample()])
    group = read_group(client, lease, policy="default", models=(), branches="all", earlier=False)
    assert (group.rewards, [row.trained_tokens for row in group.rows]) == ({"a.0": 1.0}, [4])
    assert group.untrained == {"deleted": 7, "unreadable": 2}


def _serves_nothing(collector: Collector) -> list[str]:
    """Returns: runs that are asked for."""
    asked: list[str] = []

    def lease(request: Any) -> list[Any]:
        asked.append(request.run_id)
        return []

    collector._client.lease = lease  # type: ignore[method-assign]
    return asked


def _lease(name: str) -> Any:
    group = SimpleNamespace(group_id=name, task={"task_id": name})
    return SimpleNamespace(lease_id=f"lease-{name}", group=group, trials=[], left_out={}, tokens={})
