"""What ZeRO-3 ranks push has the names and values of the checkpoint that they began with, whatever transformers calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from tests.integration.trainer.launching import run_ranks
from tests.integration.trainer.test_recurrent import qwen3_5
from tests.integration.trainer.test_step import settings
from tests.unit.trainer.families import TINY_CONFIGS, build

_TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
_SIGHT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def gemma3(folder: Path) -> None:
    """Its head is its embedding."""
    config = Gemma3Config(text_config=_TEXT | TINY_CONFIGS["gemma3_text"], vision_config=_SIGHT, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)


def mistral3(folder: Path) -> None:
    """Its head is its own."""
    text, sight = _TEXT | {"model_type": "mistral"}, _SIGHT | {"model_type": "pixtral", "head_dim": 16}
    config = Mistral3Config(text_config=text, vision_config=sight, tie_word_embeddings=False)
    Mistral3ForConditionalGeneration(config).save_pretrained(folder)


def qwen3_5_text(folder: Path) -> None:
    """The text part alone, of a family that is published with sight."""
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_TEXT | TINY_CONFIGS["qwen3_5_text"])).save_pretrained(folder)


def mixture(folder: Path) -> None:
    """Its experts are one tensor for all in transformers, and each by itself in the checkpoint."""
    build("qwen3_moe", folder)


@pytest.mark.parametrize(
    ("write", "prefix"),
    [
        (gemma3, "language_model.model."), (mistral3, "language_model.model."), (qwen3_5, "model.language_model."),
        (qwen3_5_text, "model."), (mixture, "model."),
    ],
)  # fmt: skip
def test_weights_leave_under_the_names_that_they_came_by(
    tmp_path: Path, write: Callable[[Path], object], prefix: str
) -> None:
    folder = tmp_path / "model"
    torch.manual_seed(0)
    write(folder)
    job = {"settings": settings(folder), "batches": [], "pushed": "float32"}
    pushed = run_ranks(1, job, tmp_path / "job")["pushed"]
    published = load_file(folder / "model.safetensors")
    text = {name for name in published if name.startswith(prefix) or "lm_head" in name}
    assert len(text) > 20 and pushed.keys() == text
    for name in text:
        assert torch.equal(pushed[name], published[name]), name
