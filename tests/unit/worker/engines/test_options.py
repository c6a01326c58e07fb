"""Wrong settings are named before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig, Phi3Config, Qwen2Config

from steno.contracts.errors import ConfigError
from steno.models import TINY
from steno_worker.engines.options import engine_options, model_directory
from steno_worker.engines.transformers.engine import TransformersEngine

DEFAULTS = {"threads": 1, "pace_s": 0.5}


@pytest.mark.parametrize(
    "given", [{"threads": 2}, ["threads=2"], ["--threads", "2"], ["--threads=2"], {"threads": "2"}]
)
def test_arguments_are_read_as_mapping_or_words(given: object) -> None:
    assert engine_options(given, DEFAULTS) == {"threads": 2, "pace_s": 0.5}


@pytest.mark.parametrize(
    ("given", "named"), [(["--threats", "2"], "threats"), (["--threads", "two"], "threads"), (["--threads"], "threads")]
)
def test_a_wrong_argument_is_named(given: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        engine_options(given, DEFAULTS)


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99", ""])
def test_a_device_that_is_not_there_is_named_before_anything_is_loaded(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine_args.device: got {device}, must be cpu or one of .* CUDA devices"):
        TransformersEngine(TINY, stop_ids=frozenset(), device=device)


SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def context_of(folder: Path, config: Any, asked: int | None) -> int:
    """The context that the embedded engine takes for a model of this configuration."""
    config.save_pretrained(folder)
    return TransformersEngine(folder, stop_ids=frozenset(), context_tokens=asked).card().context_tokens


@pytest.mark.parametrize(("asked", "context"), [(None, 64), (17, 17)])
def test_a_context_above_a_models_sliding_window_is_refused_with_the_way_out(
    tmp_path: Path, asked: int | None, context: int
) -> None:
    """Its layers have no `layer_types`: the window is all that says so."""
    with pytest.raises(ConfigError, match=rf"context_tokens: {context} .*sliding_window.*--context-tokens 16\)"):
        context_of(tmp_path, MistralConfig(**SMALL, sliding_window=16), asked)


def test_a_window_that_no_context_reaches_or_no_layer_uses_is_none(tmp_path: Path) -> None:
    assert context_of(tmp_path / "short", MistralConfig(**SMALL, sliding_window=16), 16) == 16
    assert context_of(tmp_path / "none", MistralConfig(**SMALL, sliding_window=None), None) == 64
    assert context_of(tmp_path / "off", Qwen2Config(**SMALL, sliding_window=16, use_sliding_window=False), None) == 64


def test_a_context_above_which_a_rotary_embedding_depends_on_the_other_sequences_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    bounded = {"rope_parameters": rope | {"original_max_position_embeddings": 32}, "pad_token_id": 0}
    with pytest.raises(ConfigError, match=r"context_tokens: 64 .*longrope.*--context-tokens 32\)"):
        context_of(tmp_path / "over", Phi3Config(**SMALL, **bounded, original_max_position_embeddings=32), None)
    config = Phi3Config(**SMALL, **bounded, original_max_position_embeddings=32)
    assert context_of(tmp_path / "at", config, 32) == 32
    assert context_of(tmp_path / "plain", Phi3Config(**SMALL, pad_token_id=0), None) == 64


@pytest.mark.parametrize("argument", ["threads", "prefill_tokens"])
def test_numbers_below_one_are_refused(argument: str) -> None:
    given: dict[str, Any] = {argument: 0}
    with pytest.raises(ConfigError, match=rf"engine_args\.{argument}: got 0, must be at least 1"):
        TransformersEngine(TINY, stop_ids=frozenset(), **given)


def test_the_shipped_model_is_the_default() -> None:
    assert model_directory(None, weights=True) == TINY


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_directory_without_a_model_is_refused(tmp_path: Path, missing: str) -> None:
    for name in {"config.json", "tokenizer.json"} - {missing}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=missing):
        model_directory(tmp_path, weights=True)
    with pytest.raises(ConfigError, match=r"none is not a directory, and .*: give a model's folder .*--engine vllm"):
        model_directory(tmp_path / "none", weights=False)
