"""`ray job submit -- steno rollout --executor ray …`: a launcher on the cluster's head, which Ray starts and stops."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from steno.contracts.records import Session
from tests.integration.rollouts.conftest import ADMIN, Rollout
from tests.integration.rollouts.executors.test_ray import ASK, NODES, PYTHON, QUIET
from tests.support.programs.ports import free_port
from tests.support.programs.processes import until
from tests.support.programs.stack import Stack
from tests.support.sources import ROOT

pytestmark = pytest.mark.ray

Sessions = Callable[[str], list[Session]]
PATIENT = {"RAY_JOB_STOP_WAIT_TIME_S": "60"}
"""As told to the head: how long a job has to end its trials, that is stopped."""


class Head(NamedTuple):
    """address: given to jobs, since a job of a machine with several clusters is told of the newest one by Ray itself."""

    address: str
    dashboard: str


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """Of a cluster of one node."""
    log = tmp_path_factory.mktemp("ray") / "nodes.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [PYTHON, "-m", NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, cwd=ROOT,
            env={**os.environ, **QUIET, **PATIENT},
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        ports = {"dashboard_port": 0, "dashboard_agent_listen_port": free_port()}
        node = {"num_cpus": 2, "include_dashboard": True, **ports}
        process.stdin.write(json.dumps(["add", node]) + "\n")
        process.stdin.flush()
        address, _, _, dashboard = json.loads(process.stdout.readline())
        yield Head(address, f"http://{dashboard}")
    finally:
        process.communicate(timeout=120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """That is sent with a job: the agent's program, the tasks and the settings."""
    made = tmp_path / "sent"
    made.mkdir()
    (made / "agent.py").write_text(
        f"{ASK}ask()\n"
        "if os.environ['STENO_TASK_TASK_ID'] == 'stays': note('asked'); wait('go')\n"
        "open('reward.txt', 'w').write('1')\n"
    )
    (made / "run-agent.sh").write_text(f'#!/bin/sh\nNOTES={tmp_path} exec {PYTHON} "$(dirname "$0")/agent.py"\n')
    (made / "run-agent.sh").chmod(0o755)
    (tmp_path / "run.key").write_text(ADMIN)
    (tmp_path / "run.key").chmod(0o600)
    return made


def ray(*words: str) -> subprocess.CompletedProcess[str]:
    program = [str(Path(PYTHON).with_name("ray")), *words]
    return subprocess.run(program, capture_output=True, text=True, timeout=300, env={**os.environ, **QUIET})


def submitted(head: Head, folder: Path, stack: Stack, run: str, *options: str) -> subprocess.CompletedProcess[str]:
    tasks = {"ends": ["a", "b"], "stopped": ["stays"]}[run]
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"id": task}) + "\n" for task in tasks))
    beside = folder.parent
    words = [
        PYTHON, "-m", "steno", "rollout", "--executor", "ray", "--ray-address", head.address, "--confine", "off", "--tasks",
        "tasks.jsonl", "--run", run, "--group-size", "1", "--proxy", stack.url, "--key-file", str(beside / "run.key"),
        "--work-dir", str(beside / "work"), "--results", str(beside / f"{run}.jsonl"), "--", "./run-agent.sh",
    ]  # fmt: skip
    sent = ("--working-dir", str(folder), "--submission-id", run, *options)
    return ray("job", "submit", "--address", head.dashboard, *sent, "--", *words)


def test_a_launcher_runs_as_a_job_whose_folder_has_the_agent(
    head: Head, folder: Path, stack: Stack, sessions: Sessions
) -> None:
    done = submitted(head, folder, stack, "ends")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [(each.end_reason, each.reward, each.counts.turns) for each in sessions("ends")] == [
        ("completed", 1.0, 1)
    ] * 2
    assert ADMIN not in done.stdout + done.stderr


def test_a_job_that_is_stopped_ends_its_trials_first(
    head: Head, folder: Path, stack: Stack, sessions: Sessions
) -> None:
    done = submitted(head, folder, stack, "stopped", "--no-wait")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    until(
        lambda: list(folder.parent.glob("stays.asked.*")),
        lambda: ray("job", "logs", "--address", head.dashboard, "stopped").stdout,
    )
    stopped = ray("job", "stop", "--address", head.dashboard, "stopped")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    [session] = sessions("stopped")
    assert (session.end_reason, session.counts.turns) == ("cancelled", 1)
    [row] = (folder.with_name("stopped.jsonl")).read_text().splitlines()
    assert json.loads(row)["end_reason"] == "cancelled"


def test_a_cluster_from_outside_is_reached_by_a_job_alone(head: Head, stack: Stack, tmp_path: Path) -> None:
    rollout = Rollout(stack, tmp_path, QUIET, forked=False, python=PYTHON)
    options = ("--executor", "ray", "--ray-address", head.dashboard)
    said = rollout(rollout.tasks({"id": "a"}), *options, command=["true"], code=2)
    assert "from outside of the cluster: ray job submit -- steno rollout" in " ".join(said.split())
