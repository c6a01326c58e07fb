"""What goes with the weights of a model that is named: its tokenizer too, which loading the weights does not fetch.

No network is asked: the cache has the layout of Hugging Face's, and what the hub would give is played.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from steno_trainer.checkpoints.checkpoint import Checkpoints, configuration, fetch_configuration
from steno_trainer.checkpoints.merging import merge_adapter
from steno_trainer.model.adapter import add_adapter
from steno_trainer.model.model import load_model
from steno_trainer.weights.adapters import write_adapter

TINY = Path(__file__).resolve().parents[4] / "steno/models/tiny"
NAME = "someone/tiny"
LOADED = {"config.json", "generation_config.json", "model.safetensors"}
ALL = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
NO_TOKENIZER = f"model {NAME}: no tokenizer is in Hugging Face's cache, so what is saved of it will have none"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Offline, with what loading the model has left in the cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub/models--someone--tiny"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(snapshot.name)
    for name in LOADED:
        shutil.copyfile(TINY / name, snapshot / name)
    return snapshot


@pytest.fixture
def hub(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub answers."""

    def download(model: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert model == NAME and ignore_patterns == ["*/*"]
        for pattern in allow_patterns:
            for path in TINY.glob(pattern):
                shutil.copyfile(path, cached / path.name)
        return str(cached)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def names(files: list[Path]) -> list[str]:
    return [path.name for path in files]


def checkpoints_of(model: str, root: Path) -> Checkpoints:
    ranks = SimpleNamespace(first=True, rank=0, size=1, add=lambda tensor: tensor)
    engine = SimpleNamespace(lm=torch.nn.Module(), ranks=ranks, settings=SimpleNamespace(model=model), parameters=0)
    stepper: Any = SimpleNamespace(engine=engine, ranks=ranks, steps_done=0)
    return Checkpoints(root, stepper)


@pytest.mark.usefixtures("hub")
def test_what_goes_with_the_weights_is_fetched_before_the_first_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints_of(NAME, tmp_path)
    assert names(configuration(NAME)) == ALL and not caplog.records


@pytest.mark.usefixtures("hub")
def test_a_merged_model_has_what_goes_with_its_weights(tmp_path: Path) -> None:
    model = load_model(str(TINY), precision="float32", zero=None)
    add_adapter(model.lm, rank=4, alpha=8, targets=[], seed=0)
    (tmp_path / "adapter").mkdir()
    write_adapter(model.lm, tmp_path / "adapter", base=NAME, writes=True)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert set(ALL) <= {path.name for path in (tmp_path / "merged").iterdir()}


def test_offline_a_tokenizer_that_is_missing_is_told(cached: Path, caplog: pytest.LogCaptureFixture) -> None:
    fetch_configuration(NAME)
    assert [one.message for one in caplog.records] == [NO_TOKENIZER]
    assert names(configuration(NAME)) == ["config.json", "generation_config.json"]
    caplog.clear()
    shutil.copyfile(TINY / "tokenizer.json", cached / "tokenizer.json")
    fetch_configuration(NAME)
    assert not caplog.records and "tokenizer.json" in names(configuration(NAME))


def test_what_can_not_be_fetched_is_told_and_ends_no_run(
    cached: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise huggingface_hub.errors.IncompleteSnapshotError("1 file(s) are missing (chat_template.jinja)", str(cached))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    shutil.copyfile(TINY / "tokenizer.json", cached / "tokenizer.json")
    fetch_configuration(NAME)
    [told] = [one.message for one in caplog.records]
    assert NAME in told and "chat_template.jinja" in told


def test_nothing_is_fetched_for_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints_of(str(TINY), tmp_path)
    checkpoints_of(str(tmp_path), tmp_path)  # what is there is all that there is
    assert not caplog.records
