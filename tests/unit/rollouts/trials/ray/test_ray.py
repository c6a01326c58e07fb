"""What travels to nodes of Ray's and back, what comes of it, and what its settings may be."""

from __future__ import annotations

import errno
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from steno.client.client import AsyncClient
from steno.contracts.errors import ConfigError, Forbidden, Gone, StenoError, StoreUnavailable, Unreachable
from steno.contracts.records import Session
from steno.contracts.rest import Completion, Trial
from steno_rollouts import on_node
from steno_rollouts.config import RolloutSettings
from steno_rollouts.on_node import Attempt
from steno_rollouts.outcome import CommandOutcome, EndReason, TrialResult
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import runner
from steno_rollouts.trials.executor import CannotStart, Exit
from steno_rollouts.trials.play import Assignment, ExecutorPlayer, RunnerOptions
from steno_rollouts.trials.ray import parcels
from steno_rollouts.trials.ray.cluster import Node, RayCluster
from steno_rollouts.trials.ray.parcels import Answer, Keys, NodeRequest, SentFile, bounded, last_part, packed, unpack
from steno_rollouts.trials.ray.player import RayPlayer
from steno_rollouts.trials.runner import TrialRunner
from steno_rollouts.trials.workdir import FolderInUse
from tests.support.programs.ports import free_port

SESSION = Session(trial_id="g.0", group_id="g", created_at=0.0, updated_at=0.0)
TRIAL = Trial(session=SESSION, urls=dict.fromkeys(("openai", "anthropic", "gemini"), "http://proxy/g.0"))
ASSIGNMENT = Assignment(TRIAL, Task("t", {}), "epoch-0")
WELL = Answer("10.0.0.1", Exit(0), CommandOutcome(EndReason.COMPLETED, 1.0))


class Answering:
    """A cluster whose nodes answer with these, one after the other."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)

    def join(self) -> None: ...

    def start(self, *_: object) -> object:
        async def answer() -> bytes:
            return pickle.dumps(self._answers.pop(0))

        return answer()


def ray_player(tmp_path: Path, *answers: Answer) -> RayPlayer:
    settings = RolloutSettings(tasks=tmp_path, command=["agent"], executor="ray", work_dir=tmp_path)
    return RayPlayer(cast(RayCluster, Answering(*answers)), settings, "r")


@pytest.mark.parametrize(
    "error", [ConfigError("executor: podman: not found on PATH"), Unreachable("no answer"), CannotStart("image x: no")]
)
async def test_a_node_that_is_not_ready_fails_the_attempt_which_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StenoError
) -> None:
    monkeypatch.setattr(runner, "SETTLE_S", 0.0)
    late = Answer("10.0.0.7", problem=(error.code, error.message))
    ended, outcome = await ray_player(tmp_path, late).play(ASSIGNMENT, tmp_path / "g.0")
    assert ended == Exit(None, error=f"node 10.0.0.7: {error.message}")
    assert outcome == CommandOutcome(EndReason.START_FAILED, detail=ended.error)

    async def recorded(_: str) -> Session:
        return SESSION

    async def complete(_: str, end: Completion) -> Session:
        return SESSION.model_copy(update=end.model_dump(exclude={"metrics"}))

    client = cast(AsyncClient, SimpleNamespace(session=recorded, complete=complete))
    options = RunnerOptions((), tmp_path, retries=1)
    for answers, reason in (((late, WELL), "completed"), ((late, late), "start_failed")):
        results: list[TrialResult] = []
        trials = TrialRunner(client, ray_player(tmp_path, *answers), options)
        await trials.run(ASSIGNMENT, results.append)
        assert [(result.end_reason, result.attempts) for result in results] == [(reason, 2)]
    assert results[0].detail == f"node 10.0.0.7: {error.message}"


async def test_an_attempt_whose_output_can_not_be_kept_here_counts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert await ray_player(tmp_path, WELL).play(ASSIGNMENT, tmp_path / "g.0") == (WELL.exit, WELL.outcome)
    assert "g.0: its output is not kept here: " in caplog.text and "No space left on device" in caplog.text


async def test_a_trial_that_was_deleted_while_a_node_played_it_ends_alone(tmp_path: Path) -> None:
    async def gone(*_: object) -> Session:
        raise Gone("session g.0 is closed")

    client = cast(AsyncClient, SimpleNamespace(session=gone, complete=gone))
    player = ray_player(tmp_path, Answer("10.0.0.7", problem=(Gone.code, "session g.0 is closed")))
    results: list[TrialResult] = []
    await TrialRunner(client, player, RunnerOptions((), tmp_path)).run(ASSIGNMENT, results.append)
    assert [(result.end_reason, result.detail) for result in results] == [
        ("deleted", "node 10.0.0.7: session g.0 is closed")
    ]


@pytest.mark.parametrize("error", [Forbidden, FolderInUse])
async def test_what_the_proxy_refuses_on_a_node_ends_the_rollouts(tmp_path: Path, error: type[StenoError]) -> None:
    """It would refuse any other node."""
    refused = Answer("10.0.0.7", problem=(error.code, "this can't be"))
    with pytest.raises(error, match=r"node 10\.0\.0\.7: this can't be"):
        await ray_player(tmp_path, refused).play(ASSIGNMENT, tmp_path / "g.0")


@pytest.mark.parametrize("away", ["proxy", "store"])
async def test_an_attempt_that_a_node_can_not_ask_about_brings_back_what_it_printed(
    away: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked(*_: object) -> bool:
        raise StoreUnavailable("the store is away")

    if away == "store":
        monkeypatch.setattr(ExecutorPlayer, "_has_turns", asked)
    monkeypatch.setattr(on_node, "PATIENCE_S", 0.0)
    settings = RolloutSettings(
        tasks=tmp_path, command=["sh", "-c", "echo no proxy >&2; exit 1"], executor="ray", confine="off", keep="none",
        proxy=f"http://127.0.0.1:{free_port()}", work_dir=tmp_path,
    )  # fmt: skip
    request = NodeRequest("play", settings, "r", ASSIGNMENT.task, TRIAL)
    with Attempt(request, None, "0123456789abcdef", "10.0.0.7") as attempt:
        answer = await attempt.play(Keys())
    assert answer.problem is None and answer.outcome.reason is EndReason.START_FAILED
    assert answer.outcome.detail.startswith("node 10.0.0.7: ")
    assert answer.stderr == b"no proxy\n" and not (tmp_path / "node-0123456789ab" / "g.0").exists()


def test_an_attempt_on_a_node_is_left_alone_by_launchers_at_another_proxy(tmp_path: Path) -> None:
    settings = RolloutSettings(tasks=tmp_path, command=["agent"], executor="ray", work_dir=tmp_path)
    request = NodeRequest("play", settings, "r", ASSIGNMENT.task, TRIAL)
    session = SESSION.model_copy(update={"created_at": SESSION.created_at + 1})
    other = replace(request, trial=TRIAL.model_copy(update={"session": session}))
    place = ("0123456789abcdef", "10.0.0.7")
    with Attempt(request, None, *place), Attempt(request, None, *place), pytest.raises(FolderInUse):
        Attempt(other, None, *place).__enter__()
    with Attempt(other, None, *place):
        pass


def test_a_tasks_folder_arrives_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "task"
    (task / "environment").mkdir(parents=True)
    (task / "environment" / "run.sh").write_text("#!/bin/sh\n")
    (task / "environment" / "run.sh").chmod(0o755)
    (task / "link").symlink_to("environment/run.sh")
    unpack(packed(task), tmp_path / "there")
    assert (tmp_path / "there" / "environment" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert str((tmp_path / "there" / "link").readlink()) == "environment/run.sh"
    monkeypatch.setattr(parcels, "MAX_FOLDER_BYTES", 5)
    with pytest.raises(CannotStart, match="must be at most 0: a task's folder is sent to nodes"):
        packed(task)


def test_what_is_cut_says_so(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    assert last_part(log, 1024) == b""
    log.write_bytes(b"a" * 1000 + b"b" * 1024)
    assert last_part(log, 2048) == log.read_bytes()
    assert last_part(log, 1024) == (
        b"[steno: the first 1000 of 2024 bytes are left out (--ray-return-kb 1)]\n" + b"b" * 1024
    )
    outcome = CommandOutcome(EndReason.COMPLETED, 1.0, {"tests": 3.0}, "fine")
    assert bounded(outcome, 1024) is outcome
    large = CommandOutcome(EndReason.COMPLETED, 1.0, {f"test-{n}": 1.0 for n in range(100)}, "x" * 5000)
    cut = bounded(large, 1024)
    assert (cut.reason, cut.reward, cut.metrics) == (EndReason.COMPLETED, 1.0, {}) and len(cut.detail) < 1200
    assert cut.detail.endswith("100 metrics and some words are left out (--ray-return-kb 1)]")


def test_a_users_file_is_used_where_it_was_given_if_it_is_the_same_there(tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text("one")
    sent = SentFile.of(file)
    assert sent.put(tmp_path / "sent") == file
    file.write_text("another")
    assert sent.put(tmp_path / "sent") == tmp_path / "sent" / "score.py"
    assert (tmp_path / "sent" / "score.py").read_text() == "one"


def test_keys_are_not_shown() -> None:
    keys = Keys("agents-key", "harness-key")
    assert "key" not in repr(keys).lower().replace("keys", "") and pickle.loads(pickle.dumps(keys)) == keys


def test_room_on_a_node() -> None:
    node = Node("id", "10.0.0.1", {"CPU": 8.0, "sandbox": 3.0})
    assert node.room({"CPU": 2.0}) == 4
    assert node.room({"CPU": 0.1}) == 80
    assert node.room({"CPU": 2.0, "sandbox": 1.0}) == 3
    assert node.room({"CPU": 1.0, "license": 1.0}) == 0
    assert node.room({"CPU": 0.0}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ray_cpus": 2}, "ray_cpus: is for trials on Ray (--executor ray)"),
        ({"executor": "ray", "ray_resources": {"CPU": 1}}, "ray_resources: got 'CPU', must be a resource that nodes"),
        (
            {"executor": "ray", "ray_resources": {"a": 1.5}},
            "ray_resources: a: got 1.5, must be a whole number, or betw",
        ),
        ({"executor": "ray", "ray_resources": {"a": -1}}, "ray_resources: a: got -1, must be a whole number, or betw"),
        ({"executor": "ray", "cpus": 2}, "cpus: is for containers, and ray_runner is 'local' (--ray-runner docker or"),
        (
            {"executor": "ray", "ray_runner": "podman", "work_dir": "/a:b"},
            "work_dir: got '/a:b': a path with a colon can't be mounted",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="Value error") as refused:
        RolloutSettings(tasks=Path("tasks"), command=["agent"], **given)  # type: ignore[arg-type]
    assert message in str(refused.value)


def test_harbors_sandboxes_and_containers_run_on_ray() -> None:
    RolloutSettings(harbor="tasks", agent="oracle", executor="ray")
    settings = RolloutSettings(tasks=Path("tasks"), command=["agent"], executor="ray", ray_runner="docker", image="x")
    assert settings.runner == "docker"
    with pytest.raises(
        ValueError, match="ray_runner: got 'docker': with harbor, sandboxes are chosen by --environment"
    ):
        RolloutSettings(harbor="tasks", agent="oracle", executor="ray", ray_runner="docker")
    with pytest.raises(ValueError, match="environment: got 'kubernetes', and executor is 'ray'"):
        RolloutSettings(harbor="tasks", agent="oracle", executor="ray", environment="kubernetes")
