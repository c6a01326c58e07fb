"""The key that a trainer's evaluation shows to the proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from steno_trainer.run.main import _prepared_evaluation
from steno_trainer.run_config import RunSettings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("STENO_ADMIN_KEY", "STENO_ROLLOUT_KEY", "STENO_ROLLOUT_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tasks.jsonl").write_text('{"id": "one"}\n')
    (tmp_path / "eval.yaml").write_text(f"tasks: {tmp_path / 'tasks.jsonl'}\ncommand: [echo]\nexecutor: local\n")
    (tmp_path / "admin-key").write_text("the-trainers-key\n")
    return tmp_path


def settings(folder: Path, **given: str) -> RunSettings:
    given = given or {"key_file": str(folder / "admin-key")}
    return RunSettings.load({"model": "m", "eval_every": 1, "eval_config": str(folder / "eval.yaml"), **given}, None)


def shown(found: RunSettings) -> str | None:
    assert found.eval_config is not None
    key = _prepared_evaluation(found, found.eval_config).settings.key
    return key.get_secret_value() if key is not None else None


def test_an_evaluation_shows_the_trainers_key_where_its_file_has_none(folder: Path) -> None:
    """As the chart starts it: STENO_TRAIN_KEY_FILE alone."""
    found = settings(folder)
    assert shown(found) == "the-trainers-key"
    assert found.eval_config is not None
    hidden = _prepared_evaluation(found, found.eval_config).settings.secret_files
    assert hidden == {"key": folder / "admin-key"}, "from the evaluation's trials"
    assert shown(settings(folder, key="of-a-flag")) == "of-a-flag"


def test_the_trainers_own_key_goes_before_the_machines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_ADMIN_KEY", "the-machines-key")
    assert shown(settings(folder)) == "the-trainers-key"
    assert shown(settings(folder, run="r")) == "the-machines-key"


def test_a_key_of_the_evaluations_own_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_ROLLOUT_KEY", "the-rollouts-key")
    assert shown(settings(folder)) == "the-rollouts-key"
    monkeypatch.delenv("STENO_ROLLOUT_KEY")
    with (folder / "eval.yaml").open("a") as file:
        file.write("key: the-files-key\n")
    assert shown(settings(folder)) == "the-files-key"
