"""Which checkpoints stay: the newest, whatever the clock says; and what an older one lacks. What is in them is played; the rest
is the trainer's own."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from steno_trainer.checkpoints import checkpoint
from steno_trainer.checkpoints.checkpoint import STATE, Checkpoints, RunState
from steno_trainer.data.ledger import Ledger
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.run.training_state import TrainingState

HOUR_NS = 3600 * 10**9


@pytest.fixture
def stepper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of one rank, with a model that has no weights."""
    monkeypatch.setattr(checkpoint.partitions, "save", lambda engine, folder: folder.mkdir())
    monkeypatch.setattr(Checkpoints, "_write_weights", lambda *_: None)
    ranks = SimpleNamespace(
        first=True, rank=0, size=1, barrier=lambda: None, share=lambda payload: payload, add=lambda tensor: tensor
    )
    settings = SimpleNamespace(precision="float32", model=str(Path(__file__).parent))
    engine = SimpleNamespace(lm=torch.nn.Module(), ranks=ranks, settings=settings, parameters=0)
    return SimpleNamespace(engine=engine, ranks=ranks, steps_done=0)


def saved(checkpoints: Checkpoints, stepper: Any, step: int, spare: bool = False) -> Path:
    stepper.steps_done = step
    run = RunState.of("r", VersionHistory((PolicyVersion("a", step),)), Ledger(), set())
    return checkpoints.save(run, spare=spare)


def kept(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def an_hour_ahead(root: Path) -> None:
    """As if what is there had been written before the clock went back."""
    for path in root.glob(f"*/{STATE}"):
        at_ns = path.stat().st_mtime_ns + HOUR_NS
        os.utime(path, ns=(at_ns, at_ns))


def test_the_newest_checkpoints_are_kept_also_once_the_clock_has_gone_back(tmp_path: Path, stepper: Any) -> None:
    checkpoints = Checkpoints(tmp_path, stepper, keep=2)
    saved(checkpoints, stepper, 1)
    saved(checkpoints, stepper, 2)
    an_hour_ahead(tmp_path)
    for step in (3, 4):
        assert saved(checkpoints, stepper, step) == checkpoints.newest()
        assert kept(tmp_path) == ["latest", f"step-{step - 1:08d}", f"step-{step:08d}"]


def test_age_counts_and_not_the_step_where_somebody_has_gone_back(tmp_path: Path, stepper: Any) -> None:
    checkpoints = Checkpoints(tmp_path, stepper, keep=2)
    for step in (8, 9, 4, 5):
        saved(checkpoints, stepper, step)
    assert kept(tmp_path) == ["latest", "step-00000004", "step-00000005"]


def test_a_step_that_is_saved_again_and_again_takes_the_place_of_no_other(tmp_path: Path, stepper: Any) -> None:
    checkpoints = Checkpoints(tmp_path, stepper, keep=2)
    for step in (9, 10, 15, 15, 15):
        assert saved(checkpoints, stepper, step) == checkpoints.newest()
    assert kept(tmp_path) == ["latest", "step-00000010", "step-00000015"]
    saved(checkpoints, stepper, 16)
    assert kept(tmp_path) == ["latest", "step-00000015", "step-00000016"]


def test_weights_that_may_be_broken_take_the_place_of_no_good_ones(tmp_path: Path, stepper: Any) -> None:
    checkpoints = Checkpoints(tmp_path, stepper, keep=1)
    saved(checkpoints, stepper, 10)
    for _ in range(3):  # started again each time
        saved(checkpoints, stepper, 15, spare=True)
    assert kept(tmp_path) == ["latest", "step-00000010", "step-00000015"]
    saved(checkpoints, stepper, 16)
    assert kept(tmp_path) == ["latest", "step-00000016"]


def test_what_was_just_written_stays_where_files_take_no_time(
    tmp_path: Path, stepper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, stepper, keep=1)
    saved(checkpoints, stepper, 1)
    an_hour_ahead(tmp_path)

    def refuses(*args: object, **more: object) -> None:
        raise PermissionError("no times here")

    monkeypatch.setattr(os, "utime", refuses)
    assert saved(checkpoints, stepper, 2) == checkpoints.newest()
    assert kept(tmp_path) == ["latest", "step-00000002"]


@pytest.mark.parametrize("where", ["rmtree", "rename"])
def test_an_old_checkpoint_that_can_not_be_removed_ends_no_save_and_is_removed_by_a_later_one(
    tmp_path: Path, stepper: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """As on NFS while an engine reads its weights."""
    checkpoints = Checkpoints(tmp_path, stepper, keep=1)
    first = saved(checkpoints, stepper, 1)
    (tmp_path / ".writing-step-00000002").mkdir()  # of a killed writer
    broken = {"rmtree": (shutil, shutil.rmtree), "rename": (Path, Path.rename)}[where]
    with monkeypatch.context() as patch:

        def fails(path: Path, *args: Any) -> Any:
            if path == first or where == "rmtree":
                raise OSError(errno.ENOTEMPTY, "Directory not empty")
            return broken[1](path, *args)

        patch.setattr(broken[0], where, fails)
        for step in (2, 3):  # the second of them meets what the first one left, too
            assert saved(checkpoints, stepper, step) == checkpoints.newest()
    assert "is left where it is: [Errno 39]" in caplog.text
    assert len(kept(tmp_path)) > 2
    saved(checkpoints, stepper, 4)
    assert kept(tmp_path) == ["latest", "step-00000004"]


def test_groups_that_were_acknowledged_are_read_back_in_their_order_and_a_release_before_wrote_none() -> None:
    state = TrainingState("r", VersionHistory((PolicyVersion("a", 1),)), acknowledged={"z": 1.1, "a": 2.2})
    written = msgspec.to_builtins(state.saved())
    read = TrainingState.of(msgspec.convert(written, RunState))
    assert list(read.acknowledged.items()) == [("z", 1.1), ("a", 2.2)]
    del written["acknowledged_groups"]
    assert TrainingState.of(msgspec.convert(written, RunState)).acknowledged == {}
