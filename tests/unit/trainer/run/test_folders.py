"""A folder of checkpoints, or of weights, is one run's: another one's trainer is refused before it removes anything."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steno.contracts.errors import ConfigError, TrainerAlive
from steno_trainer.checkpoints.lineages import Lineages
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.errors import BadCheckpoint
from steno_trainer.run import main
from steno_trainer.run.folders import OWNER, claim_folders, look_at_folders
from steno_trainer.run_config import RunSettings


def settings(folder: Path, run: str, **more: Any) -> RunSettings:
    given = {"model": "m", "run": run, "checkpoint_dir": folder / "checkpoints", "weights_dir": folder / "weights"}
    return RunSettings(**given | more)


def test_a_run_goes_on_in_its_folders_and_another_one_is_refused_by_name(tmp_path: Path) -> None:
    for _ in range(2):
        claim_folders(settings(tmp_path, "a"))
    with pytest.raises(ConfigError, match=r"checkpoint_dir: got .*, where run a began, and this is run b") as refused:
        claim_folders(settings(tmp_path, "b"))
    assert refused.value.field == "checkpoint_dir"
    with pytest.raises(ConfigError, match=r"weights_dir: got .*, where run a began") as refused:
        claim_folders(settings(tmp_path, "b", checkpoint_dir=tmp_path / "others"))
    assert refused.value.field == "weights_dir"


def test_a_run_that_is_refused_for_one_folder_has_claimed_none(tmp_path: Path) -> None:
    """Its name was mistyped, and the checkpoints were to be new ones."""
    claim_folders(settings(tmp_path, "a"))
    fresh = {"checkpoint_dir": tmp_path / "fresh"}
    for start in (look_at_folders, claim_folders):
        with pytest.raises(ConfigError, match=r"weights_dir: got .*, where run a began, and this is run typo"):
            start(settings(tmp_path, "typo", **fresh))
    assert not (tmp_path / "fresh" / OWNER).exists()
    claim_folders(settings(tmp_path, "a", **fresh))


def test_what_is_to_be_removed_is_named(tmp_path: Path) -> None:
    claim_folders(settings(tmp_path, "typo"))
    for name in ("checkpoints", "weights"):
        owner = tmp_path / name / OWNER
        with pytest.raises(ConfigError, match=rf"remove {owner} if nothing of run typo is wanted any more"):
            claim_folders(settings(tmp_path, "a"))
        owner.unlink()
    claim_folders(settings(tmp_path, "a"))


@pytest.mark.parametrize("more", [{"offline": True}, {"records": "r.jsonl"}, {"transport": "nccl"}])
def test_a_folder_of_weights_that_nobody_writes_is_nobodys(tmp_path: Path, more: dict[str, Any]) -> None:
    claim_folders(settings(tmp_path, "a", **more))
    assert not (tmp_path / "weights").exists()


def test_a_folder_of_an_earlier_release_is_known_by_the_starts_in_it(tmp_path: Path) -> None:
    """It has no checkpoint yet, which would say whose it is."""
    Lineages(tmp_path / "checkpoints", "a").begin("l1", PolicyVersion("base", 0), None)
    with pytest.raises(ConfigError, match=r"checkpoint_dir: .* run a began.* remove \S+/checkpoints if nothing"):
        claim_folders(settings(tmp_path, "b"))
    claim_folders(settings(tmp_path, "a"))


def test_a_start_that_was_killed_while_it_wrote_leaves_the_folder_free(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / OWNER).touch()
    claim_folders(settings(tmp_path, "a"))
    with pytest.raises(ConfigError, match="run a began"):
        claim_folders(settings(tmp_path, "b"))


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"checkpoint_dir: .* can't be written: Not a directory"):
        claim_folders(settings(tmp_path, "a", checkpoint_dir=tmp_path / "file" / "checkpoints"))


def test_a_trainer_looks_before_it_opens_its_ranks_and_claims_nothing_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    went_on = RuntimeError("it went on")

    def open_ranks(*args: object, **options: object) -> None:
        raise went_on

    monkeypatch.setattr(main.Ranks, "open", open_ranks)
    with pytest.raises(RuntimeError, match="it went on"):
        main.train(settings(tmp_path, "a"))
    assert not (tmp_path / "checkpoints" / OWNER).exists() and not (tmp_path / "weights" / OWNER).exists()
    claim_folders(settings(tmp_path, "a"))
    with pytest.raises(ConfigError, match="run a began"):
        main.train(settings(tmp_path, "b"))


def hold(folder: Path, told: list[bytes | None], lineage: str = "l1") -> contextlib.AbstractContextManager[Any]:
    """As the first rank does of a run over a file, whose start no proxy is told of."""
    ranks: Any = SimpleNamespace(share=told.append)
    return main._hold(settings(folder, "a", records="r.jsonl"), ranks, lineage)


def test_of_two_trainers_over_a_file_the_second_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    """It would remove the checkpoint that the first one is writing."""
    (tmp_path / "checkpoints").mkdir()
    told: list[bytes | None] = []
    with hold(tmp_path, told) as tenure:
        assert tenure is not None and tenure.epoch is None
        words = rf"checkpoint_dir: got {tmp_path}/checkpoints, where trainer \S+-l1 \(process {os.getpid()}\) of run a trains"
        with pytest.raises(TrainerAlive, match=words), hold(tmp_path, told, "l2"):
            raise AssertionError("it went on to load the model")
        assert told == [b""], "the other ranks end too"
    with hold(tmp_path, told, "l3"):
        pass
    assert told == [b""]


def test_where_the_file_system_has_no_locks_a_trainer_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fails)
    (tmp_path / "checkpoints").mkdir()
    told: list[bytes | None] = []
    with hold(tmp_path, told), hold(tmp_path, told, "l2"):
        assert told == [] and "No locks available" in caplog.text


def test_folders_are_claimed_once_the_checkpoint_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models, and checkpoints of releases that wrote no run.json, may refuse the start until then."""
    refusal: list[Exception] = [BadCheckpoint("of another run")]

    class Nothing:
        def __init__(self, *args: object, **options: object) -> None: ...
        def resume(self, run: str) -> None:
            if refusal:
                raise refusal.pop()

    for name in ("Stepper", "PolicyProbe", "Checkpoints"):
        monkeypatch.setattr(main, name, Nothing)
    engine: Any = SimpleNamespace(ranks=SimpleNamespace(first=True))
    given = settings(tmp_path, "a", offline=True)
    owner = tmp_path / "checkpoints" / OWNER
    with pytest.raises(BadCheckpoint):
        main.RankDuties(given, engine, "l1", None)
    assert not owner.exists()
    main.RankDuties(given, engine, "l2", None)
    assert json.loads(owner.read_text()) == {"run": "a"}
