"""Weights fit a model, or the tensor that does not is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from steno.contracts.errors import WeightsRefused
from steno_worker.weights.tensors import check_fits, places_in, places_of, read_tensors, text_places
from tests.support.weights.shards import tensor, write
from tests.support.weights.trained import export

EMBEDDING = torch.randn(6, 4)
STATE = {"embed": EMBEDDING, "head": EMBEDDING, "norm": torch.ones(4), "steps": torch.zeros(2, dtype=torch.int64)}
PLACES = places_of(STATE)


def fits(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    check_fits(export({name: tensor.clone() for name, tensor in tensors.items()}, folder, shards=1).tensors, PLACES)


@pytest.mark.parametrize("left_out", [None, "embed", "head"])
def test_of_names_that_are_one_tensor_one_is_enough(tmp_path: Path, left_out: str | None) -> None:
    fits(tmp_path, {name: tensor for name, tensor in STATE.items() if name != left_out})


def test_floating_types_are_converted(tmp_path: Path) -> None:
    fits(tmp_path, {**STATE, "norm": torch.ones(4, dtype=torch.bfloat16)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head": EMBEDDING + 1}, "'head' is the same tensor as 'embed'"),
        ({"norm": None}, "'norm' is missing"),
        ({"embed": None, "head": None}, "'embed' is missing"),
        ({"norm": torch.ones(5)}, r"'norm' has shape \[5\], the model's is \[4\]"),
        ({"norm": torch.ones(4, dtype=torch.int64)}, "'norm' has dtype int64"),
        ({"steps": torch.ones(2)}, "'steps' has dtype float32"),
        ({"other": torch.ones(1)}, "'other' is not of this model"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, torch.Tensor | None], said: str) -> None:
    tensors = {name: tensor for name, tensor in (STATE | change).items() if tensor is not None}
    with pytest.raises(WeightsRefused, match=said) as refused:
        fits(tmp_path, tensors)
    assert (refused.value.field or "").startswith("manifest.tensors.")


def test_all_shards_are_read_into_memory(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in STATE.items()}
    manifest = export(tensors, tmp_path)
    read = read_tensors(tmp_path, manifest)
    (tmp_path / manifest.shards[0].name).unlink()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(WeightsRefused, match=manifest.shards[0].name):
        read_tensors(tmp_path, manifest)


def test_weights_that_lie_once_more_beside_the_checkpoint_are_no_tensors_of_it(tmp_path: Path) -> None:
    """As Mistral publishes them: by other names, in a file that no index names."""
    shards = {
        f"model-0000{i}-of-00002.safetensors": {f"model.layers.{i}.weight": tensor([4, 3], i)} for i in range(1, 3)
    }
    pushed = write(tmp_path / "pushed", shards)
    folder = tmp_path / "sharded"
    write(folder, {**shards, "consolidated.safetensors": {"layers.0.weight": tensor([4, 3])}})
    named = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    check_fits(pushed.tensors, places_in(folder))
    whole = {"model.safetensors": {name: one for tensors in shards.values() for name, one in tensors.items()}}
    write(tmp_path / "whole", {**whole, "consolidated.safetensors": {"layers.0.weight": tensor([4, 3])}})
    check_fits(pushed.tensors, places_in(tmp_path / "whole"))


def test_without_an_index_all_files_are_the_checkpoint(tmp_path: Path) -> None:
    assert places_in(tmp_path) == {}
    pushed = write(tmp_path, {f"part-{i}.safetensors": {f"layer.{i}": tensor([2, 2], i)} for i in range(2)})
    check_fits(pushed.tensors, places_in(tmp_path))


@pytest.mark.parametrize(
    ("text", "beside"),
    [
        ("model", "mtp.fc.weight"),  # Qwen3-Next
        ("model", "mtp.layers.0.self_attn.q_proj.weight"),
        ("model", "model.mtp_block.0.mlp.up_proj.weight"),  # ERNIE 4.5
        ("model", "model.layers.2.eh_proj.weight"),  # DeepSeek V3, GLM-4.5: the layer after the last one
        ("model", "model.layers.1.self_attn.rotary_emb.inv_freq"),
        ("model", "visual.blocks.0.attn.qkv.weight"),  # Qwen2.5-VL
        ("model.language_model", "model.visual.merger.norm.weight"),  # Qwen3.5
        ("language_model.model", "vision_tower.vision_model.head.weight"),  # Gemma 3
        ("language_model.model", "mm_soft_emb_norm.weight"),
    ],
)
def test_a_push_may_leave_out_what_is_no_part_of_the_text_model(tmp_path: Path, text: str, beside: str) -> None:
    """transformers leaves it out when it loads the checkpoint for training, so a trainer can't send it."""
    pushed = {f"{text}.layers.{i}.mlp.up_proj.weight": tensor([4, 3], i) for i in range(2)}
    pushed["lm_head.weight"] = tensor([6, 4])
    manifest = write(tmp_path, {"model.safetensors": {**pushed, beside: tensor([3])}})
    places = text_places(places_in(tmp_path), 2)
    check_fits(manifest.tensors, places)
    check_fits([one for one in manifest.tensors if one.name != beside], places)
    for name in pushed:
        with pytest.raises(WeightsRefused, match=f"'{name}' is missing"):
            check_fits([one for one in manifest.tensors if one.name not in (name, beside)], places)


def test_what_is_no_part_of_the_text_model_has_its_shape_where_it_is_sent(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"mtp.fc.weight": tensor([4, 3])}})
    sent = write(tmp_path / "sent", {"model.safetensors": {"mtp.fc.weight": tensor([3, 4])}})
    with pytest.raises(WeightsRefused, match=r"'mtp\.fc\.weight' has shape"):
        check_fits(sent.tensors, text_places(places_in(tmp_path), None))
