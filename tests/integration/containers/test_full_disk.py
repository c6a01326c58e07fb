"""A disk that fills while trials run, as processes and in containers. As root: the disk is a small one of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.containers.conftest import Containers
from tests.integration.containers.test_containers import AGENT, Sessions
from tests.integration.rollouts.conftest import Rollout
from tests.support.machine.tiny_image import NAME

pytestmark = pytest.mark.containers

SCRIPT = """python3 agent.py
case "$STENO_TRIAL_ID" in *.1) cat /dev/zero >filling ;; *) echo 1 >reward.txt ;; esac
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("kind", [Rollout, Containers], ids=["processes", "containers"])
def test_nothing_is_lost_on_a_full_disk(
    rollout: Containers, small_disk: Path, sessions: Sessions, kind: type[Rollout]
) -> None:
    """The trial that fills it fails; the next one, which can't begin, is run once there is room again."""
    run = f"full-{kind.__name__}"
    tasks = rollout.task("t", agent_py=AGENT, Dockerfile=f"FROM {NAME}\nCOPY agent.py /app/\nWORKDIR /app\n")
    rollouts = kind(rollout.stack, small_disk)
    options = ("--run", run, "--group-size", "3", "--sequential", "--stop-after-failures", "1", "--retries", "0")
    command = ["sh", "-c", SCRIPT]
    said = rollouts(tasks, *options, command=command, code=1)
    assert "1 trials in a row failed before their first turn" in said and "No space left on device" in said, said
    assert "Traceback" not in said

    def found() -> list[tuple[str, str | None, int]]:
        return [(each.status, each.end_reason, each.counts.turns) for _, each in sorted(sessions(run).items())]

    assert found() == [("completed", "completed", 1), ("aborted", "exit_code", 1), ("open", None, 0)]
    for filling in small_disk.glob("work/*/work/filling"):
        filling.unlink()
    said = rollouts(tasks, *options, command=command)
    assert found() == [("completed", "completed", 1), ("aborted", "exit_code", 1), ("completed", "completed", 1)], said
    assert len({row["trial_id"] for row in rollouts.rows()}) == 3
