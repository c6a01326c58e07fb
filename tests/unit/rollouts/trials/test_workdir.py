"""A trial's folder, made and removed, whatever the trial did to it."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from pathlib import Path

import pytest

from steno_rollouts.outcome import EndReason, TrialResult
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import workdir
from steno_rollouts.trials.local import LocalExecutor
from steno_rollouts.trials.play import ExecutorPlayer, RunnerOptions
from steno_rollouts.trials.proc import began
from steno_rollouts.trials.runner import TrialRunner
from tests.unit.rollouts.nobody import as_nobody
from tests.unit.rollouts.trials.test_runner import Proxy


def read_only(folder: Path, mode: int) -> None:
    """Folders in folders, with files and a link out of it, none of them to be written in."""
    inner = folder / "work" / "mod" / "inner"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    (inner.parent / "out").symlink_to(Path.cwd() / "elsewhere")
    for path in (inner, inner.parent, inner.parent.parent, folder):
        path.chmod(mode)


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_read_only_folders_are_removed_and_what_their_links_lead_to_is_left_alone(tmp_path: Path, mode: int) -> None:
    def work() -> None:
        folder, elsewhere = Path("g.0"), Path("elsewhere")
        elsewhere.mkdir(mode=0o500)
        read_only(folder, mode)
        assert not workdir.dispose(folder, keep=False)
        assert not folder.exists() and elsewhere.stat().st_mode & 0o777 == 0o500
        read_only(folder, mode)
        made, _ = workdir.prepare(folder, Task("t", {}))
        assert not list(made.iterdir())

    as_nobody(work, tmp_path)


def test_an_environment_takes_the_place_of_what_the_task_has_and_never_writes_through_a_link(tmp_path: Path) -> None:
    shared, task = tmp_path / "shared", tmp_path / "task"
    shared.mkdir()
    for top in (task, task / "joined"):  # the same, one level down
        brought = task / "environment" / top.relative_to(task)
        for name in ("link", "joined", "file"):
            (brought / name).mkdir(parents=True)
            (brought / name / "new").touch()
        (brought / "folder").touch()
        (brought / "written").write_text("new")
        for name in ("joined", "folder"):
            (top / name).mkdir(parents=True)
            (top / name / "old").touch()
        (top / "link").symlink_to(shared)
        (top / "file").touch()
        (top / "written").symlink_to(shared / "old")
    (shared / "old").write_text("old")
    work, _ = workdir.prepare(tmp_path / "g.0", Task("t", {}, folder=task))
    assert [path.name for path in shared.iterdir()] == ["old"] and (shared / "old").read_text() == "old"
    for top in (work, work / "joined"):
        assert (top / "link" / "new").is_file() and not (top / "link").is_symlink() and (top / "file" / "new").is_file()
        assert {"new", "old"} <= {path.name for path in (top / "joined").iterdir()} and (top / "folder").is_file()
        assert (top / "written").read_text() == "new" and not (top / "written").is_symlink()


def test_of_a_folder_that_is_mounted_elsewhere_links_stay_but_those_to_what_tasks_share(tmp_path: Path) -> None:
    tests, shared = tmp_path / "task" / "tests", tmp_path / "common"
    tests.mkdir(parents=True)
    (shared / "deep").mkdir(parents=True)
    (shared / "deep" / "file").touch()
    (tests / "plain").touch()
    (shared / "run.sh").write_text("run")
    (shared / "up").symlink_to(".")
    stay = {
        "here": ".",
        "again": ".",
        "own": "plain",
        "gone": "nowhere",
        "inside": "/app/expected",
        "zero": "/dev/zero",
    }
    for name, where in {**stay, "run.sh": "../../common/run.sh", "all": "../../common"}.items():
        (tests / name).symlink_to(where)
    workdir.copy_whole(tests, tmp_path / "copy", "run.sh")
    copy = tmp_path / "copy"
    assert {name: str((copy / name).readlink()) for name in stay} == stay
    assert not (copy / "run.sh").is_symlink() and (copy / "run.sh").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in (copy / "all").iterdir()) == ["deep", "run.sh", "up"]
    assert (copy / "all" / "up").is_symlink() and (shared / "run.sh").stat().st_mode & 0o111 == 0


def test_what_can_not_be_removed_stays_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a folder of another user's, as `sudo` and containers leave them."""

    def work() -> None:
        with caplog.at_level(logging.WARNING):
            assert workdir.dispose(Path("g.0"), keep=False)
        assert "g.0 can't be removed, and is kept: " in caplog.text and "Permission denied" in caplog.text
        with pytest.raises(PermissionError):
            workdir.prepare(Path("g.0"), Task("t", {}))

    if os.getuid():
        pytest.skip("only root can make files of another user")
    (tmp_path / "g.0" / "work" / "of-root").mkdir(parents=True)
    (tmp_path / "g.0" / "work" / "of-root" / "file").touch()
    as_nobody(work, tmp_path)


def test_folders_too_deep_in_one_another_stay_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Deeper than Python's own stack, which `shutil.rmtree` uses before 3.13."""
    folder = tmp_path / "g.0"
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    try:
        with caplog.at_level(logging.WARNING):
            there = workdir.dispose(folder, keep=False)
        assert there == folder.exists() == ("can't be removed, and is kept" in caplog.text)
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)


def test_a_folder_that_is_to_be_kept_is(tmp_path: Path) -> None:
    assert workdir.dispose(tmp_path, keep=True) and tmp_path.exists()
    assert not workdir.dispose(tmp_path / "none", keep=True) and not workdir.dispose(tmp_path / "none", keep=False)


async def test_a_trial_that_runs_is_left_alone_by_launchers_at_another_proxy(tmp_path: Path) -> None:
    """Of the same run and task, so that both trials have one name."""
    wait = "touch up; until [ -e go ]; do sleep 0.02; done; echo 1 >reward.txt"
    options = RunnerOptions(("sh", "-c", wait), tmp_path, keep="none")
    first, second = Proxy(1, created_at=1.0), Proxy(1, created_at=2.0)
    running = asyncio.create_task(first.ran(ExecutorPlayer(first.client, LocalExecutor(), options), options))
    work = tmp_path / "g.0" / "work"
    async with asyncio.timeout(60):
        while not (work / "up").exists():
            await asyncio.sleep(0.02)
    other = TrialRunner(second.client, ExecutorPlayer(second.client, LocalExecutor(), options), options)
    results = list[TrialResult]()
    with pytest.raises(
        workdir.FolderInUse, match=rf"g\.0 is in use: process {os.getpid()} runs .*: give another --run"
    ):
        await other.run(second.assignment, results.append)
    assert not second.posted and not results
    await other.abandon(second.assignment, EndReason.CANCELLED)
    (work / "go").touch()
    assert (await running).reward == 1.0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "left",
    [
        f"{os.getpid()} 1 2.0",  # the number is another process's by now
        f"1 {began(1)} 1.0",  # a launcher at the same proxy, which was cut off
        "no note",
    ],
    ids=["another process has its number", "cut off", "no note"],
)
def test_a_folder_is_taken_over_from_who_is_gone_and_from_launchers_at_the_same_proxy(
    tmp_path: Path, left: str
) -> None:
    note = tmp_path / "g.0.launcher"
    note.symlink_to(left)
    with workdir.held(tmp_path / "g.0", 1.0):
        pass
    assert note.is_symlink() == (left == "no note")
    note.unlink(missing_ok=True)
    note.symlink_to(f"1 {began(1)} 2.0")
    with pytest.raises(workdir.FolderInUse), workdir.held(tmp_path / "g.0", 1.0):
        pass
    assert note.is_symlink()
