"""An adapter in a model: which layers get one, what the model is without it, and what leaves the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from steno.contracts.errors import ConfigError
from steno_trainer.checkpoints.merging import merge_adapter
from steno_trainer.config import TrainerSettings
from steno_trainer.model.adapter import add_adapter, without_adapter
from steno_trainer.model.model import PolicyModel, cost_model, load_model
from steno_trainer.weights.adapters import MergedWeights, adapted_layers, write_adapter
from steno_trainer.weights.source import ModelWeights
from tests.unit.trainer.families import build

TINY = str(Path(__file__).resolve().parents[4] / "steno/models/tiny")
IDS = torch.arange(24).reshape(2, 12)


def plain(precision: str = "float32") -> PolicyModel:
    """With transformers' own attention, which takes ids alone."""
    model = load_model(TINY, precision=precision, zero=None)
    model.lm.set_attn_implementation("eager")
    return model


def loaded(precision: str = "float32", *, rank: int = 4, targets: tuple[str, ...] = (), seed: int = 0) -> PolicyModel:
    model = plain(precision)
    add_adapter(model.lm, rank=rank, alpha=8, targets=targets, seed=seed)
    return model


def trained(model: PolicyModel) -> PolicyModel:
    """With a B that is not 0."""
    generator = torch.Generator().manual_seed(1)
    for layer in adapted_layers(model.lm).values():
        weight = layer.lora_B["default"].weight
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    return model


def test_an_unknown_target_names_the_layers_that_there_are() -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(targets=("q_proj", "attn", "lm_head"))
    assert refused.value.message == (
        "lora_targets: got attn, lm_head; the model's linear layers that can have an adapter are down_proj, gate_proj, k_proj, "
        "o_proj, q_proj, up_proj, v_proj"
    )
    assert refused.value.field == "lora_targets"


MIXTURES = {
    "deepseek_v3": "kv_a_proj_with_mqa, kv_b_proj, o_proj, q_a_proj, q_b_proj",
    "glm4_moe": "k_proj, o_proj, q_proj, v_proj",
    "qwen3_next": "in_proj_ba, in_proj_qkvz, k_proj, o_proj, out_proj, q_proj, shared_expert_gate, v_proj",
    "qwen3_moe": "k_proj, o_proj, q_proj, v_proj",
}
"""Kind with experts in one tensor, and layers whose names peft takes for those of the experts -> what can have an adapter."""


def of_kind(family: str, folder: Path) -> PolicyModel:
    build(family, folder, **({"mlp_only_layers": [0]} if family == "qwen3_moe" else {}))
    return load_model(str(folder), precision="float32", zero=None, longest=8)


def adapted_words(model: PolicyModel) -> str:
    return ", ".join(sorted({path.rsplit(".", 1)[-1] for path in adapted_layers(model.lm)}))


@torch.no_grad()
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_in_one_tensor_get_no_adapter_that_what_is_sent_would_lack(family: str, tmp_path: Path) -> None:
    model = of_kind(family, tmp_path)
    add_adapter(model.lm, rank=4, alpha=8, targets=[], seed=0)
    assert adapted_words(model) == MIXTURES[family]
    adapters = sum("lora_A" in name for name, _ in model.lm.named_parameters())
    assert adapters == len(MergedWeights(model.lm)._pairs) > 0
    sent = {meta.name: meta for bucket in MergedWeights(model.lm).plan() for meta in bucket}
    plain = load_model(str(tmp_path), precision="float32", zero=None, longest=8).lm
    assert sent == {meta.name: meta for bucket in ModelWeights(plain).plan() for meta in bucket}


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("targets", [["gate_proj"], ["down_proj", "gate_proj", "q_proj", "up_proj"]])
def test_a_target_that_would_be_experts_is_refused_by_name(family: str, targets: list[str], tmp_path: Path) -> None:
    model = of_kind(family, tmp_path)
    with pytest.raises(ConfigError) as refused:
        add_adapter(model.lm, rank=4, alpha=8, targets=targets, seed=0)
    there = MIXTURES[family]
    got = ", ".join(word for word in targets if word not in there.split(", "))
    assert refused.value.field == "lora_targets"
    assert refused.value.message == (
        f"lora_targets: got {got}; the model's linear layers that can have an adapter are {there}"
    )


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["gate_proj"], "lora_targets: got gate_proj: Cannot convert .* fused into gate_up_proj"),
        (["down_proj", "q_proj"], "got down_proj, q_proj; of these peft adapts down_proj, .*; allowed: q_proj$"),
    ],
)
def test_what_peft_makes_of_a_target_is_looked_at_after_it_too(
    targets: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = of_kind("glm4_moe", tmp_path)
    monkeypatch.setattr("steno_trainer.model.adapter.chosen_targets", lambda lm, targets: targets)
    with pytest.raises(ConfigError, match=said) as refused:
        add_adapter(model.lm, rank=4, alpha=8, targets=targets, seed=0)
    assert refused.value.field == "lora_targets"


@pytest.mark.parametrize(
    ("family", "refused", "adapted"),
    [
        ("nemotron_h", "out_proj", "in_proj, k_proj, o_proj, q_proj, v_proj"),
        ("falcon_h1", "out_proj", "down_proj, gate_proj, in_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        ("mamba", "out_proj", "dt_proj, in_proj, x_proj"),
        ("mamba2", "out_proj", "in_proj"),
        ("zamba2", "0", "down_proj, gate_up_proj, in_proj, k_proj, linear, o_proj, out_proj, q_proj, v_proj"),
    ],
)
def test_what_peft_refuses_and_names_of_other_modules_are_no_targets(
    family: str, refused: str, adapted: str, tmp_path: Path
) -> None:
    model = of_kind(family, tmp_path)
    with pytest.raises(ConfigError, match=f"lora_targets: got {refused}; .* are {adapted}$") as error:
        add_adapter(model.lm, rank=4, alpha=8, targets=[refused], seed=0)
    assert error.value.field == "lora_targets"
    add_adapter(model.lm, rank=4, alpha=8, targets=[], seed=0)
    assert adapted_words(model) == adapted


def test_a_linear_layer_with_a_forward_pass_of_its_own_gets_no_adapter(tmp_path: Path) -> None:
    model = of_kind("llama4_text", tmp_path)
    add_adapter(model.lm, rank=4, alpha=8, targets=[], seed=0)
    assert adapted_words(model) == "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"lora_rank": 0}, "lora_rank"), ({"lora_rank": 2000}, "lora_rank"), ({"lora_rank": 4, "lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": 8}, "lora_alpha"), ({"lora_targets": ["q_proj"]}, "lora_targets"),
    ],
)  # fmt: skip
def test_a_setting_that_can_not_be_is_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace("_", "[_-]")) as refused:
        TrainerSettings.load({"model": "m", **given}, None).check()
    assert refused.value.field == field


def test_all_ranks_draw_the_same_adapter_whatever_their_own_random_numbers_are() -> None:
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn.append({name: weight.clone() for name, weight in loaded().lm.named_parameters() if "lora_A" in name})
        assert torch.initial_seed() == seed
    assert len(drawn[0]) == len(adapted_layers(loaded().lm)) > 7
    assert all(torch.equal(weight, drawn[1][name]) for name, weight in drawn[0].items())
    other = dict(loaded(seed=5).lm.named_parameters())
    assert not any(torch.equal(weight, other[name]) for name, weight in drawn[0].items())


@torch.no_grad()
def test_without_it_the_model_is_what_it_was_to_the_bit() -> None:
    before = plain().lm(input_ids=IDS).logits
    model = trained(loaded()).lm
    adapted = model(input_ids=IDS).logits
    assert (adapted - before).abs().max() > 0.1
    with pytest.raises(ValueError, match="out"), without_adapter(model):
        assert torch.equal(model(input_ids=IDS).logits, before)
        raise ValueError("out")
    assert torch.equal(model(input_ids=IDS).logits, adapted)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_sent_is_merged_in_float32_under_the_names_of_the_checkpoint(precision: str) -> None:
    model = trained(loaded(precision, targets=("q_proj", "down_proj"))).lm
    expected = {meta.name: meta for bucket in ModelWeights(plain(precision).lm).plan() for meta in bucket}
    source = MergedWeights(model, bucket_bytes=100_000)
    assert {meta.name: meta for bucket in source.plan() for meta in bucket} == expected and len(source.plan()) > 3
    sent = {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket.items()}
    before = load_file(f"{TINY}/model.safetensors")
    layers = adapted_layers(model)
    for name, tensor in sent.items():
        weight = before[name].to(tensor.dtype)
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            assert torch.equal(tensor, weight), name
            continue
        product = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        expected = weight.double() + 8 / 4 * product
        # Rounded once: to the nearest number of the type that is sent, or its neighbour where float32 was in between.
        torch.testing.assert_close(
            tensor.double(), expected, rtol=2**-8 if precision == "bfloat16" else 1e-5, atol=1e-5
        )
        assert not torch.equal(tensor, weight)
    if precision == "float32":
        again = plain().lm
        again.load_state_dict(sent)
        torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)


def test_frozen_weights_cost_two_thirds() -> None:
    lm = plain().lm
    whole, frozen = cost_model(lm), cost_model(lm, frozen=True)
    assert frozen.per_token == pytest.approx(whole.per_token * 2 / 3) and frozen.per_pair == whole.per_pair
    assert frozen.per_trained == pytest.approx(whole.per_trained * 2 / 3)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(trained(loaded("bfloat16")).lm, folder, base=TINY, writes=True)
    return folder


def test_an_adapter_merges_into_the_model_that_it_names(adapter: Path, tmp_path: Path) -> None:
    merge_adapter(adapter, tmp_path / "deep/merged")
    source = MergedWeights(trained(loaded("bfloat16")).lm)
    merged = load_file(tmp_path / "deep/merged/model-00001-of-00001.safetensors")
    with torch.no_grad():
        for bucket in source.buckets():
            assert all(torch.equal(merged[name], tensor) for name, tensor in bucket.items())
    files = {path.name for path in (tmp_path / "deep/merged").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= files
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["merged"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"use_rslora": True}, "use_rslora: got True, must be False"),
        ({"peft_type": "IA3"}, "peft_type: got IA3, must be LORA"),
        ({"target_modules": "all-linear"}, "target_modules: got all-linear, must be a list of names"),
        ({"target_modules": ["attn"]}, "not an adapter of the model .*: lora_targets: got attn"),
        ({"target_modules": ["q_proj"]}, "not an adapter of the model .* is in one of them alone"),
        ({"r": 2}, r"lora_A.weight: got shape \[4, .*\], must be \[2, "),
        ({"base_model_name_or_path": "/nowhere/at/all"}, "model /nowhere/at/all"),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused_and_nothing_is_left(
    adapter: Path, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changed))
    save_file(load_file(adapter / "adapter_model.safetensors"), folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=said):
        merge_adapter(folder, tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_model_that_was_trained_within_its_chunks_is_merged(tmp_path: Path) -> None:
    model = of_kind("llama4_text", tmp_path / "model")
    with pytest.raises(ConfigError, match="attention_chunk_size is 16"):
        load_model(str(tmp_path / "model"), precision="float32", zero=None)
    add_adapter(model.lm, rank=4, alpha=8, targets=["q_proj"], seed=0)
    (tmp_path / "adapter").mkdir()
    write_adapter(trained(model).lm, tmp_path / "adapter", base=str(tmp_path / "model"), writes=True)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model-00001-of-00001.safetensors")
    with torch.no_grad():
        for bucket in MergedWeights(model.lm).buckets():
            assert all(torch.equal(merged[name], tensor) for name, tensor in bucket.items())


def test_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an adapter"):
        merge_adapter(tmp_path, tmp_path / "merged")
