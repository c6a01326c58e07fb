"""Small models whose names and shapes are like real ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM


def qwen(*, tied: bool = False, layers: int = 2, hidden: int = 32, vocab: int = 64, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=vocab,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM(config)


def mixtral() -> PreTrainedModel:
    torch.manual_seed(0)
    config: Any = MixtralConfig(
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        num_local_experts=3,
    )
    return MixtralForCausalLM(config)
