"""Parameters of public models, in all and per token, from their configurations alone."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.errors import ConfigError
from steno_trainer.model.memory_estimate import ModelShape
from steno_trainer.model.model import cost_model
from steno_trainer.model.sizes import sizes_of, skeleton

_QWEN3 = {"vocab_size": 151936, "tie_word_embeddings": False, "head_dim": 128, "num_attention_heads": 32}
PUBLIC: dict[str, tuple[float, float, dict[str, Any]]] = {
    "Qwen3-30B-A3B": (30.5, 3.3, _QWEN3 | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }),
    "Mixtral-8x7B": (46.7, 12.9, {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }),
    "Qwen3-8B": (8.2, 8.2, _QWEN3 | {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    }),
    "DeepSeek-V3": (671.0, 37.0, {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280,
    }),
    "Qwen3-Next-80B-A3B": (79.7, 3.9, _QWEN3 | {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    }),
}  # fmt: skip
"""Name -> billions of parameters in all, billions that a token meets, as they were published; the configuration."""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_model_has_the_parameters_that_were_published(name: str) -> None:
    total, active, config = PUBLIC[name]
    found = sizes_of(skeleton(config))
    assert found.total / 1e9 == pytest.approx(total, rel=0.005)
    assert found.active / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Mixtral-8x7B", "Qwen3-8B"])
def test_memory_counts_all_experts_and_work_the_chosen_ones(name: str) -> None:
    total, active, config = PUBLIC[name]
    shape = ModelShape.of(config)
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.005)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    inner = shape.active_parameters - 2 * shape.head_parameters
    assert cost_model(skeleton(config)).per_token == 6 * inner


def test_a_layer_with_a_state_has_no_pairs_of_tokens() -> None:
    config = PUBLIC["Qwen3-Next-80B-A3B"][2]
    assert cost_model(skeleton(config)).per_pair == 6 * 12 * 16 * 256, "one layer of four has attention"


def test_experts_of_which_nobody_says_how_many_are_chosen_are_refused() -> None:
    lm = skeleton(PUBLIC["Mixtral-8x7B"][2] | {"num_hidden_layers": 1})
    lm.config.num_experts_per_tok = 0
    with pytest.raises(ConfigError, match=r"mixtral: the experts of .* can't be counted: 8 there"):
        sizes_of(lm)
