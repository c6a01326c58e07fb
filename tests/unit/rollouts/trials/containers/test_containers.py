"""What is asked of a container engine, what passes the forwarder, whose containers are whose: without an engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.errors import ConfigError
from steno.contracts.records import Session
from steno.contracts.rest import Trial
from steno_rollouts.build import Prepared
from steno_rollouts.config import RolloutSettings
from steno_rollouts.outcome import CommandOutcome, EndReason, RewardError
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.containers import engine as engines
from steno_rollouts.trials.containers import executor as executors
from steno_rollouts.trials.containers.engine import (
    MOST_SAID,
    Container,
    ContainerEngine,
    ContainerState,
    EngineError,
    Mount,
    _last_lines,
)
from steno_rollouts.trials.containers.executor import ContainerExecutor
from steno_rollouts.trials.containers.forward import NotPassedOn, PassedOn, Route
from steno_rollouts.trials.containers.images import Image, Images
from steno_rollouts.trials.containers.launcher import Launcher
from steno_rollouts.trials.containers.sandbox import Sandbox, digest, sandbox
from steno_rollouts.trials.executor import Exit, TrialJob
from steno_rollouts.trials.harbor.leftovers import Leftovers
from tests.support.waiting import until

CONTAINER = Container(
    "steno-g.0-agent", "1234", ["sh", "-c", "x y"], {"steno.run": "r", "steno.trial": "g.0"}, "container:steno-g.0-forwarder",
    PurePosixPath("/app"), [Mount(Path("/t/work"), "/app", writable=True), Mount(Path("/t/task.json"), "/run/steno/task.json")],
    ["OPENAI_API_KEY"], cpus=1.5, memory_mb=512,
)  # fmt: skip
ROUTE = Route("https://proxy.example/steno/g.0")


def settings(tmp_path: Path, **given: Any) -> RolloutSettings:
    return RolloutSettings(**{"tasks": tmp_path, "command": ["agent"], "executor": "podman", **given})


def folder(tmp_path: Path, *, dockerfile: bool = True, tests: bool = True) -> Path:
    for name in ("environment", "tests"):
        (tmp_path / name).mkdir()
    (tmp_path / "environment" / ("Dockerfile" if dockerfile else "data.txt")).write_text("FROM x\n")
    (tmp_path / "tests" / ("test.sh" if tests else "other.py")).touch()
    return tmp_path


@pytest.mark.parametrize("is_podman", [True, False])
def test_a_container_has_no_rights_and_limits(is_podman: bool) -> None:
    words = ContainerEngine("/bin/engine", is_podman, 1000, 1000).create_words(CONTAINER)
    assert {
        "--name=steno-g.0-agent", "--label=steno.run=r", "--label=steno.trial=g.0", "--network=container:steno-g.0-forwarder",
        "--user=1000:1000", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--cpus=1.5", "--memory=512m",
        "--memory-swap=512m", "--pids-limit=1024", "--init", "--workdir=/app", "--env=OPENAI_API_KEY",
        "--volume=/t/work:/app:rw,z", "--volume=/t/task.json:/run/steno/task.json:ro,z",
    } < set(words)  # fmt: skip
    assert words[0] == "create" and words[-4:] == ["--entrypoint=sh", "1234", "-c", "x y"]
    assert not any("privileged" in word or "cap-add" in word for word in words)
    assert ("--http-proxy=false" in words) == is_podman, "Podman would pass on the operator's proxies"
    assert ("--env=https_proxy=" in words) != is_podman, "Docker would pass on those of its configuration"


def test_containers_run_as_who_owns_their_files_and_never_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--user=1000:1000" in ContainerEngine("podman", True).create_words(CONTAINER)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "getegid", lambda: 99)
    mine = ContainerEngine("podman", True).create_words(CONTAINER)
    assert "--user=1234:99" in mine and "--userns=container:steno-g.0-forwarder" in mine
    assert "--userns=keep-id" in ContainerEngine("podman", True).create_words(replace(CONTAINER, network="none"))
    assert "--userns=keep-id" not in ContainerEngine("docker", False).create_words(CONTAINER)


def test_a_folder_by_a_relative_path_is_no_volume_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = replace(CONTAINER, mounts=[Mount(Path("t/work"), "/app")])
    assert f"--volume={tmp_path}/t/work:/app:ro,z" in ContainerEngine("podman", True).create_words(relative)


def test_a_home_is_made_where_the_image_names_none() -> None:
    engine = ContainerEngine("podman", True, 1000, 1000)
    assert "--env=HOME=/home/trial" in engine.create_words(CONTAINER)
    assert not any("HOME" in word for word in engine.create_words(replace(CONTAINER, home=False)))


def test_an_image_says_where_its_work_and_home_are() -> None:
    assert Image.of("1", {"WorkingDir": "/app", "Env": ["PATH=/bin", "HOME=/root"]}) == Image(
        "1", PurePosixPath("/app"), brings=True, home=True
    )
    for config in ({}, {"WorkingDir": "/", "Env": None}, {"WorkingDir": ""}):
        assert Image.of("1", config) == Image("1", PurePosixPath("/work"), brings=False, home=False)


@dataclass(frozen=True)
class Refusing(ContainerEngine):
    """Docker without containers. refused: commands that fail, each as often as it stands there. asked: all of them. there: what
    has made its image."""

    refused: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    there: list[str] = field(default_factory=list)

    async def run(self, *words: str, **_: Any) -> str:
        command = words[0]
        self.asked.append(command)
        await asyncio.sleep(0)
        if command in self.refused:
            self.refused.remove(command)
            raise EngineError(f"docker {command}: toomanyrequests")
        if command in ("pull", "build"):
            self.there.append(command)
        if command == "image" and not self.there:
            raise EngineError("docker image: no such image")
        return {"image": json.dumps([{"Id": "sha256:1", "Config": {}}]), "info": "[]"}.get(command, "")


async def test_a_pull_that_failed_is_of_all_that_wait_for_it_and_is_tried_again_for_the_next() -> None:
    engine = Refusing("docker", False, refused=["pull"])
    images = Images(engine)
    waiting = await asyncio.gather(*(images.named("a/b:1") for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in waiting] == ["image a/b:1: docker pull: toomanyrequests"] * 3
    assert engine.asked.count("pull") == 1
    assert [(await images.named("a/b:1")).identity for _ in range(2)] == ["1", "1"]
    assert engine.asked.count("pull") == 2


async def test_what_harbor_left_is_looked_for_again_where_the_engine_refuses() -> None:
    """Podman does while it removes another container. The trial failed to start, and containers were left."""
    engine = Refusing("docker", False, refused=["ps", "network", "image"], there=["an image"])
    await Leftovers(engine).remove("trial")
    assert engine.asked == ["ps", "ps", "network", "network", "image", "image"]


async def test_a_build_that_failed_is_not_tried_again(tmp_path: Path) -> None:
    engine = Refusing("docker", False, refused=["build"])
    images = Images(engine)
    for _ in range(2):
        with pytest.raises(EngineError, match="docker build: toomanyrequests"):
            await images.named(tmp_path)
    assert engine.asked.count("build") == 1


async def test_an_engine_that_refused_one_trial_is_asked_again_for_the_next(tmp_path: Path) -> None:
    engine = Refusing("docker", False, refused=["info"])
    executor = ContainerExecutor(engine, "r", {"t": Sandbox("a/b:1", None, 1.0, 64, None, 1.0)}, "python")
    session = Session(trial_id="g.0", created_at=0.0, updated_at=0.0)
    trial = Trial(session=session, urls=dict.fromkeys(("openai", "anthropic", "gemini"), "http://proxy/g.0"))
    with pytest.raises(EngineError, match="docker info: toomanyrequests"):
        await executor.prepare(tmp_path / "g.0", trial, Task("t", {}), {})
    for _ in range(2):
        work, _variables = await executor.prepare(tmp_path / "g.0", trial, Task("t", {}), {})
        assert work.is_dir()
    assert engine.asked.count("info") == 2


@dataclass(frozen=True)
class Played(Refusing):
    """Of which containers end with 0 at once, and are there until they are removed. runs: they run on, whatever is asked."""

    runs: bool = False

    async def run(self, *words: str, **more: Any) -> str:
        await super().run(*words, **more)
        state = {"Running": self.runs, "ExitCode": 0, "StartedAt": "2026-11-23T09:14:39.017904321Z"}
        return {"image": json.dumps([{"Id": "sha256:1", "Config": {}}]), "inspect": json.dumps(state), "ps": "1"}.get(
            words[0], "[]"
        )

    async def attach(self, name: str, stdout: Path, stderr: Path) -> Any:
        async def end() -> None:
            await asyncio.sleep(3600 if self.runs else 0)

        return SimpleNamespace(wait=end)


def job(tmp_path: Path, **more: Any) -> TrialJob:
    for name in ("work", "task.json", "verifier/stdout.log"):
        (tmp_path / "g.0" / name).mkdir(parents=True)
    return TrialJob("g.0", ["agent"], {}, tmp_path / "g.0", tmp_path / "g.0" / "work", task=Task("t", {}), **more)


def executor(engine: ContainerEngine, tests: Path | None = None) -> ContainerExecutor:
    return ContainerExecutor(engine, "r", {"t": Sandbox("a/b:1", None, 1.0, 64, tests, 1.0)}, "python", grace_s=0.0)


@pytest.mark.parametrize("refused", [["ps"] * 9, ["rm"] * 99])
async def test_a_clean_up_that_fails_is_said_and_the_verdict_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: list[str]
) -> None:
    for name in ("LOOKS_S", "LOOK_AGAIN_S"):
        monkeypatch.setattr(engines, name, 0.0)
    monkeypatch.setattr(engines, "REMOVALS", 2)
    tests = folder(tmp_path) / "tests"
    played = executor(Played("docker", False, there=["pull"], refused=refused), tests)
    ran = job(tmp_path)
    assert await played.run(ran) == Exit(0, image="sha256:1")
    assert await played.verify(ran, True) == CommandOutcome(EndReason.COMPLETED, 1.0)
    assert caplog.text.count("g.0: its containers may be left: ") == 2 and "toomanyrequests" in caplog.text


async def test_tests_may_share_a_script_and_what_can_not_be_laid_out_is_an_error_of_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LOOK_AGAIN_S", 0.0)
    tests, shared = folder(tmp_path) / "tests", tmp_path / "common.sh"
    (tests / "test.sh").rename(shared)
    shared.chmod(0o600)
    (tests / "test.sh").symlink_to("../common.sh")
    played, ran = executor(Played("docker", False, there=["pull"]), tests), job(tmp_path)
    await played.run(ran)
    assert await played.verify(ran, True) == CommandOutcome(EndReason.COMPLETED, 1.0)
    laid_out = ran.folder / "verifier" / "tests" / "test.sh"
    assert not laid_out.is_symlink()
    assert [path.stat().st_mode & 0o777 for path in (laid_out, shared)] == [0o755, 0o600]
    shared.unlink()
    with pytest.raises(RewardError, match=r"^verifier: .*No such file or directory"):
        (tests / "test.sh").unlink()
        await played.verify(ran, True)


async def test_an_engine_that_refuses_for_a_moment_is_asked_again_how_a_trial_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engines, "LOOK_AGAIN_S", 0.0)
    played = executor(Played("docker", False, there=["pull"], refused=["inspect", "ps"] * 2))
    assert await played.run(job(tmp_path)) == Exit(0, image="sha256:1")
    assert not caplog.text


async def test_a_trial_whose_container_runs_on_is_not_scored(tmp_path: Path) -> None:
    played = executor(Played("docker", False, there=["pull"], runs=True))
    ended = await played.run(job(tmp_path, timeout_s=0.01))
    assert ended == Exit(None, error="container steno-g.0-agent was stopped, and runs on")


@dataclass(frozen=True)
class Late(Refusing):
    """Of which a container starts once it has been told to stop, and ends when it is told so again. looks: how often its engine
    is asked before it says so; alone: it ends by itself."""

    looks: int = 1
    alone: bool = False

    async def run(self, *words: str, **more: Any) -> str:
        await super().run(*words, **more)
        started = self.asked.count("stop") > 0 and self.asked.count("inspect") > self.looks
        state = {
            "Running": started and not self.has_ended(),
            "ExitCode": 143,
            "StartedAt": "2026-11-23T09:14:39.017904321Z" if started else "0001-01-01T00:00:00Z",
        }
        return {"image": json.dumps([{"Id": "sha256:1", "Config": {}}]), "inspect": json.dumps(state), "ps": "1"}.get(
            words[0], "[]"
        )

    async def attach(self, name: str, stdout: Path, stderr: Path) -> Any:
        found = SimpleNamespace(returncode=None)

        async def wait() -> None:
            while not self.has_ended():
                await asyncio.sleep(0.01)
            found.returncode = 143

        found.wait = wait
        return found

    def has_ended(self) -> bool:
        return self.asked.count("stop") > (0 if self.alone else 1)


@pytest.mark.parametrize("late", [{"looks": 0}, {"looks": 1}, {"looks": 1, "alone": True}], ids=str)
async def test_a_container_that_starts_after_it_was_told_to_stop_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: dict[str, Any]
) -> None:
    monkeypatch.setattr(executors, "AGAIN_S", 0.05)
    played = executor(Late("podman", True, there=["pull"], **late))
    async with asyncio.timeout(60):
        ended = await played.run(job(tmp_path, timeout_s=0.01))
    assert ended == Exit(143, timed_out=True, image="sha256:1")


async def test_a_trial_that_is_cancelled_stays_so_where_the_engine_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LOOKS_S", 0.0)
    engine = Played("docker", False, there=["pull"], refused=["stop", *["ps"] * 9], runs=True)
    running = asyncio.create_task(executor(engine).run(job(tmp_path)))
    while "create" not in engine.asked:
        await asyncio.sleep(0)
    for _ in range(9):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "stop" in engine.asked


HANGS = """#!/bin/sh
echo "$1" >>{asked}
exec sleep 30
"""


async def test_an_engine_that_hangs_holds_up_the_launcher_once_when_nobody_waits_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else happens meanwhile in the launcher, whatever its operator presses."""
    asks, real = [], subprocess.run
    monkeypatch.setattr(engines, "NOW_S", 0.5)
    monkeypatch.setattr(subprocess, "run", lambda words, **more: asks.append(words[1]) or real(words, **more))
    program, asked = tmp_path / "docker", tmp_path / "asked"
    program.write_text(HANGS.format(asked=asked))
    program.chmod(0o755)
    played = executor(ContainerEngine(str(program), False))

    async def attempt(name: str) -> None:
        async with played._ended_with(name):
            pass

    attempts = [asyncio.create_task(attempt(name)) for name in ("g.0", "g.1")]
    await until(lambda: asked.exists() and asked.read_text() == "ps\n" * 2)
    for _ in range(2):  # the engine's answer is waited for once more
        for each in attempts:
            each.cancel()
        for _ in range(9):
            await asyncio.sleep(0)
    ended = await asyncio.gather(*attempts, return_exceptions=True)
    assert [type(each) for each in ended] == [asyncio.CancelledError] * 2
    assert asks == ["ps"], "the second doesn't ask an engine that hung a moment ago"
    assert caplog.text.count(f"its containers may be left: {program} ps: no answer in 0.5 s") == 2


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no daemon >&2; exit 1", "ps: no daemon"),  # it may have some
        ('[ $1 = ps ] && echo c1 && exit; echo "c1 is busy" >&2; exit 1', "rm: c1 is busy"),
        ("", ""),
    ],
)
def test_what_an_engine_does_not_remove_at_once_is_said(tmp_path: Path, script: str, why: str) -> None:
    program = tmp_path / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert ContainerEngine(str(program), False).remove_now("steno.trial=g.0") == (why and f"{program} {why}")


def test_a_command_that_never_ran_is_told_from_one_that_ended() -> None:
    ended = {"Running": False, "ExitCode": 7, "StartedAt": "2026-11-23T09:14:39.017904321Z"}
    assert ContainerState.of(ended) == ContainerState(running=False, started=True, code=7)
    assert not ContainerState.of(ended | {"StartedAt": "0001-01-01T00:00:00Z"}).started


def test_a_task_says_what_it_runs_in(tmp_path: Path) -> None:
    path = folder(tmp_path)
    fields = {"environment": {"cpus": 2, "memory_mb": 4096}}
    task = Task("t", fields, {"verifier": {"timeout_sec": 9}}, path)
    found = sandbox(task, settings(tmp_path))
    assert found == Sandbox(None, path / "environment", 2, 4096, path / "tests", 9.0)
    assert sandbox(task, settings(tmp_path, cpus=0.5, memory_mb=64)).cpus == 0.5
    assert sandbox(task, settings(tmp_path, reward="score.py:f")).tests is None, "the function decides"
    named = Task("t", {"environment": {"docker_image": "a/b:1"}}, folder=path)
    assert (sandbox(named, settings(tmp_path)).image, sandbox(named, settings(tmp_path)).context) == ("a/b:1", None)
    line = sandbox(Task("t", {"environment": "words of its own"}), settings(tmp_path, image="c"))
    assert line == Sandbox("c", None, 1.0, 2048, None, 300.0)
    assert sandbox(Task("t", {"image": "d"}), settings(tmp_path, image="c")).image == "d"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "has no image: give it environment/Dockerfile, a field image, or --image"),
        ({"image": "--privileged"}, "'t': image: got '--privileged', must be the name of an image"),
        ({"image": 7}, "'t': image: got 7, must be"),
        ({"image": "x", "environment": {"cpus": 0}}, "environment.cpus: got 0, must be a number of at least 0.01"),
        ({"image": "x", "environment": {"memory_mb": "2G"}}, "environment.memory_mb: got '2G', must be a number of at least 16"),
        ({"image": "x", "environment": 3}, "environment: got 3, must be a table"),
        ({"image": "x", "verifier": {"timeout_sec": True}}, "verifier.timeout_sec: got True, must be a number"),
    ],
)  # fmt: skip
def test_a_task_that_can_not_be_is_named(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        sandbox(Task("t", fields, folder=folder(tmp_path, dockerfile=False)), settings(tmp_path))
    assert said in refused.value.message and refused.value.field == "tasks"


def test_tests_without_a_script_are_refused(tmp_path: Path) -> None:
    task = Task("t", {}, folder=folder(tmp_path, tests=False))
    with pytest.raises(ConfigError, match=r"tests/ has no test.sh: give it one, or a reward function"):
        sandbox(task, settings(tmp_path))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"executor": "local", "image": "x"}, "image: is for containers"),
        ({"executor": "local", "memory_mb": 64}, "memory_mb: is for containers"),
        ({"image": "-v/:/host"}, "must be the name of an image"),
        ({"forwarder_image": ""}, "must be the name of an image"),
        ({"work_dir": "/a:b"}, "a path with a colon"),
        ({"memory_mb": 3}, "greater than or equal to 16"),
    ],
)
def test_settings_that_can_not_be_are_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings(tmp_path, **given)


def test_what_an_engine_says_is_told_without_what_it_tried_again() -> None:
    tried = 'time="2026-11-23T17:02:56Z" level=warning msg="Failed, retrying in 2s"'
    assert _last_lines(f"one\n{tried}\n\n two\n".encode()) == "one; two"
    assert _last_lines(tried.encode()) == tried and _last_lines(b"") == ""
    assert _last_lines(b"x" * 1000) == "…" + "x" * MOST_SAID


def test_an_engine_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "t", "image": "x"}\n')
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="executor: docker: not found on PATH"):
        Prepared.of(settings(tmp_path, tasks=tmp_path / "tasks.jsonl", executor="docker"), "r")


def test_a_digest_is_of_all_that_a_build_sees(tmp_path: Path) -> None:
    seen = {digest(tmp_path)}
    (tmp_path / "a").write_text("1")
    seen.add(digest(tmp_path))
    (tmp_path / "a").write_text("2")
    seen.add(digest(tmp_path))
    (tmp_path / "a").chmod(0o755)
    seen.add(digest(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    seen.add(digest(tmp_path))
    (tmp_path / "c").symlink_to("b")
    seen.add(digest(tmp_path))
    assert len(seen) == 6 and digest(tmp_path) in seen


def test_a_request_of_the_trial_goes_to_the_proxy() -> None:
    head = b"POST /steno/g.0/v1/chat/completions?x=1 HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nConnection: keep-alive\r\nX-A: b\r\n\r\n"
    assert ROUTE.passed_on(head) == PassedOn(
        b"POST /steno/g.0/v1/chat/completions?x=1 HTTP/1.1\r\nhost: proxy.example\r\nX-A: b\r\nconnection: close\r\n\r\n",
        False,
    )
    assert (ROUTE.host, ROUTE.port, ROUTE.tls, ROUTE.health) == ("proxy.example", 443, True, "/steno/healthz")
    assert ROUTE.passed_on(b"GET /steno/healthz HTTP/1.1\r\n\r\n").head.startswith(b"GET /steno/healthz ")
    assert (Route("http://h:9/g.0").port, Route("http://h:9/g.0").health) == (9, "/healthz")


@pytest.mark.parametrize(
    "target",
    [
        "/", "/sessions", "/steno/sessions", "/steno/g.1/v1/models", "/steno/g.0", "/steno/g.00/v1", "/steno/g.0/../sessions",
        "/steno/g.0/%2e%2E/sessions", "/steno/g.0/%252e%252e/sessions", "/steno/g.0/..%2fsessions", "/steno/g.0/..\\sessions",
        "http://proxy.example/steno/g.0/v1/models", "proxy.example:443", "*", "/steno/healthz/x", "//steno/g.0/v1",
    ],
)  # fmt: skip
def test_any_other_request_does_not(target: str) -> None:
    with pytest.raises(NotPassedOn, match=r"a trial reaches what is below /steno/g\.0/ and nothing else") as refused:
        ROUTE.passed_on(f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert refused.value.status == "403 Forbidden"


@pytest.mark.parametrize(
    "head",
    [
        b"POST /steno/healthz HTTP/1.1", b"GET /steno/g.0/v1 HTTP/2", b"GET /steno/g.0/v1", b"GET  /steno/g.0/v1 HTTP/1.1", b"",
        b"GET /steno/g.0/v1 HTTP/1.1\r\na: b\nGET /sessions HTTP/1.1", b"GET /steno/g.0/v1 HTTP/1.1\r\na: b\r\n folded",
        b"GET /steno/g.0/v1 HTTP/1.1\r\na: b\rc: d",
    ],
)  # fmt: skip
def test_a_head_that_can_be_read_in_two_ways_is_refused(head: bytes) -> None:
    with pytest.raises(NotPassedOn):
        ROUTE.passed_on(head + b"\r\n\r\n")


def test_a_websocket_is_passed_on_as_one() -> None:
    asked = b"Host: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Key: k\r\n\r\n"
    assert ROUTE.passed_on(b"GET /steno/g.0/v1/responses HTTP/1.1\r\n" + asked) == PassedOn(
        b"GET /steno/g.0/v1/responses HTTP/1.1\r\nhost: proxy.example\r\nSec-WebSocket-Key: k\r\nconnection: Upgrade\r\n"
        b"upgrade: websocket\r\n\r\n",
        True,
    )
    for start in (b"POST /steno/g.0/v1 HTTP/1.1\r\n", b"GET /steno/healthz HTTP/1.1\r\n"):
        found = ROUTE.passed_on(start + asked)
        assert (
            not found.opens_socket and b"pgrade" not in found.head and found.head.endswith(b"connection: close\r\n\r\n")
        )
    for other in (b"Upgrade: h2c\r\n", b"Upgrade: websocket\r\nUpgrade: h2c\r\n"):
        assert not ROUTE.passed_on(b"GET /steno/g.0/v1 HTTP/1.1\r\n" + other + b"\r\n").opens_socket
    for body in (b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"):
        with pytest.raises(NotPassedOn, match="a WebSocket whose head has a body"):
            ROUTE.passed_on(b"GET /steno/g.0/v1 HTTP/1.1\r\n" + body + asked)


@given(st.binary(max_size=200))
def test_whatever_passes_is_below_the_trial(noise: bytes) -> None:
    try:
        passed = ROUTE.passed_on(b"GET /steno/" + noise + b"\r\n\r\n")
    except NotPassedOn:
        return
    first, *headers = passed.head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert first.startswith((b"GET /steno/g.0/", b"GET /steno/healthz")) and first.count(b" ") == 2
    assert headers[-1] == b"connection: close"


def test_a_container_belongs_to_rollouts_that_run() -> None:
    here = Launcher.here()
    ours = {"steno.run": "r", "steno.launcher": here.label}
    assert Launcher.of(here.label) == here
    assert not here.has_left(ours) and not here.knows_gone(here.name)
    dead = replace(here, began="1")
    assert here.has_left({"steno.run": "r", "steno.launcher": dead.label}), "its number is another process's by now"
    assert here.knows_gone(dead.name)
    before = replace(here, place="another boot/pid:[1]")
    assert here.has_left({"steno.run": "r", "steno.launcher": before.label}) and not here.knows_gone(before.name)
    inside = replace(dead, place=f"{here.place.partition('/')[0]}/pid:[1]")
    assert not here.has_left({"steno.run": "r", "steno.launcher": inside.label}), "it can't be seen from here"
    assert not here.knows_gone(inside.name) and not here.knows_gone("a-name-of-another-kind")
    assert not here.has_left({"steno.run": "x"})
