"""`TaskCheck`, where no task can be run at all: what it raises is the cause, and not a group of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from steno.contracts.errors import ConfigError
from steno_cli.commands.tasks import CheckSettings
from steno_rollouts.build import Prepared
from steno_rollouts.config import RolloutSettings
from steno_rollouts.task_check import TaskCheck

ROOTLESS = """#!/bin/sh
case $1 in
--version) echo 'Docker version 20.10' ;;
info) echo '["name=seccomp,profile=default", "name=rootless"]' ;;
*) exit 1 ;;
esac
"""


async def test_docker_that_will_not_do_is_said_as_in_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text(ROOTLESS)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "rows.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n')
    settings = RolloutSettings(
        tasks=tmp_path / "rows.jsonl", executor="docker", image="an/image", work_dir=tmp_path / "work"
    )
    prepared = Prepared.of(settings, "tasks-check", needs_command=False)
    with pytest.raises(ConfigError, match="executor: Docker runs with rootless"):
        await TaskCheck(prepared, ["true"]).run(["oracle", "nobody"], lambda checked: None)


async def test_a_working_folder_by_a_relative_path_is_found_from_where_tasks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("solution", "tests"):
        (tmp_path / "task" / name).mkdir(parents=True)
    (tmp_path / "task" / "task.toml").touch()
    (tmp_path / "task" / "instruction.md").touch()
    solve = tmp_path / "task" / "solution" / "solve.sh"
    solve.write_text('#!/bin/sh\ncat "$STENO_TASK_FILE" && echo 1 >"$STENO_WORKDIR/reward.txt"\n')
    solve.rename(tmp_path / "shared.sh")
    solve.symlink_to("../../shared.sh")
    settings = RolloutSettings(tasks=Path("task"), work_dir=Path("runs"), confine="off")
    prepared = Prepared.of(settings, "tasks-check", needs_command=False)
    [checked] = await TaskCheck(prepared).run(["oracle"], lambda checked: None)
    assert [(verdict.reward, verdict.why) for verdict in checked.verdicts] == [(1.0, "")]


@pytest.mark.parametrize("given", [{"harbor": "x", "agent": "codex"}, {"verifiers": "x"}])
def test_tasks_of_others_are_not_checked(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="can't be given here: only the tasks of --tasks are checked"):
        CheckSettings.load(given, None)
