"""A kubeconfig whose user is a program, as those of clouds are: what it gives runs out, and it fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.integration.harbor.conftest import PYTHON
from tests.integration.harbor.kubernetes.cluster import Cluster
from tests.integration.harbor.kubernetes.conftest import Pods
from tests.integration.harbor.kubernetes.test_api import PODS
from tests.integration.harbor.kubernetes.test_kubernetes import OPTIONS, TURN

pytestmark = pytest.mark.harbor

HERE = Path(__file__).parent
NONE = "NoCredentials: no credentials by what the kubeconfig says of its user: "


def test_trials_go_on_while_each_token_runs_out_after_a_few_requests(rollout: Pods, cluster: Cluster) -> None:
    """In the middle of commands, of transfers and of watches."""
    given = cluster.by_program()
    cluster.uses, cluster.restless = 6, True
    rollout.pod_task("a", TURN, 'artifacts = ["/app"]\n')
    tasks = rollout.pod_task("b", TURN)
    said = rollout(tasks, "--run", "program", *OPTIONS, command=[])
    shown = [(row["end_reason"], row["reward"], row["turns"], row["attempts"]) for row in rollout.rows()]
    assert shown == [("completed", 1.0, 1, 1)] * 2, said
    over = [token for token, times in cluster.used.items() if times > cluster.uses]
    assert len(over) > 3 and len(list(given.iterdir())) > len(over), "refused, and asked for anew"
    assert cluster.pods == {} and rollout.left() == []


def test_a_program_that_fails_is_told_and_one_that_fails_in_between_is_asked_again(cluster: Cluster) -> None:
    """By all calls that were refused together, once."""
    given = cluster.by_program()
    cluster.uses = 5
    said = done(HERE / "renewals.py", PODS, cluster.config, given)
    assert said[0].startswith(f"{NONE}exec: process returned 1. the account can't be reached")
    assert said[1:] == [", ".join(["0 pods"] * 5)] * 2
    assert len(list(given.glob("token-*"))) == 2


def test_a_program_that_is_not_there_is_told_by_its_name(cluster: Cluster) -> None:
    cluster.by_program()
    config = yaml.safe_load(cluster.config.read_text())
    config["users"][0]["user"]["exec"]["command"] = "of-a-cloud"
    cluster.config.write_text(yaml.safe_dump(config))
    said = done(HERE / "probe.py", PODS, cluster.config)
    assert NONE in said[0] and "of-a-cloud" in said[0]


def done(*words: object) -> list[str]:
    ran = subprocess.run([PYTHON, *map(str, words)], capture_output=True, text=True, timeout=120)
    return ran.stdout.splitlines() or ran.stderr.strip().splitlines()[-1:]
