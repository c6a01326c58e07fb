"""`--environment docker`: a real daemon with `docker compose`, of the tests' own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.containers.test_containers import AGENT
from tests.integration.harbor.conftest import PROGRAMS, PYTHON, Harbor, Sessions, own_address
from tests.integration.harbor.test_allowlist import AGENT_CLASS
from tests.integration.harbor.test_harbor import APART, TURN
from tests.support.machine import agents_image, sidecar_image, tiny_image
from tests.support.machine.engine_storage import own_storage
from tests.support.machine.far_host import PORT
from tests.support.programs.stack import Stack

pytestmark = pytest.mark.harbor

STEPS = f'{APART}[[steps]]\nname = "first"\n[[steps]]\nname = "second"\n'
LOOK = """#!/bin/bash
[ -s /app/answer.txt ] && [ ! -e /opt/mine ] && r=1 || r=0
printf '{"reward": %s}' $r >/logs/verifier/reward.json
"""


@pytest.fixture
def docker(stack: Stack, tmp_path: Path) -> Iterator[Harbor]:
    with own_storage("docker") as root:
        tiny_image.make(
            root / "image", "docker", name=agents_image.NAME, programs=agents_image.PROGRAMS, add=agents_image.add_user
        )
        sidecar_image.make(root / "sidecar", "docker", PYTHON, PROGRAMS / "gost.py")
        shutil.rmtree(root / "image")
        yield Harbor(stack, tmp_path, engine="docker")


def test_trials_are_held_back_and_verified_apart_and_killed_ones_are_cleaned_up_after(
    docker: Harbor, far: str, sessions: Sessions
) -> None:
    """Of two steps each. The first trial's processes are killed, all of them: what it leaves is removed by its labels."""
    urls = f"proxy=http://{own_address()}:{docker.stack.port}/healthz far=http://{far}:{PORT} udp=http://{far}:{PORT}"
    first = f"{TURN}touch /opt/mine; python3 /opt/task/reach.py {urls} marked=http://{far}:{PORT}\n"
    stays = 'case "$OPENAI_BASE_URL" in *.0/v1) sleep 600 ;; esac\n'
    files = {
        "steps/first/instruction.md": first + stays,
        "steps/second/instruction.md": TURN,
        "steps/first/tests/test.sh": LOOK,
        "steps/second/tests/test.sh": LOOK,
        "environment/agent.py": AGENT,
        "environment/reach.py": (PROGRAMS / "reach.py").read_text(),
        "environment/setup.sh": f"python3 /opt/task/reach.py {urls}\n",
    }
    tasks = docker.task("t", STEPS, files)
    options = ("--run", "docker", "--agent", AGENT_CLASS, "--allow-only-proxy", "--group-size", "2", "--sequential")
    with docker.start(tasks, *options, "--keep", "all", command=[]) as process:
        until = time.monotonic() + 900
        while not any(each.counts.turns for each in sessions("docker").values()):
            assert time.monotonic() < until and process.poll() is None, process.communicate()
            time.sleep(0.1)
        (driver,) = drivers(process.pid)
        os.kill(driver, signal.SIGSTOP)  # or it would remove its sandbox when the rollouts end
        process.kill()
        os.kill(driver, signal.SIGKILL)
        process.communicate()
    assert len(docker.left()) == 2, "its sandbox and the sidecar"
    said = docker(tasks, *options, "--keep", "all", command=[])
    assert "ending 2 containers that Harbor left" in said
    killed, row = sorted(docker.rows(), key=lambda row: row["trial_id"])
    assert (killed["end_reason"], killed["reward"], killed["turns"]) == ("interrupted", None, 1)
    assert (row["end_reason"], row["reward"], row["turns"], row["metrics"]["only_proxy"]) == ("completed", 1.0, 2, 1.0)
    assert row["image"].startswith("sha256:")
    assert said_by(row, "steps/first/agent/setup.txt") == {"proxy": 200, "far": 501, "udp": "sent"}
    reached = said_by(row, "steps/first/agent/said.txt")
    assert reached.pop("proxy") == 200 and reached.pop("marked") == "PermissionError"
    assert set(reached) == {"far", "udp"}
    assert all(str(what).endswith(("Error", "Disconnected")) for what in reached.values()), reached
    assert docker.left() == []
    assert [name for name in named("network") + named("image") if name.startswith("steno-")] == []


def named(kind: str) -> list[str]:
    """Of the daemon's networks or images."""
    form = "{{.Name}}" if kind == "network" else "{{.Repository}}"
    return subprocess.run(
        ["docker", kind, "ls", f"--format={form}"], check=True, capture_output=True, text=True
    ).stdout.split()


def drivers(pid: int) -> list[int]:
    """Harbor's processes among those that a process has started."""
    children = [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    found = [child for child in children if b"driver.py" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return found + [each for child in children if child not in found for each in drivers(child)]


def said_by(row: dict[str, Any], name: str) -> dict[str, Any]:
    (path,) = Path(row["folder"]).glob(f"harbor/*/{name}")
    return dict(json.loads(path.read_text()))
