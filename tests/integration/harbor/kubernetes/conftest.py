"""A cluster of one node, and `steno rollout --harbor … --environment kubernetes` on it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.containers.test_containers import AGENT
from tests.integration.harbor.conftest import Harbor
from tests.integration.harbor.kubernetes.cluster import REGISTRY, Cluster
from tests.support.machine import tiny_image
from tests.support.programs.stack import Stack

PROGRAMS = "bash tar tee find head wc tr kill mkfifo".split()
CHECK = """#!/bin/bash
if grep -q hello /app/answer.txt; then r=1; else r=0; fi
printf '{"reward": %s}' $r >/logs/verifier/reward.json
"""


@dataclass
class Pods(Harbor):
    """`steno rollout --harbor … --environment kubernetes`."""

    cluster: Cluster | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def words(self, tasks: Path, *options: str, command: list[str]) -> list[str]:
        assert self.cluster is not None
        words = super().words(tasks, *options, command=command)
        words[words.index("podman")] = "kubernetes"
        given = {
            "kubeconfig": str(self.cluster.config), "deadline_s": 3600, "queue": "of-tests", "image_timeout_s": 30.0,
            **self.options,
        }  # fmt: skip
        return [*words, "--environment-options", json.dumps(given)]

    def pod_task(self, name: str, instruction: str, toml: str = "", **files: str) -> Path:
        (self.folder / "tasks" / name / "environment").mkdir(parents=True)
        given = {"instruction.md": instruction, "tests/test.sh": CHECK, "environment/agent.py": AGENT, **files}
        found = self.task(name, f'{toml}[environment]\ndocker_image = "{REGISTRY}/{name}"\ncpus = 1\n', given)
        (found / name / "environment/Dockerfile").unlink()
        return found


@pytest.fixture(scope="session")
def small_image(storage: Path) -> str:
    """Without agents: the ones here are scripts."""

    def add(root: Path) -> None:
        (root / "etc").mkdir()
        (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")

    programs = (*tiny_image.PROGRAMS, *PROGRAMS)
    made = tiny_image.make(storage / "pods", "podman", name="localhost/steno-pods:latest", programs=programs, add=add)
    shutil.rmtree(storage / "pods")
    return made


@pytest.fixture
def cluster(small_image: str, tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "cluster").mkdir()
    with Cluster(tmp_path / "cluster", small_image).running() as found:
        yield found


@pytest.fixture
def rollout(stack: Stack, cluster: Cluster, tmp_path: Path) -> Iterator[Pods]:
    yield Pods(stack, tmp_path, cluster=cluster)
    subprocess.run(["podman", "rm", "--all", "--force", "--time=0"], capture_output=True)
