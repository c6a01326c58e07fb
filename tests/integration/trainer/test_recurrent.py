"""Models whose layers keep a state over tokens train as if each sample were alone, on real ZeRO-3 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.integration.trainer.launching import run_ranks
from tests.integration.trainer.materials import VOCABULARY, random_batch
from tests.integration.trainer.reference import Reference
from tests.integration.trainer.test_step import EPSILON, RATE, compare, settings
from tests.unit.trainer.families import TINY_CONFIGS

BATCHES: list[dict[str, Any]] = [{"seed": 1, "trials": 3}, {"seed": 2, "trials": 1}]
"""Odd numbers of samples: one rank runs a dummy."""


def qwen3_5(folder: Path) -> Path:
    """As it is published: a model that also sees. Recurrent layers, and one of attention."""
    torch.manual_seed(0)
    text = TINY_CONFIGS["qwen3_5_text"] | {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    }  # fmt: skip
    sight = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }  # fmt: skip
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=sight))
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.1 if "conv1d" not in name else 0.5)
    model.save_pretrained(folder)
    return folder


def test_qwen3_5_trains_as_one_sample_at_a_time_does(tmp_path: Path) -> None:
    model = qwen3_5(tmp_path / "model")
    # A micro-batch would hold them all: packed, samples would see each other.
    job = {"settings": settings(model, micro_batch_tokens=400), "batches": BATCHES}
    found = run_ranks(2, job, tmp_path / "job")
    plain = Reference(model, learning_rate=RATE, epsilon=EPSILON)
    for report, drawn in zip(found["reports"], BATCHES, strict=True):
        batch = random_batch(**drawn)
        expected = plain.step(batch, [range(len(batch.rows))])
        measured: dict[str, Any] = {name: report["metrics"][name] for name in expected}
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert report["metrics"]["pack/micro_batches"] == -(-len(batch.rows) // 2)
    compare(found["weights"], plain.weights())
