"""Which weights a checkpoint has: the same however they are cut into files, and others for any bit, name or shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from steno.models.checkpoint import checkpoint_digest

TENSORS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.ones(4, dtype=torch.bfloat16),
    "c": torch.zeros(0),
}


def write(folder: Path, *files: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    places = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{number}.safetensors")
        places |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    save_file({"x": torch.ones(1)}, folder / "adapter.safetensors")  # not of the model
    return folder


def test_files_do_not_matter(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", TENSORS)
    rest = {name: tensor for name, tensor in TENSORS.items() if name != "a.weight"}
    cut = write(tmp_path / "cut", rest, {"a.weight": TENSORS["a.weight"]})
    assert checkpoint_digest(whole) == checkpoint_digest(cut)


@pytest.mark.parametrize(
    "other",
    [
        {"a.weight": TENSORS["a.weight"] + 1},
        {"a.weight": TENSORS["a.weight"].reshape(3, 2)},
        {"b.weight": TENSORS["b.weight"].half()},
        {"d": torch.zeros(1)},
    ],
)
def test_other_weights_have_another_digest(tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
    assert checkpoint_digest(write(tmp_path / "a", TENSORS)) != checkpoint_digest(
        write(tmp_path / "b", TENSORS | other)
    )


def test_what_has_no_safetensors_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}: can't read its weights, which must be safetensors files"):
        checkpoint_digest(tmp_path)
    folder = write(tmp_path / "cut off", TENSORS)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="ends before tensor"):
        checkpoint_digest(folder)
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="is no safetensors file"):
        checkpoint_digest(folder)
