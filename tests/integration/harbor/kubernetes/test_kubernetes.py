"""Trials in pods of a cluster that is played (`cluster.py`), whatever it does: what is on record of each, and what is left."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from steno.client.client import Client
from tests.integration.harbor.conftest import Sessions
from tests.integration.harbor.kubernetes.answers import Fault
from tests.integration.harbor.kubernetes.cluster import REGISTRY, Cluster
from tests.integration.harbor.kubernetes.conftest import CHECK, Pods
from tests.integration.rollouts.conftest import ADMIN
from tests.support.machine.cluster_rights import NEEDED
from tests.support.programs.processes import until
from tests.support.programs.stack import Stack

pytestmark = pytest.mark.harbor

HERE = Path(__file__).parent
OPTIONS = ("--agent", f"{HERE / 'pod_agent.py'}:PodAgent", "--group-size", "1")
TURN = "mkdir -p /app && cd / && STENO_TASK_INSTRUCTION=hello python3 /agent.py >/app/answer.txt\n"
"""Of the agent that is a script: one turn."""
STEP = {"instruction.md": TURN, "tests/test.sh": CHECK}
"""Files of one, in a task that has several."""
STAYS = "echo EVICT ME\nwhile [ ! -e /stays ]; do sleep 0.1; done\n"
"""The first pod of a task that says so is evicted."""


def test_trials_run_in_pods_whatever_the_cluster_does(rollout: Pods, cluster: Cluster) -> None:
    """Answers are lost or late, watches break and are forgotten, nodes evict, an image is not there."""
    apart = 'artifacts = ["/app"]\n'
    rollout.pod_task("a-whole", f"# EVERY WAY\n{TURN}", apart)
    rollout.pod_task("b-early", f"{STAYS}{TURN}")
    rollout.pod_task("c-late", f"{TURN}{STAYS}")
    rollout.pod_task("absent", "echo never")
    steps = {f"steps/{name}/{path}": text for name in "xy" for path, text in STEP.items()}
    tasks = rollout.pod_task("flaky", "", '[[steps]]\nname = "x"\n[[steps]]\nname = "y"\n', **steps)
    cluster.restless, cluster.word_s = True, 5.0
    cluster.faults += [
        Fault("POST", "/pods", "refuse", status=429, headers={"Retry-After": "1"}),
        Fault("POST", "/pods", "refuse", status=409),
        Fault("POST", "/pods", "lose", times=2),
        Fault("PUT", "/leases", "lose"),
        Fault("POST", "/secrets", "lose"),
        Fault("GET", "/exec", "refuse", status=503, times=2),
        Fault("GET", "labelSelector", "refuse", status=500),
        Fault("DELETE", "/pods", "lose"),
        Fault("DELETE", "/pods", "slow", seconds=1.5),
    ]
    said = rollout(tasks, "--run", "pods", *OPTIONS, "--in-flight", "3", "--shuffle-seed", "0", command=[])
    rows: dict[str, dict[str, Any]] = {row["task_id"]: row for row in rollout.rows()}
    shown = {name: (row["end_reason"], row["reward"], row["turns"], row["attempts"]) for name, row in rows.items()}
    assert shown == {
        "a-whole": ("completed", 1.0, 1, 1),
        "b-early": ("completed", 1.0, 1, 2),
        "c-late": ("interrupted", None, 1, 1),
        "absent": ("start_failed", None, 0, 2),
        "flaky": ("completed", 1.0, 2, 1),
    }, said
    given = {key_in(cluster.secrets[pod["metadata"]["name"]]) for pod in cluster.named("b-early")}
    assert len(given - {"none"}) == 2, "what may run on of the first is shut out"
    assert "PodEvicted: pod" in rows["c-late"]["detail"] and "low on resource: memory" in rows["c-late"]["detail"]
    assert "ImageNotPulled: pod" in rows["absent"]["detail"] and f"{REGISTRY}/absent" in rows["absent"]["detail"]
    assert cluster.pods == {} and rollout.left() == [] and all(fault.times == 0 for fault in cluster.faults)
    until(lambda: not cluster.leases, "the launcher's lease goes with it")
    assert cluster.invalid == [] and cluster.asked == NEEDED and cluster.gone == {"status", "event"}
    assert len(cluster.named("a-whole")) == 2 + (first_of(cluster) == "a-whole"), "its agent's and its verifier's"
    for pod in cluster.made:
        marks = pod["metadata"]["annotations"]
        assert marks["steno.run"] == pod["metadata"]["labels"]["steno.run"] == "pods" and marks["steno.launcher"]
        assert pod["spec"]["activeDeadlineSeconds"] == 3600
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "of-tests"
        assert pod["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "1000m"
    owned = {secret["metadata"]["ownerReferences"][0]["uid"] for secret in cluster.secrets.values()}
    agents = [pod for pod in cluster.made if "volumes" in pod["spec"]]
    assert owned == {pod["metadata"]["uid"] for pod in agents} and len(agents) == len(cluster.made) - 1
    assert no_key_in(cluster, rows["a-whole"]["trial_id"], rollout.stack)


def first_of(cluster: Cluster) -> str:
    """The task whose sandbox is set up before anything is registered."""
    return str(cluster.made[0]["spec"]["containers"][0]["image"]).removeprefix(f"{REGISTRY}/")


def key_in(secret: dict[str, Any]) -> str:
    """That an agent was given."""
    return base64.b64decode(secret["data"]["OPENAI_API_KEY"]).decode()


def no_key_in(cluster: Cluster, trial_id: str, stack: Stack) -> bool:
    """Keys of trials begin with their ids' prefix; none is in what the API was asked, but in Secrets."""
    with Client(stack.url, ADMIN) as client:
        assert client.session(trial_id).counts.turns == 1
    keys = {(cluster.folder / name / "OPENAI_API_KEY") for name, secret in cluster.secrets.items() if secret["data"]}
    assert keys and not any(path.exists() for path in keys), "they went with their pods"
    values = {key_in(secret) for secret in cluster.secrets.values()}
    return not any(value != "none" and value in body for value in values for body in cluster.bodies)


def test_nothing_is_left_of_what_was_killed_or_cancelled(rollout: Pods, cluster: Cluster, sessions: Sessions) -> None:
    """Killed in the first trial; gone on with, and cancelled in the second."""
    rollout.pod_task("a", f"{TURN}sleep 600\n")
    tasks = rollout.pod_task("b", f"{TURN}sleep 600\n")

    def started(turns: int) -> subprocess.Popen[str]:
        process = rollout.start(tasks, "--run", "killed", *OPTIONS, "--sequential", command=[])

        def running() -> bool:
            assert process.poll() is None, process.communicate()
            return sum(found.counts.turns for found in sessions("killed").values()) == turns

        until(running, "the trial had no turn")
        assert len(cluster.pods) == 1
        return process

    with started(1) as process:
        process.send_signal(signal.SIGSTOP)  # until nobody is left who could remove anything
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate(timeout=120)
    assert len(cluster.pods) == 1
    with started(2) as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    found = sorted((each.end_reason, each.counts.turns) for each in sessions("killed").values())
    assert found == [("cancelled", 1), ("interrupted", 1)], said
    assert "ending 1 pods, left by rollouts that were killed" in said and cluster.pods == {} and rollout.left() == []


def children(pid: int) -> list[int]:
    """Of all its threads: one that waits for a process may have started it."""
    listed = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(each) for text in listed for each in text.split()]
