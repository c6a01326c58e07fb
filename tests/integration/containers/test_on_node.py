"""What the process of an attempt on a node of Ray's does in containers, started as Ray's worker starts it: without Ray."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from steno.client.client import Client
from steno.contracts.rest import GroupSpec
from steno_rollouts.config import RolloutSettings
from steno_rollouts.outcome import EndReason
from steno_rollouts.tasks.task import load_tasks
from steno_rollouts.trials.ray import worker
from steno_rollouts.trials.ray.parcels import Answer, Keys, NodeRequest, packed
from tests.integration.containers.conftest import ADMIN, Containers
from tests.integration.containers.test_containers import AGENT
from tests.support.machine.tiny_image import NAME

pytestmark = pytest.mark.containers

PLACE = ("0123456789abcdef", "10.0.0.1")


def parcel(rollout: Containers, do: str) -> bytes:
    """A trial of a task that is built from a Dockerfile, and nowhere but in the parcel."""
    dockerfile = f"FROM {NAME}\nCOPY . /opt/agent/\nWORKDIR /app\n"
    tests = "grep -q hello answer.txt"
    folder = rollout.task("one", tests=tests, mark_txt=uuid.uuid4().hex, agent_py=AGENT, Dockerfile=dockerfile)
    settings = RolloutSettings(
        tasks=folder, command=["sh", "-c", do], executor="ray", ray_runner=rollout.engine, forwarder_image=NAME,  # type: ignore[arg-type]
        proxy=rollout.stack.url, work_dir=rollout.folder / "there", ray_return_kb=1, grace_s=0.5,
    )  # fmt: skip
    (task,) = load_tasks(folder)
    assert task.folder is not None
    sent = packed(task.folder)
    with Client(rollout.stack.url, ADMIN) as steno:
        group = steno.create_group(GroupSpec(group_id=uuid.uuid4().hex, run_id="node", task={"a": 1}, size=1))
    trial = group.trials[0]
    request = NodeRequest(
        "play",
        settings,
        "node",
        replace(task, folder=Path("elsewhere/one")),
        trial.model_copy(update={"api_key": None}),
    )
    keys = pickle.dumps(Keys(trial.api_key, group.harness_key))
    return pickle.dumps((keys, pickle.dumps(request), sent, PLACE))


def test_an_attempt_is_built_run_and_verified_from_its_parcel(rollout: Containers) -> None:
    say = "python3 /opt/agent/agent.py >answer.txt; cat answer.txt; python3 -c 'print(\"x\" * 3000)'; echo the end"
    answer = pickle.loads(worker._attended(parcel(rollout, say)))
    assert isinstance(answer, Answer) and answer.problem is None and answer.outcome is not None
    assert (answer.outcome.reason, answer.outcome.reward) == (EndReason.COMPLETED, 1.0), answer
    assert (answer.node, answer.exit.code, answer.folder) == (PLACE[1], 0, None)
    assert answer.stdout.startswith(b"[steno: the first ") and answer.stdout.endswith(b"x\nthe end\n")
    assert rollout.left() == [] and not list((rollout.folder / "there" / f"node-{PLACE[0][:12]}").iterdir())


def test_nothing_is_left_of_an_attempt_whose_worker_is_gone(rollout: Containers) -> None:
    """However it went: all that is told is the end of a pipe."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", worker.MODULE, str(writing)], stdin=subprocess.PIPE, pass_fds=[writing]
    )
    os.close(writing)
    assert process.stdin is not None
    sent = parcel(rollout, "python3 /opt/agent/agent.py; while :; do sleep 1; done")
    process.stdin.write(len(sent).to_bytes(8, "big") + sent)
    process.stdin.flush()
    until = time.monotonic() + 180
    while not any(name.endswith("-agent") for name in rollout.left("--filter=status=running")):
        assert time.monotonic() < until
        time.sleep(0.1)
    process.stdin.close()
    assert os.read(reading, 1) == b"", "it has ended, and nobody is there to be answered"
    os.close(reading)
    process.wait()
    assert rollout.left() == []
