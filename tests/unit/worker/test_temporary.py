"""What a killed worker leaves in the temporary folder goes when the next one makes its own, and nothing else does."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from steno_worker import temporary
from steno_worker.temporary import TemporaryFolder, sweep_dead
from tests.support.sources import SOURCES

WORKER = """
import sys
from steno_worker.temporary import TemporaryFolder
one = TemporaryFolder(sys.argv[1])
(one.path / "update").mkdir()
(one.path / "update" / "a.safetensors").write_bytes(b"weights")
print(one.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed(kind: str = "staging", *, meanwhile: bool = False) -> Path:
    """The folder of a worker that was killed. meanwhile: another one makes its own before."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": SOURCES, "TMPDIR": tempfile.gettempdir()},
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        folder = Path(worker.stdout.readline().strip())
        if meanwhile:
            sweep_dead()
        assert (folder / "update" / "a.safetensors").read_bytes() == b"weights"
        worker.kill()
    return folder


@pytest.mark.parametrize("kind", ["staging", "adapter"])
def test_the_folder_of_a_killed_worker_is_removed_and_that_of_a_living_one_stays(tmp: Path, kind: str) -> None:
    living = TemporaryFolder("staging")
    dead = killed(kind, meanwhile=True)
    assert dead.name.startswith(f"steno-{kind}-") and dead.is_dir()
    sweep_dead()
    left = list(tmp.iterdir())
    assert living.path in left and len(left) == 2, "the folder and its lock"
    assert list(living.path.iterdir()) == []
    living.remove()
    living.remove()
    assert list(tmp.iterdir()) == []


def test_folders_without_a_lock_of_this_machine_stay(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a release that knew no locks, and of a machine whose locks are not known here."""
    (tmp / "steno-staging-before").mkdir()
    with monkeypatch.context() as patch:
        (other := tmp / "boot_id").write_text("another\n")
        patch.setattr(temporary, "BOOT_ID", other)
        elsewhere = TemporaryFolder("staging")
    assert elsewhere._held is not None
    elsewhere._held.close()  # as if it were not known here
    before = set(tmp.iterdir())
    sweep_dead()
    assert set(tmp.iterdir()) == before and len(before) == 4


def test_what_others_put_there_is_neither_followed_nor_removed(
    tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    precious = tmp / "precious"
    precious.mkdir()
    (precious / "file").touch()
    suffix = temporary._suffix()
    (tmp / "steno-staging-link").symlink_to(precious)
    (tmp / f"steno-staging-link{suffix}").touch()
    (tmp / f"steno-staging-linked-lock{suffix}").symlink_to(precious / "file")
    (tmp / "steno-staging-linked-lock").mkdir()
    os.mkfifo(tmp / f"steno-staging-pipe{suffix}")
    sweep_dead()
    assert (precious / "file").exists() and (tmp / "steno-staging-linked-lock").is_dir()
    assert "steno-staging-link, whose worker was killed, is left where it is" in caplog.text
    dead = killed()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: dead.stat().st_uid + 1)
        sweep_dead()
    assert dead.is_dir(), "it is of another user"
    sweep_dead()
    assert not dead.exists()


def test_without_locks_a_worker_goes_on_and_nothing_is_removed(
    tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead = killed()

    def fails(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fails)
    one = TemporaryFolder("staging")
    assert list(one.path.iterdir()) == [] and f"{one.path} can't be locked" in caplog.text
    sweep_dead()
    assert dead.is_dir() and one.path.is_dir()
    assert f"{dead}, whose worker was killed, is left where it is: [Errno {errno.ENOLCK}]" in caplog.text
    one.remove()
    assert not one.path.exists()


def test_where_the_kernel_names_no_boot_nothing_is_locked_and_nothing_removed(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = killed()
    monkeypatch.setattr(temporary, "BOOT_ID", tmp / "missing")
    one = TemporaryFolder("staging")
    sweep_dead()
    assert dead.is_dir() and list(one.path.iterdir()) == []


def test_a_lock_whose_folder_somebody_removed_goes_too(tmp: Path) -> None:
    """Another worker was killed while it removed it, or somebody tidied up."""
    (tmp / f"steno-staging-gone{temporary._suffix()}").touch()
    sweep_dead()
    assert list(tmp.iterdir()) == []
