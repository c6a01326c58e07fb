"""Tiny models of many families, with random weights, and what stands in for DeepSpeed where they are examined without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steno_trainer.distributed.ranks import Ranks

_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
_ROUTED |= {"topk_group": 1, "first_k_dense_replace": 1}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 16}
_LATENT |= {"qk_rope_head_dim": 8, "head_dim": 8}
_DELTA: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
_DELTA |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
_SLIDING: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "mistral": {"sliding_window": 8},
    "olmo3": _SLIDING,
    "cohere2": _SLIDING,
    "gemma3_text": _SLIDING | {"query_pre_attn_scalar": 16},
    "mixtral": _LOCAL,
    "qwen2_moe": _MOE | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": _MOE,
    "glm4_moe": _ROUTED,
    "deepseek_v3": _ROUTED | _LATENT | {"q_lora_rank": 16},
    "minimax_m2": _LOCAL,
    "qwen3_next": _DELTA | _MOE | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _MOE | {"shared_expert_intermediate_size": 32},
    "olmo_hybrid": _DELTA,
    "kimi_linear": _LOCAL | _LATENT | {"linear_num_heads": 4, "linear_head_dim": 16, "moe_intermediate_size": 32}
    | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16}
    | {"ssm_state_size": 8, "n_groups": 1, "chunk_size": 16},
    "granitemoehybrid": _MAMBA | _LOCAL | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32}
    | {"logits_scaling": 3.0},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128, "lm_head_multiplier": 0.5},
    "jamba": {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
    | {"use_mamba_kernels": False, "mamba_d_state": 8},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 2, "mamba_d_state": 8, "chunk_size": 16}
    | {"use_mamba_kernels": False},
    "minimax": _LOCAL | {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": _MOE | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "xlstm": {"num_heads": 2, "num_blocks": 2},
    "bloom": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gpt_oss": _SLIDING | _LOCAL,
    "gemma2": _SLIDING,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "llama4_text": _LOCAL | {"attention_chunk_size": 16, "intermediate_size_mlp": 64},
    "deepseek_v32": _ROUTED | _LATENT,
    "gpt2": {},
    "phi": {},
    "gptj": {"rotary_dim": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip
"""model_type -> what its configuration needs besides the sizes that most share."""


def build(family: str, folder: Path | str, **more: Any) -> None:
    """Save a model of the family: 2 layers of 64, with weights larger than its own initialisation."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shared = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    known = {"head_dim", *shared} - ({"head_dim"} if family in ("bloom", "gpt2", "gptj", "phi") else set())
    given = {name: value for name, value in shared.items() if name in known}
    config = AutoConfig.for_model(family, **{**given, **TINY_CONFIGS[family], **more})
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "A_log" not in name:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


class Engine:
    """As DeepSpeed's, around a model that no rank shares."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def train(self) -> None:
        self.module.train()

    def __call__(self, *arguments: Any) -> Any:
        return self.module(*arguments)


class _Alone(Ranks):
    def add(self, tensor: Tensor) -> Tensor:
        return tensor


ALONE = _Alone(0, 1, torch.device("cpu"), None)
