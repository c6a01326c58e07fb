"""`steno rollout --verifiers`, as its users run it: verifiers in an environment of its own, its own agents with their tools in
processes of this machine, a proxy with keys and a worker that run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steno.client.client import Client
from steno.contracts.records import Session
from tests.integration.rollouts.conftest import ADMIN, until_served
from tests.support.programs.ports import free_port
from tests.support.programs.stack import ROOT, Stack, running
from tests.support.programs.variables import without_settings

pytestmark = pytest.mark.agents

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steno"
NAME = f"verifiers-{hashlib.sha256((ROOT / 'requirements' / 'verifiers.txt').read_bytes()).hexdigest()[:12]}"
VENV = Path(os.environ.get("STENO_TEST_VERIFIERS_VENV") or CACHE / NAME)
"""As .ci/run makes it."""
HERE = Path(__file__).parent
LOCAL = {"type": "subprocess"}
BASH = {"harness": {"id": "bash"}, "runtime": LOCAL}
CHAT = {"harness": {"id": "null"}, "runtime": LOCAL}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    proxy = ["--admin-key", ADMIN, "--worker-key", "worker-key"]
    with without_settings(), running(tmp_path_factory.mktemp("stack"), None, proxy=proxy) as found:
        script = HERE / "verifiers_script.py"
        found.start_worker("--engine", "scripted", "--script", f"{script}:reply", "--key", "worker-key")
        until_served(found)
        yield found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """verifiers keeps scripts and folders of trials there."""
    return tmp_path_factory.mktemp("home")


def python(*words: str, home: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "rollouts", HERE / "verifiers_tasks")))
    return subprocess.run(
        [str(VENV / "bin" / "python"), *words],
        cwd=folder, capture_output=True, text=True, timeout=300,
        env={
            **os.environ, "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}", "HOME": str(home), "PYTHONPATH": paths,
            "UV_CACHE_DIR": str(CACHE / "uv"), **variables,
        },
    )  # fmt: skip


def roll_out(
    stack: Stack, home: Path, folder: Path, run: str, taskset: str, options: dict[str, Any], *words: str, code: int = 0
) -> list[dict[str, Any]]:
    """The lines of `--results`."""
    given = ["--verifiers", taskset, "--verifiers-options", json.dumps(options), "--run", run, *words]
    kept = ["--results", "results.jsonl", "--work-dir", str(folder / "work"), "--keep", "all", "--retries", "0"]
    done = python(
        "-m", "steno", "rollout", *given, *kept,
        home=home, folder=folder, STENO_PROXY=stack.url, STENO_ADMIN_KEY=ADMIN,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr + stack.logs()
    (folder / "stderr.log").write_text(done.stderr)
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def sessions(client: Client, run: str) -> list[Session]:
    return [session for session in client.sessions() if session.run_id == run]


def test_an_agent_with_tools_is_on_record_with_what_its_rewards_say(stack: Stack, home: Path, tmp_path: Path) -> None:
    """And scored with its group, by what they said."""
    (tmp_path / "judge.py").write_text("def halved(trials): return [one.reward / 2 for one in trials]")
    judged = ("--group-reward", f"{tmp_path / 'judge.py'}:halved", "--reward-timeout-s", "60")
    results = roll_out(stack, home, tmp_path, "words", "steno_words", {"agent": BASH}, "--group-size", "2", *judged)
    assert "warning: agent: runs as processes of this machine, not isolated" in (tmp_path / "stderr.log").read_text()
    assert sorted((row["task_id"], row["reward"], row["end_reason"]) for row in results) == [
        ("amber", 1.0, "completed"), ("amber", 1.0, "completed"), ("cedar", 0.0, "completed"), ("cedar", 0.0, "completed"),
    ]  # fmt: skip
    with Client(stack.url, ADMIN) as client:
        for session in sessions(client, "words"):
            assert session.metrics["calls"] == 2.0 and session.metrics["own_reward"] == (2.0 if session.reward else 0.0)
            assert session.metrics["right"] == (1.0 if session.reward else 0.0), "a reward without its weight"
            turns = list(client.turns(session.trial_id))
            assert [turn.fork_reason for turn in turns] == [None, None], "one conversation, continuous"
            assert {turn.model for turn in turns} == {"policy"}
            [result] = [message for message in turns[1].messages if message["role"] == "tool"]
            assert str(result["content"]).split()[0] == "0", "no key of a trial is in what its agent runs in"
            assert session.group_id is not None
            task = client.group(session.group_id).task
            assert "backwards" in task["prompt"] and "answer" not in task
    for row in results:
        episode = json.loads((Path(row["folder"]) / "episode.json").read_text())
        assert episode["ok"] and episode["env"]["id"] == "steno_words"


def test_agents_of_one_trial_ask_by_their_names_and_one_of_them_has_the_reward(
    stack: Stack, home: Path, tmp_path: Path
) -> None:
    options = {"solver": CHAT, "critic": CHAT}
    words = ("--limit", "2", "--group-size", "1", "--reward-key", "solver")
    results = roll_out(stack, home, tmp_path, "pair", "steno_pair", options, *words)
    assert sorted((row["task_id"], row["reward"]) for row in results) == [("0", 1.0), ("1", 1.0)]
    assert all(row["metrics"].items() >= {"solver/right": 1.0, "critic/right": 0.25}.items() for row in results)
    with Client(stack.url, ADMIN) as client:
        for session in sessions(client, "pair"):
            assert [turn.model for turn in client.turns(session.trial_id)] == ["solver", "critic"]
    (tmp_path / "other").mkdir()
    [row] = roll_out(
        stack, home, tmp_path / "other", "unsure", "steno_pair", options, "--limit", "1", "--group-size", "1", code=1
    )
    assert row["end_reason"] == "reward_error"
    assert row["detail"] == (
        "reward_key: got 'reward', and critic, solver have rewards, while a trial has one: name one of them"
    )
    assert "the policy plays solver, critic" in (tmp_path / "stderr.log").read_text()


def test_the_model_is_asked_at_the_agents_port_where_the_control_plane_has_its_own(home: Path, tmp_path: Path) -> None:
    control = free_port()
    proxy = ["--admin-key", ADMIN, "--worker-key", "worker-key", "--control-port", str(control)]
    with without_settings(), running(tmp_path / "stack", None, proxy=proxy) as found:
        stack = replace(found, port=control, workers=found.workers)
        script = HERE / "verifiers_script.py"
        stack.start_worker("--engine", "scripted", "--script", f"{script}:reply", "--key", "worker-key")
        until_served(stack)
        (tmp_path / "run").mkdir()
        words = ("--limit", "1", "--group-size", "1")
        [row] = roll_out(stack, home, tmp_path / "run", "ports", "steno_words", {"agent": BASH}, *words)
    assert (row["end_reason"], row["turns"]) == ("completed", 2)


def test_what_ended_a_trial_is_said(stack: Stack, home: Path, tmp_path: Path) -> None:
    options = {"agent": BASH, "taskset": {"words": ["burned", "amber"]}}
    words = ("--group-size", "1", "--max-turns", "1")
    results = roll_out(stack, home, tmp_path, "ends", "steno_words", options, *words, code=1)
    found = {row["task_id"]: (row["end_reason"], row["detail"]) for row in results}
    assert found["burned"][0] == "start_failed" and "the word is burned" in found["burned"][1]
    assert found["amber"][0] == "limit:max_turns"
    (tmp_path / "chat").mkdir()
    options = {"agent": CHAT, "taskset": {"words": ["slow"]}}
    [row] = roll_out(
        stack, home, tmp_path / "chat", "slow", "steno_words", options, "--group-size", "1", "--timeout-s", "20", code=1
    )
    assert (row["end_reason"], row["reward"]) == ("timeout", None)


PAIR = {"solver": {"runtime": LOCAL}, "critic": {"runtime": LOCAL}}
WRONG: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("steno_words", {"agent": {"harnes": 1}}, {}, "verifiers_options: agent.harnes: Extra inputs are not permitted"),
    ("steno_words", {"agent": {"harness": {"id": "nope"}}}, {}, "verifiers: harness 'nope' not found"),
    ("steno_words", {"taskset": {"id": "x"}}, {}, "its id is --verifiers"),
    ("steno_words", {"agent": {"retries": {"max_retries": 2}}}, {}, "verifiers_options: agent.retries: must be 0"),
    ("steno_words", {"agent": {"model": "x", "runtime": LOCAL}}, {}, "agent.model: got 'x' without a client"),
    (
        "steno_words",
        {"agent": {"runtime": {"type": "prime"}}},
        {},
        "agent.runtime.type: got prime, which needs a login",
    ),
    ("steno_words", {"agent": CHAT, "taskset": {"words": ["odd word"]}}, {}, "SystemExit: no such word"),
    (
        "steno_words",
        {"agent": CHAT},
        {"reward_key": "right"},
        "reward_key: got 'right', must be reward, or an agent of",
    ),
    ("steno_words", {"agent": CHAT}, {"hide": ["tests"]}, "hide: no task has a field 'tests'"),
    ("steno_nowhere", {}, {}, "verifiers: taskset 'steno_nowhere' not found"),
    ("steno_pair", PAIR, {"agent_model": "x"}, "agent_model: can't be given with several agents: solver, critic"),
    ("steno_pair", PAIR, {}, "limit: missing: steno_pair has tasks without end"),
    ("steno_pair", PAIR, {"limit": 2, "filter": ["a*"]}, "filter: can't be given: steno_pair has tasks without end"),
]


def test_what_can_not_be_run_is_refused_by_name_and_tasks_are_named_apart(home: Path, tmp_path: Path) -> None:
    """In one process: to import verifiers takes seconds."""
    program = (
        "import json, sys\n"
        "from steno.contracts.errors import ConfigError\n"
        "from steno_rollouts.build import Prepared\n"
        "from steno_rollouts.config import RolloutSettings\n"
        "for taskset, options, more in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        found = Prepared.of(RolloutSettings(verifiers=taskset, verifiers_options=options, **more), 'r')\n"
        "        print([[task.task_id, sorted(task.fields), list(task.hidden), task.timeout_s] for task in found.tasks])\n"
        "    except ConfigError as error:\n"
        "        print(error.message.splitlines()[0])\n"
    )
    limited = {**CHAT, "timeout": {"rollout": 60}}
    words = {"agent": limited, "taskset": {"words": ["amber", "amber"]}}
    shown = ["name", "prompt", "task_id"]
    right = [
        (
            "steno_words", words, {},
            [["amber", shown, ["answer"], 3660.0], ["amber-2", shown, ["answer"], 3660.0]],
        ),
        ("steno_pair", PAIR, {"limit": 1}, [["0", ["idx", "prompt", "task_id"], ["answer"], None]]),
        ("steno_pair", {**PAIR, "timeout": {"episode": 7200}}, {"limit": 1},
         [["0", ["idx", "prompt", "task_id"], ["answer"], 10800.0]]),
    ]  # fmt: skip
    asked = json.dumps([case[:3] for case in (*WRONG, *right)])
    done = python("-c", program, asked, home=home, folder=tmp_path)
    said = done.stdout.splitlines()
    assert len(said) == len(WRONG) + len(right), done.stdout + done.stderr
    for line, (*_, expected) in zip(said, WRONG, strict=False):
        assert expected in line
    assert said[len(WRONG) :] == [str(expected) for *_, expected in right]
