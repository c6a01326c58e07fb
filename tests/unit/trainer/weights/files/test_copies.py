"""Full copies: complete or not there, the newest kept, whoever crashes or writes at the same time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.errors import CopyFailed
from steno_trainer.weights.files import copies as module
from steno_trainer.weights.files.copies import WeightsCopies, WeightsCopy
from steno_trainer.weights.source import ModelWeights, TensorMeta
from tests.unit.trainer.weights.models import qwen


class Fixed:
    """A source of given tensors, one to a bucket; `before` runs before each of them."""

    def __init__(self, *values: float, before=lambda: None) -> None:
        self._tensors = {f"w{n}": torch.full((4,), value) for n, value in enumerate(values)}
        self._before = before

    def plan(self) -> list[list[TensorMeta]]:
        return [[TensorMeta(name, t.dtype, tuple(t.shape))] for name, t in self._tensors.items()]

    def buckets(self) -> Iterator[dict[str, Tensor]]:
        for name, tensor in self._tensors.items():
            self._before()
            yield {name: tensor}


def at(step: int) -> PolicyVersion:
    return PolicyVersion("run", step)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_copy_is_a_checkpoint_that_transformers_loads(tmp_path: Path) -> None:
    model = qwen()
    model.config.save_pretrained(tmp_path / "config")
    copies = WeightsCopies(tmp_path / "copies", extra=[tmp_path / "config" / "config.json"])
    copy = copies.write(at(3), ModelWeights(model, bucket_bytes=20_000))
    again = AutoModelForCausalLM.from_pretrained(copy.folder, dtype=torch.float32)
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert copy == WeightsCopy.read(copy.folder) and copy.version == "run/3"
    assert len(copy.manifest.shards) > 2


def test_a_change_of_the_model_after_write_changes_nothing_of_the_copy(tmp_path: Path) -> None:
    model = qwen()
    copy = WeightsCopies(tmp_path).write(at(0), ModelWeights(model))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    again = WeightsCopies(tmp_path / "again").write(at(0), ModelWeights(model))
    assert again.manifest.digest != copy.manifest.digest == WeightsCopy.read(copy.folder).manifest.digest


def test_the_newest_copies_are_kept(tmp_path: Path) -> None:
    copies = WeightsCopies(tmp_path, keep=2)
    for step in range(4):
        copies.write(at(step), Fixed(step))
    assert [copy.version for copy in copies.complete()] == ["run/2", "run/3"]
    assert names(tmp_path) == ["weights-run-2", "weights-run-3"]


def an_hour_ahead(root: Path) -> None:
    """As if what is there had been written before the clock went back."""
    for path in root.glob(f"*/{module.DESCRIPTION}"):
        at_ns = path.stat().st_mtime_ns + 3600 * module.SECOND_NS
        os.utime(path, ns=(at_ns, at_ns))


def test_the_newest_copies_are_kept_also_once_the_clock_has_gone_back(tmp_path: Path) -> None:
    copies = WeightsCopies(tmp_path, keep=2)
    copies.write(at(0), Fixed(0))
    copies.write(at(1), Fixed(1))
    an_hour_ahead(tmp_path)
    for step in (2, 3):
        copies.write(at(step), Fixed(step))
        assert [copy.version for copy in WeightsCopies(tmp_path).complete()] == [f"run/{step - 1}", f"run/{step}"]


def test_what_was_just_written_stays_where_files_take_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = WeightsCopies(tmp_path, keep=2)
    copies.write(at(0), Fixed(0))
    copies.write(at(1), Fixed(1))
    an_hour_ahead(tmp_path)

    def refuses(*args: object, **more: object) -> None:
        raise PermissionError("no times here")

    monkeypatch.setattr(os, "utime", refuses)
    copy = copies.write(at(2), Fixed(2))
    assert WeightsCopy.read(copy.folder) == copy


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        WeightsCopies(tmp_path, keep=0)


def test_the_same_version_again_is_the_same_copy(tmp_path: Path) -> None:
    first = WeightsCopies(tmp_path).write(at(1), Fixed(1.0))
    assert WeightsCopies(tmp_path).write(at(1), Fixed(1.0)) == first
    assert names(tmp_path) == ["weights-run-1"]


def test_a_version_with_other_weights_is_refused_and_the_old_ones_stay(tmp_path: Path) -> None:
    first = WeightsCopies(tmp_path).write(at(1), Fixed(1.0))
    with pytest.raises(CopyFailed, match="other weights of version run/1"):
        WeightsCopies(tmp_path).write(at(1), Fixed(2.0))
    assert WeightsCopy.read(first.folder) == first
    assert names(tmp_path) == ["weights-run-1"]


def test_a_failed_write_leaves_nothing_and_takes_all_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_shard", full)
    with pytest.raises(CopyFailed, match=r"rank 0: .*No space left"):
        WeightsCopies(tmp_path).write(at(1), Fixed(1.0, 2.0, 3.0, before=lambda: taken.append(1)))
    assert len(taken) == 3, "ranks that stop early leave the others in a collective"
    assert names(tmp_path) == []


def test_a_folder_that_ranks_do_not_share_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.write_shard

    def elsewhere(path: Path, tensors: dict[str, Tensor]):
        there = tmp_path / "other machine"
        there.mkdir(exist_ok=True)
        return real(there / path.name, tensors)

    monkeypatch.setattr(module, "write_shard", elsewhere)
    with pytest.raises(CopyFailed, match="is the folder shared"):
        WeightsCopies(tmp_path / "here").write(at(1), Fixed(1.0))


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CopyFailed, match="file"):
        WeightsCopies(tmp_path / "file" / "copies").write(at(1), Fixed(1.0))


def test_two_trainers_may_write_to_one_folder_at_once(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=60)
    done: list[WeightsCopy] = []

    def trainer(lineage: str) -> None:
        done.append(WeightsCopies(tmp_path, keep=4).write(PolicyVersion(lineage, 1), Fixed(1.0, 2.0, before=both.wait)))

    threads = [threading.Thread(target=trainer, args=(lineage,)) for lineage in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(copy.version for copy in done) == ["a/1", "b/1"]
    assert names(tmp_path) == ["weights-a-1", "weights-b-1"]


CRASH = """
import os, signal, sys
from pathlib import Path
from tests.unit.trainer.weights.files.test_copies import Fixed, at
from steno_trainer.weights.files import copies

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

for where in ("write", "rename"):
    child = os.fork()
    if not child:
        if where == "rename":
            Path.rename = die
        else:
            copies.write_shard = die
        copies.WeightsCopies(Path(sys.argv[1]) / where).write(at(2), Fixed(2.0))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, where
"""


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each place in which a trainer was killed; one interpreter is started for all."""
    root = tmp_path_factory.mktemp("crashed")
    for where in ("write", "rename"):
        WeightsCopies(root / where).write(at(1), Fixed(1.0))
    subprocess.run([sys.executable, "-c", CRASH, str(root)], check=True)
    return root


@pytest.mark.parametrize("where", ["write", "rename"])
def test_a_trainer_killed_before_the_rename_leaves_the_older_copy_and_the_next_one_cleans_up(
    crashed: Path, where: str
) -> None:
    folder = crashed / where
    copies = WeightsCopies(folder)
    assert any(name.startswith(".writing-") for name in names(folder))
    assert [copy.version for copy in copies.complete()] == ["run/1"]
    copies.write(at(2), Fixed(2.0))
    assert names(folder) == ["weights-run-1", "weights-run-2"]


def test_a_copy_that_can_not_be_read_stops_no_push_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copies = WeightsCopies(tmp_path, keep=1)
    broken = copies.write(at(1), Fixed(1.0)).folder
    (broken / module.DESCRIPTION).write_text("")  # the machine stopped before it was on the disk
    for step in (2, 3):
        copies.write(at(step), Fixed(float(step)))
    assert names(tmp_path) == ["weights-run-1", "weights-run-3"]
    assert f"{broken}: not a copy of weights" in caplog.text


def test_what_a_dead_writer_left_is_locked_for_writing_as_nfs_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFSv4 refuses an exclusive lock on a file that is open for reading; what can't be removed at all holds up no push."""
    flock = fcntl.flock

    def as_nfs_does(file: Any, how: int) -> None:
        if not file.writable():
            raise OSError(errno.EBADF, "Bad file descriptor")
        if "stuck" in file.name:
            raise OSError(errno.EIO, "Input/output error")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", as_nfs_does)
    for name in ("dead", "stuck"):
        (tmp_path / f".writing-{name}").mkdir()
        (tmp_path / f".writing-{name}.lock").touch()
    WeightsCopies(tmp_path).write(at(1), Fixed(1.0))
    assert not (tmp_path / ".writing-dead").exists() and (tmp_path / ".writing-stuck").exists()
    assert "is left where it is: [Errno 5]" in caplog.text


@pytest.mark.parametrize("where", ["rmtree", "rename"])
def test_an_old_copy_that_can_not_be_removed_ends_no_push_and_is_removed_by_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """As on NFS while a worker reads it."""
    copies = WeightsCopies(tmp_path, keep=1)
    copies.write(at(1), Fixed(1.0))
    broken = {"rmtree": (shutil, shutil.rmtree), "rename": (Path, Path.rename)}[where]
    with monkeypatch.context() as patch:

        def fails(path: Path, *args: Any) -> Any:
            if path.name.startswith((".removing-", "weights-run-1")):
                raise OSError(errno.ENOTEMPTY, "Directory not empty")
            return broken[1](path, *args)

        patch.setattr(broken[0], where, fails)
        for step in (2, 3):  # the second of them meets what the first one left, too
            assert copies.write(at(step), Fixed(float(step))).version == f"run/{step}"
    assert "is left where it is: [Errno 39]" in caplog.text
    assert len(names(tmp_path)) > 1
    copies.write(at(4), Fixed(4.0))
    assert names(tmp_path) == ["weights-run-4"]


def test_what_is_no_copy_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "steno-weights.json").write_text(json.dumps({"version": "run/1", "manifest": {"tensors": []}}))
    with pytest.raises(CopyFailed, match="tensors"):
        WeightsCopy.read(tmp_path)
    with pytest.raises(CopyFailed, match="not a copy of weights"):
        WeightsCopy.read(tmp_path / "missing")
