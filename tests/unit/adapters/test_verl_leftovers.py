"""What agent-loop workers that were killed leave, and which of it the next one ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from steno.contracts.errors import Conflict
from steno_adapters.verl.leftovers import abandoned, end_leftovers, mark_ended, mark_running, own_folder


def test_only_folders_of_processes_that_are_gone_are_abandoned(tmp_path: Path) -> None:
    own_folder(tmp_path).mkdir()
    words = (
        "import sys; from pathlib import Path; from steno_adapters.verl.leftovers import own_folder; "
        "own_folder(Path(sys.argv[1])).mkdir()"
    )
    (tmp_path / "somebody-elses").mkdir()
    with subprocess.Popen([sys.executable, "-c", words, str(tmp_path)], env=os.environ) as killed:
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        [only_its_exit_code] = abandoned(tmp_path)
    assert killed.returncode == 0 and len(list(tmp_path.iterdir())) == 3
    [left] = abandoned(tmp_path)
    assert left == only_its_exit_code != own_folder(tmp_path) and left.name.startswith("verl-worker-")


def test_folders_of_a_machine_whose_name_goes_on_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    for name in ("verl-worker-node-1-2-999999999-123", "verl-worker-node-1-999999999-123", "verl-worker-node"):
        (tmp_path / name).mkdir()
    assert [folder.name for folder in abandoned(tmp_path)] == ["verl-worker-node-1-999999999-123"]


@pytest.mark.parametrize(("keep", "stays"), [("failed", ["g.0", "g.1"]), ("all", ["g.0", "g.1"]), ("none", None)])
async def test_only_trials_that_ran_are_ended_and_folders_stay_as_keep_says(
    tmp_path: Path, keep: Literal["failed", "all", "none"], stays: list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """`g.0` had ended and was kept; `g.1` ran; of `g.2` no folder was made yet."""
    cleared: list[str] = []
    completed: list[str] = []

    async def clear(folder: Path) -> None:
        cleared.append(folder.name)

    async def complete(trial_id: str, outcome: Any) -> None:
        completed.append(f"{trial_id} {outcome.status} {outcome.end_reason}")
        raise Conflict("it has ended")

    folder = tmp_path / f"verl-worker-{socket.gethostname()}-999999999-1"
    for number in range(3):
        mark_running(folder, f"g.{number}")
    mark_ended(folder, "g.0")
    for name in ("g.0", "g.1"):
        (folder / name / "work").mkdir(parents=True)
    executor: Any = SimpleNamespace(clear=clear)
    client: Any = SimpleNamespace(complete=complete)
    for _ in range(2):
        await end_leftovers(tmp_path, executor, client, keep)
        assert cleared == ["g.1", "g.2"]
        assert completed == ["g.1 aborted interrupted", "g.2 aborted interrupted"]
        left = sorted(path.name for path in folder.iterdir()) if folder.exists() else None
        assert left == stays
    assert "g.0" not in caplog.text and caplog.text.count("was killed") == 2


async def test_the_folder_of_a_process_that_kept_nothing_goes(tmp_path: Path) -> None:
    folder = tmp_path / f"verl-worker-{socket.gethostname()}-999999999-1"
    mark_running(folder, "g.0")
    mark_ended(folder, "g.0")
    mark_ended(folder, "g.1")
    nothing: Any = None
    await end_leftovers(tmp_path, nothing, nothing, "failed")
    assert not folder.exists()
