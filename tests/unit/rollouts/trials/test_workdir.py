"""A trial's folder, made and removed, whatever the trial did to it."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest

from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import workdir
from tests.unit.rollouts.nobody import as_nobody


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
