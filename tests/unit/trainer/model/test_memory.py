"""The memory estimate: what of it can be counted without a GPU is; the docs' table and the sample configurations are its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from steno.contracts.errors import ConfigError
from steno_trainer.config import TrainerSettings
from steno_trainer.model import attention
from steno_trainer.model.adapter import add_adapter
from steno_trainer.model.attention import Segments
from steno_trainer.model.deepspeed_config import deepspeed_config
from steno_trainer.model.memory_estimate import (
    GIB,
    SAMPLES,
    Machine,
    MemoryOptions,
    ModelShape,
    estimate,
    longest_sample,
    lora_table,
    table,
)
from tests.unit.trainer.families import TINY_CONFIGS

ROOT = Path(__file__).resolve().parents[4]
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 192},
}


def built(kind: str, **fields: Any) -> PreTrainedModel:
    attention.register()
    configuration, model = KINDS[kind]
    known = {
        "vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, **EXPERTS.get(kind, {}),
    }  # fmt: skip
    return model._from_config(
        configuration(**{**known, **fields}), dtype=torch.bfloat16, attn_implementation=attention.NAME
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(kind: str, tied: bool) -> None:
    model = built(kind, tie_word_embeddings=tied, num_key_value_heads=2)
    shape = ModelShape.of(model.config.to_dict())
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", [{}, {"hidden_size": 512, "intermediate_size": 256}, {"head_dim": 64}])
@pytest.mark.parametrize("rank", [0, 8])
def test_what_a_layer_keeps_is_what_is_estimated(kind: str, fields: dict[str, int], rank: int) -> None:
    model = built(kind, **fields)
    shape = ModelShape.of(model.config.to_dict())
    if rank:
        add_adapter(model, rank=rank, alpha=None, targets=[], seed=0)
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    tokens, kept = 256, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    states = torch.randn(1, tokens, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(tokens)[None]
    segments = Segments((0, tokens), torch.tensor([0, tokens], dtype=torch.int32), ((),))
    embeddings = model.base_model.rotary_emb(states, positions)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model.layers[0](
            states, attention_mask=None, position_embeddings=embeddings, position_ids=positions, segments=segments
        )
    measured = sum(size for size, _ in kept.values()) / tokens
    if rank:  # norms that are frozen keep less
        assert 0.6 * (shape.saved_per_token + 14 * rank) < measured < 1.05 * (shape.saved_per_token + 14 * rank)
    else:
        assert shape.saved_per_token == pytest.approx(measured, rel=0.05)


def test_every_choice_takes_what_it_should_off_the_gpu() -> None:
    _, shape, plain = SAMPLES["14b"]
    machine = Machine()
    before = estimate(shape, machine, MemoryOptions(), 8192)
    assert before.gpu["weights"] + before.gpu["gradients"] + before.gpu["optimizer"] == pytest.approx(
        18 * shape.parameters / 8
    )
    assert estimate(shape, machine, replace(plain, offload_optimizer=True), 8192).gpu["optimizer"] == 0
    shared = estimate(shape, machine, MemoryOptions(sequence_parallel=8), 8192)
    assert shared.gpu["states"] == before.gpu["states"] / 8
    lengths = [
        longest_sample(shape, machine, choice)
        for choice in (
            MemoryOptions(), plain,
            replace(plain, offload_optimizer=True, activation_offload=True),
        )
    ]  # fmt: skip
    assert lengths == sorted(lengths) and lengths[0] < lengths[1] < lengths[2]
    assert longest_sample(shape, replace(machine, gpus=1), MemoryOptions()) == 0
    fits = estimate(shape, machine, MemoryOptions(), lengths[0]).gpu_total
    assert fits <= 80 * GIB < fits + 20 * GIB


def test_what_nccl_holds_is_counted_and_a_head_is_larger_than_a_buffer() -> None:
    shape = SAMPLES["7b"][1]
    with_it, without = (
        estimate(shape, Machine(), MemoryOptions(nccl=nccl), 1024).gpu["nccl"] for nccl in (True, False)
    )
    head = 2.0 * shape.head_parameters
    assert without == 0 and with_it == 256 * 2**20 + 6 * head > 2 * GIB
    small = estimate(replace(shape, vocabulary=1000), Machine(), MemoryOptions(nccl=True), 1024).gpu["nccl"]
    assert small == pytest.approx(256 * 2**20 + 4 * 256 * 2**20, rel=0.02)


def test_the_last_push_is_counted_where_differences_are_sent() -> None:
    shape = SAMPLES["7b"][1]
    plain, delta = (estimate(shape, Machine(), MemoryOptions(delta=delta), 1024) for delta in (False, True))
    assert delta.host - plain.host == 2 * shape.parameters and delta.gpu == plain.gpu


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_configuration_is_one_that_its_estimate_carries(name: str) -> None:
    settings = TrainerSettings.load({}, ROOT / f"deploy/deepspeed/{name}.yaml")
    settings.check()
    assert settings.deepspeed is not None
    made = deepspeed_config(settings.model_copy(update={"deepspeed": ROOT / settings.deepspeed}), cuda=True)
    model, shape, choice = SAMPLES[name]
    zero = made["zero_optimization"]
    assert model in settings.model
    assert choice.live == zero["stage3_max_live_parameters"]
    assert choice.buckets == zero["reduce_bucket_size"] + zero["stage3_prefetch_bucket_size"]
    assert choice.chunk_tokens == settings.chunk_tokens
    assert (choice.offload_optimizer, choice.activation_offload) == (
        settings.offload_optimizer,
        settings.activation_offload,
    )
    assert settings.micro_batch_tokens <= longest_sample(shape, Machine(), choice)


def test_the_table_in_the_docs_is_the_one_that_is_computed() -> None:
    docs = (ROOT / "docs/trainer-operations.md").read_text()
    assert table() in docs and lora_table() in docs, "run python -m steno_trainer.model.memory_estimate"


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_has_as_many_parameters_as_are_estimated_and_all_else_is_frozen(kind: str) -> None:
    model = built(kind, num_key_value_heads=2)
    shape = ModelShape.of(model.config.to_dict())
    add_adapter(model, rank=8, alpha=None, targets=[], seed=0)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert shape.adapter_parameters(8) == trained
    machine, options = Machine(gpus=1), MemoryOptions(lora_rank=8)
    found = estimate(shape, machine, options, 1024).gpu
    assert found["gradients"] + found["optimizer"] == 16 * trained
    assert found["weights"] == 2 * (shape.parameters + trained)


@pytest.mark.parametrize("rank", [0, 8])
def test_a_reference_that_is_loaded_is_counted_with_an_adapter_too(rank: int) -> None:
    shape, machine = SAMPLES["7b"][1], Machine(gpus=2)
    options = MemoryOptions(lora_rank=rank, offload_optimizer=True)
    alone, beside = (estimate(shape, machine, replace(options, reference=given), 1024) for given in (False, True))
    assert beside.gpu["weights"] - alone.gpu["weights"] == pytest.approx(2 * shape.parameters / 2)
    offloaded = replace(options, offload_parameters=True)
    alone, beside = (estimate(shape, machine, replace(offloaded, reference=given), 1024) for given in (False, True))
    assert beside.gpu == alone.gpu and beside.host - alone.host == pytest.approx(2 * shape.parameters)


def test_a_models_own_configuration_is_read() -> None:
    config = json.loads((ROOT / "steno/models/tiny/config.json").read_text())
    shape = ModelShape.of(config)
    assert (shape.qk_norm, shape.attention_bias, shape.tied, shape.head_size) == (True, False, False, 32)


def test_a_model_whose_layers_are_others_is_refused_with_its_counts() -> None:
    config = AutoConfig.for_model("qwen3_5_text", **TINY_CONFIGS["qwen3_5_text"], num_hidden_layers=2).to_dict()
    with pytest.raises(
        ConfigError, match=r"model_type qwen3_5_text: [\d,]+ parameters, [\d,]+ active per token; no estimate"
    ):
        ModelShape.of(config)
