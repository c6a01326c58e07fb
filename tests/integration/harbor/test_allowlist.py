"""`--allow-only-proxy`: whom an agent reaches then, and whom its set-up does. Harbor's own sidecar, rules and scripts; the filter
in it that decides by the list is ours (`gost.py`), since gost is in no registry of packages."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.containers.test_containers import AGENT
from tests.integration.harbor.conftest import PROGRAMS, PYTHON, Harbor, own_address
from tests.integration.harbor.test_harbor import APART, TURN
from tests.support.machine import sidecar_image
from tests.support.machine.far_host import PORT

pytestmark = pytest.mark.harbor

AGENT_CLASS = f"{PROGRAMS / 'hemmed.py'}:Hemmed"
RIGHTS = (
    '["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "NET_RAW", "SETFCAP", "SETGID", '
    '"SETPCAP", "SETUID", "SYS_CHROOT"]'
)
"""Podman's, and NET_RAW, by which Docker's containers may mark packets as the sidecar marks its own."""
CHECK = """#!/bin/bash
printf '{"reward": 1}' >/logs/verifier/reward.json
"""


@pytest.fixture
def sidecar(rollout: Harbor, tmp_path: Path) -> Harbor:
    """Rollouts for which Harbor finds its sidecar built, and whose containers have the rights of Docker's."""
    sidecar_image.make(tmp_path / "sidecar", "podman", PYTHON, PROGRAMS / "gost.py")
    shutil.rmtree(tmp_path / "sidecar")
    configuration = Path(os.environ["CONTAINERS_CONF"]).read_text()
    told = tmp_path / "containers.conf"
    told.write_text(configuration.replace("[containers]", f"[containers]\ndefault_capabilities = {RIGHTS}"))
    rollout.environment = {"CONTAINERS_CONF": str(told)}
    return rollout


def test_an_agent_reaches_the_proxy_alone_and_its_set_up_whatever_there_is(sidecar: Harbor, far: str) -> None:
    """The proxy's other address is one where a control plane may listen."""
    network, _, last = far.rpartition(".")
    other = f"{network}.{int(last) - 1}"
    asked = (
        f"proxy=http://{own_address()}:{sidecar.stack.port}/healthz other=http://{other}:{sidecar.stack.port}/healthz "
        f"far=http://{far}:{PORT} udp=http://{far}:{PORT}"
    )
    files = {
        "instruction.md": f"{TURN}python3 /opt/task/reach.py {asked} marked=http://{far}:{PORT}\n",
        "tests/test.sh": CHECK,
        "environment/agent.py": AGENT,
        "environment/reach.py": (PROGRAMS / "reach.py").read_text(),
        "environment/setup.sh": f"python3 /opt/task/reach.py {asked}\n",
    }
    tasks = sidecar.task("t", APART, files)
    options = ("--agent", AGENT_CLASS, "--allow-only-proxy", "--group-size", "1", "--keep", "all")
    said = sidecar(tasks, "--run", "hemmed", *options, command=[])
    (row,) = sidecar.rows()
    assert (row["end_reason"], row["reward"], row["turns"], row["metrics"]["only_proxy"]) == (
        "completed",
        1.0,
        1,
        1.0,
    ), said
    assert said_by(row, "setup.txt") == {"proxy": 200, "other": 200, "far": 501, "udp": "sent"}
    reached = said_by(row, "said.txt")
    assert reached.pop("proxy") == 200 and reached.pop("marked") == "PermissionError"
    assert set(reached) == {"other", "far", "udp"}
    assert all(str(what).endswith(("Error", "Disconnected")) for what in reached.values()), reached
    assert sidecar.left() == []


def said_by(row: dict[str, Any], name: str) -> dict[str, Any]:
    (path,) = Path(row["folder"]).glob(f"harbor/*/agent/{name}")
    return dict(json.loads(path.read_text()))
