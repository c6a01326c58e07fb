"""Agent functions that end in other ways than by a number, and a collector whose parts fail. No proxy is there."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steno.contracts.errors import ConfigError, Conflict, Unreachable
from steno.contracts.rest import SampleList, UnreadableTurn
from steno_adapters import AgentCall, Collector
from steno_adapters.collected_group import CollectedGroup, read_group
from steno_adapters.collector import EXTENDED_AT_ONCE
from steno_adapters.function_agents import FunctionAgents
from steno_rollouts.build import ADMIN_KEY, NO_KEYS, UNCONFINED, Prepared
from steno_rollouts.config import RolloutSettings
from steno_rollouts.outcome import CommandOutcome, EndReason, RewardError
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import Exit, TrialJob
from tests.support.sources import ROOT, SOURCES
from tests.unit.adapters.test_rows import sample

NOWHERE = "http://127.0.0.1:1"


def job_in(folder: Path, trial_id: str = "g.0", timeout_s: float = 60.0) -> TrialJob:
    work = folder / trial_id / "work"
    work.mkdir(parents=True)
    named = {"OPENAI_BASE_URL": "o", "ANTHROPIC_BASE_URL": "a", "OPENAI_API_KEY": "k"}
    return TrialJob(trial_id, ("agent",), named, work.parent, work, timeout_s, Task("t", {"task_id": "t"}))


def played(function: Callable[[AgentCall], Any], folder: Path) -> tuple[Exit, CommandOutcome | None, TrialJob]:
    """Returns also: what the trial was worth, as its runner asks."""
    job, agents = job_in(folder), FunctionAgents(function)

    async def play() -> tuple[Exit, CommandOutcome | None]:
        return await agents.run(job), await agents.verify(job, True)

    return *asyncio.run(play()), job


def exits(call: AgentCall) -> float:
    sys.exit("no disk is mounted")


def is_cancelled(call: AgentCall) -> float:
    raise asyncio.CancelledError("by its own event loop")


def says_half_a_character(call: AgentCall) -> float:
    raise ValueError("\ud83d")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


def says_nothing(call: AgentCall) -> float:
    raise Mute


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (exits, "SystemExit: no disk is mounted"),
        (is_cancelled, "CancelledError: by its own event loop"),
        (says_half_a_character, r"ValueError: \ud83d"),
        (says_nothing, "Mute"),
        (lambda call: "good", "TypeError: reward: the agent function returned 'good', must be a number or None"),
        (lambda call: {"reward": 1}, "TypeError: reward: the agent function returned {'reward': 1}, must be a number"),
    ],
)
def test_a_function_that_exits_or_returns_no_number_fails_its_own_trial(
    function: Callable[[AgentCall], Any], said: str, tmp_path: Path
) -> None:
    ended, worth, job = played(function, tmp_path)
    assert (ended.code, ended.timed_out, worth) == (1, False, None)
    assert job.stderr.read_text().splitlines()[-1].startswith(said)


def fails(call: AgentCall) -> float:
    raise RuntimeError("the agent broke")


def loses_its_folder(call: AgentCall) -> float:
    shutil.rmtree(call.workdir)
    return 1.0


@pytest.mark.parametrize(
    ("function", "code", "worth"),
    [
        (lambda call: 1, 0, (EndReason.COMPLETED, 1.0)),
        (lambda call: 0.0, 0, (EndReason.COMPLETED, 0.0)),
        (lambda call: None, 0, (EndReason.NO_REWARD, None)),
        (fails, 1, None),
        (loses_its_folder, 0, (EndReason.COMPLETED, 1.0)),
    ],
)
@pytest.mark.parametrize("file", [None, "reward.json", "reward.txt"])
def test_the_reward_is_what_the_function_returns_whatever_the_models_programs_write(
    function: Callable[[AgentCall], Any],
    code: int,
    worth: tuple[EndReason, float | None] | None,
    file: str | None,
    tmp_path: Path,
) -> None:
    def play(call: AgentCall) -> Any:
        if file is not None:
            (call.workdir / file).write_text('{"reward": 7}' if file == "reward.json" else "7")
        return function(call)

    ended, said, _ = played(play, tmp_path)
    assert (ended.code, said and (said.reason, said.reward)) == (code, worth)


def test_a_reward_that_is_no_finite_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="the agent function: reward: got nan, must be a finite number"):
        played(lambda call: float("nan"), tmp_path)


async def test_functions_that_hang_keep_no_other_from_being_called(tmp_path: Path) -> None:
    go_on = threading.Event()

    def hangs_by_name(call: AgentCall) -> float:
        if call.trial_id.startswith("hangs"):
            go_on.wait()
        return 1.0

    agents = FunctionAgents(hangs_by_name)
    try:
        for name, limit_s, timed_out in [("hangs.0", 0.01, True), ("hangs.1", 0.01, True), ("quick.0", 60.0, False)]:
            job = job_in(tmp_path, name, limit_s)
            ended = await agents.run(job)
            assert (name, ended.timed_out) == (name, timed_out)
            assert (await agents.verify(job, True) is None) == timed_out
    finally:
        go_on.set()


async def test_where_no_thread_can_be_started_the_trial_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    job, agents = job_in(tmp_path, "g.0", 60.0), FunctionAgents(lambda call: 1.0)
    monkeypatch.setattr(threading.Thread, "start", refuses)
    ended = await agents.run(job)
    assert (ended.code, ended.error) == (None, "can't start new thread")


HANGS = """
import asyncio, sys, threading
from pathlib import Path
from steno_adapters.function_agents import FunctionAgents
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import TrialJob

folder, named = Path(sys.argv[1]), dict.fromkeys(["OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY"], "-")
agents = FunctionAgents(lambda call: threading.Event().wait())
ended = asyncio.run(agents.run(TrialJob("g.0", (), named, folder, folder, 0.01, Task("t", {"task_id": "t"}))))
agents.close()
print(ended.timed_out)
"""


def test_a_function_that_hangs_does_not_keep_its_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


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


def _leased(collector: Collector, *names: str) -> list[CollectedGroup]:
    """Groups that it holds."""
    groups = [CollectedGroup(_lease(name), {}, []) for name in names]
    collector._held.update({group.lease.lease_id: group.lease for group in groups})
    return groups


def _answers(collector: Collector, monkeypatch: pytest.MonkeyPatch, errors: dict[str, list[Exception]]) -> list[str]:
    """The proxy, as far as leases are concerned. Args: errors: lease -> what it says first. Returns: what it takes."""
    told: list[str] = []

    def answer(what: str) -> Callable[..., None]:
        def call(lease_id: str, *_: Any, **__: Any) -> None:
            if left := errors.get(lease_id):
                raise left.pop(0)
            told.append(f"{what} {lease_id}")

        return call

    for name in ("acknowledge", "release", "extend"):
        monkeypatch.setattr(collector._client, name, answer(name))
    return told


@pytest.mark.parametrize("name", ["acknowledge", "release", "used"])
def test_a_lease_is_held_until_the_proxy_knows_of_its_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector(NOWHERE, "away", lease_ttl_s=3600) as collector:
        groups = _leased(collector, "a", "b", "c")
        told = _answers(collector, monkeypatch, {"lease-b": [Unreachable("the proxy is away")]})
        call = {"acknowledge": collector.acknowledge, "release": collector.release, "used": collector.used}[name]
        with pytest.raises(Unreachable):
            call(groups)
        said = "extend" if name == "used" else name
        assert told == [f"{said} lease-a"]
        assert list(collector._held) == ["lease-a"] * (name == "used") + ["lease-b", "lease-c"]
        call(groups)
        assert told[1:] == [f"{said} lease-{each}" for each in "abc"]
        assert list(collector._held) == [f"lease-{each}" for each in "abc" if name == "used"]


@pytest.mark.parametrize("name", ["acknowledge", "release", "used"])
def test_a_lease_that_is_lost_keeps_no_other_from_being_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector(NOWHERE, "lost", lease_ttl_s=3600) as collector:
        groups = _leased(collector, "a", "b", "c")
        errors: dict[str, list[Exception]] = {f"lease-{each}": [Conflict(f"{each} is lost")] for each in "ab"}
        told = _answers(collector, monkeypatch, errors)
        call = {"acknowledge": collector.acknowledge, "release": collector.release, "used": collector.used}[name]
        with pytest.raises(Conflict, match="a is lost"):
            call(groups)
        assert [line.split()[1] for line in told] == ["lease-c"]
        assert list(collector._held) == ["lease-c"] * (name == "used")


def test_leases_are_extended_together_since_each_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 held groups, at 0.1 s each, would take longer than a lease lasts."""
    with Collector(NOWHERE, "many", lease_ttl_s=0.2) as collector:
        together, extended, all_of_them = threading.Barrier(EXTENDED_AT_ONCE), Counter[str](), threading.Event()

        def extend(lease_id: str, ttl_s: float) -> None:
            together.wait(60)
            extended[lease_id] += 1
            if len(extended) == 2 * EXTENDED_AT_ONCE:
                all_of_them.set()

        monkeypatch.setattr(collector._client, "extend", extend)
        monkeypatch.setattr(collector._client, "release", lambda lease_id: None)
        with collector._lock:
            _leased(collector, *map(str, range(2 * EXTENDED_AT_ONCE)))
        assert all_of_them.wait(60)


def test_a_lease_that_is_extended_while_it_is_acknowledged_is_not_said_to_be_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Collector(NOWHERE, "extended", lease_ttl_s=0.04) as collector:
        refused = threading.Event()

        def extend(lease_id: str, ttl_s: float) -> None:
            if lease_id == "lease-a" and acknowledging.is_set():
                raise Conflict("group a is not held under this lease any more")
            if lease_id == "lease-b" and acknowledging.is_set():
                rounds.append(lease_id)
                if len(rounds) == 2:  # so there was a whole one, with all that came of it
                    refused.set()

        def acknowledge(lease_id: str) -> None:
            acknowledging.set()
            assert refused.wait(60)

        acknowledging, rounds = threading.Event(), list[str]()
        monkeypatch.setattr(collector._client, "extend", extend)
        monkeypatch.setattr(collector._client, "acknowledge", acknowledge)
        monkeypatch.setattr(collector._client, "release", lambda lease_id: None)
        with collector._lock:
            group, _ = _leased(collector, "a", "b")
        collector.acknowledge([group])
        assert "was lost" not in caplog.text
        with collector._lock:
            assert list(collector._held) == ["lease-b"]


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
    """Of a group that is served again: in `tokens`, and not in `trials` any more."""
    lease = _lease("a")
    lease.trials = [SimpleNamespace(trial_id="a.0", reward=1.0)]
    lease.tokens = {"a.0": {"l/1": 4}, "a.1": {"l/1": 3, "l/2": 4}}
    client: Any = SimpleNamespace(sample_list=lambda trial_id: SampleList(items=[sample()]))
    group = read_group(client, lease, policy="default", models=(), branches="all", earlier=False)
    assert (group.rewards, [row.trained_tokens for row in group.rows]) == ({"a.0": 1.0}, [4])
    assert group.untrained == {"deleted": 7}


def test_tokens_in_no_sample_are_unreadable_where_their_record_is_and_else_superseded() -> None:
    """A client that asked again went on from its second answer: no sample holds the first one."""
    lease = _lease("a")
    lease.trials = [SimpleNamespace(trial_id=trial, reward=1.0) for trial in ("a.0", "a.1")]
    lease.tokens = {"a.0": {"l/1": 6}, "a.1": {"l/1": 4, "l/2": 5}}
    broken = UnreadableTurn(turn_id="x", reason="a log-probability is missing", completion_tokens=3)
    lists = {"a.0": SampleList(items=[sample()]), "a.1": SampleList(items=[sample()], unreadable=[broken])}
    client: Any = SimpleNamespace(sample_list=lists.__getitem__)
    group = read_group(client, lease, policy="default", models=(), branches="all", earlier=False)
    assert [row.trained_tokens for row in group.rows] == [4, 4]
    assert group.untrained == {"superseded": 2 + 2, "unreadable": 3}


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
