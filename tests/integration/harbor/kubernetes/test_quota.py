"""A namespace whose ResourceQuota has no room: waited for, told by its name, and told at once where it never has."""

from __future__ import annotations

import subprocess

import pytest

from tests.integration.harbor.conftest import Sessions
from tests.integration.harbor.kubernetes.answers import Fault
from tests.integration.harbor.kubernetes.cluster import Cluster
from tests.integration.harbor.kubernetes.conftest import Pods
from tests.integration.harbor.kubernetes.test_kubernetes import OPTIONS, TURN
from tests.support.programs.processes import until

pytestmark = pytest.mark.harbor

HOLDS = f"{TURN}while [ ! -e /go ]; do sleep 0.1; done\n"
"""An agent that keeps its pod until it is let go."""
TOGETHER = (*OPTIONS, "--in-flight", "2", "--stop-after-failures", "0")
PODS = 'pods "p" is forbidden: exceeded quota: of-tests, requested: pods=1, used: pods=9, limited: pods=9'
SECRETS = (
    'secrets "s" is forbidden: exceeded quota: of-tests, requested: secrets=1, used: secrets=9, limited: secrets=9'
)


def let_go(cluster: Cluster) -> None:
    for name in list(cluster.pods):
        subprocess.run(["podman", "exec", name, "touch", "/go"], capture_output=True)


def start(rollout: Pods, run: str) -> subprocess.Popen[str]:
    rollout.pod_task("a", HOLDS)
    tasks = rollout.pod_task("b", HOLDS)
    return rollout.start(tasks, "--run", run, *TOGETHER, command=[])


def test_a_pod_waits_until_the_quota_has_room(rollout: Pods, cluster: Cluster, sessions: Sessions) -> None:
    cluster.quota = 1
    cluster.faults.append(Fault("POST", "/secrets", "refuse", status=403, words=SECRETS, times=2))
    process = start(rollout, "waits")
    until(lambda: cluster.over_quota >= 2 and turns(sessions, "waits") == 1, "the second pod was not refused")
    until(lambda: let_go(cluster) or process.poll() is not None, "the trials did not end")
    _, said = process.communicate(timeout=60)
    assert [(row["end_reason"], row["attempts"]) for row in rollout.rows()] == [("completed", 1)] * 2, said
    assert cluster.pods == {} and rollout.left() == [] and not any(fault.times for fault in cluster.faults)


def test_that_there_is_no_room_in_time_is_told_by_the_quotas_name(
    rollout: Pods, cluster: Cluster, sessions: Sessions
) -> None:
    """No pod is started: one that is has as long for itself, and machines may be slow."""
    cluster.faults.append(Fault("POST", "/pods", "refuse", status=403, words=PODS, times=1_000))
    rollout.options["start_timeout_s"] = 3.0
    process = rollout.start(rollout.pod_task("a", TURN), "--run", "full", *OPTIONS, command=[])
    _, said = process.communicate(timeout=300)
    told = " ".join(said.split())
    assert process.returncode and sessions("full") == {}
    assert "exceeded quota: of-tests, requested: pods=1, used: pods=9" in told, said
    assert "start_timeout_s = 3 s" in told, said


def test_what_is_more_than_the_whole_quota_is_told_before_anything_is_registered(
    rollout: Pods, cluster: Cluster, sessions: Sessions
) -> None:
    cluster.quota = 0
    process = rollout.start(rollout.pod_task("a", TURN), "--run", "never", *OPTIONS, command=[])
    _, said = process.communicate(timeout=300)
    assert process.returncode and "that is more than quota of-tests has in all" in " ".join(said.split())
    assert cluster.over_quota == 1 and sessions("never") == {}


def turns(sessions: Sessions, run: str) -> int:
    return sum(each.counts.turns for each in sessions(run).values())
