"""What a model's samples may share is found out at load, and what is not covered is refused there, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from steno.contracts.errors import ConfigError
from steno_trainer.model.coverage import examine
from steno_trainer.model.model import PolicyModel, load_model
from steno_trainer.model.sequence_parallel import take_share
from steno_trainer.packing.collate import collate
from tests.unit.trainer.families import ALONE, TINY_CONFIGS, Engine, build
from tests.unit.trainer.rows import row

PACKED = (
    "llama", "qwen2", "qwen3", "phi3", "granite", "cohere", "mistral", "olmo3", "cohere2", "gemma3_text", "mixtral",
    "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2",
)  # fmt: skip
ONE_A_CALL = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "nemotron_h", "granitemoehybrid", "bamba",
    "falcon_h1", "jamba", "zamba2", "minimax", "lfm2", "lfm2_moe", "mamba", "mamba2", "xlstm", "bloom",
)  # fmt: skip
REFUSED = {
    "gpt_oss": "sinks", "gemma2": "final_logit_softcapping is 30.0", "recurrent_gemma": "logits_soft_cap is 30.0",
    "llama4_text": "attention_chunk_size is 16", "deepseek_v32": "kind indexed_attention", "gpt2": "attn_pdrop is 0.1",
    "phi": "its output head is not a plain matrix", "gptj": "not supported",
}  # fmt: skip
LONGEST = 256
PAGE = (Path(__file__).parents[4] / "docs" / "training.md").read_text()


def load(family: str, folder: Path, **more: object) -> PolicyModel:
    build(family, folder, **more)
    return load_model(str(folder), precision="float32", zero=None, longest=LONGEST)


def ask(model: PolicyModel, *, longest: int = LONGEST, precision: str = "float32") -> str | None:
    return examine(Engine(model), ALONE, name="it", precision=precision, longest=longest)


def logprobs(model: PolicyModel, rows: list) -> torch.Tensor:
    share = take_share(collate(rows, {"a": 1.0}, [1.0] * len(rows)))
    with torch.no_grad():
        return model(share.packed, share.segments, 1)[0]


@pytest.mark.parametrize("family", PACKED)
def test_samples_of_attention_alone_share_a_call(family: str, tmp_path: Path) -> None:
    assert ask(load(family, tmp_path)) is None


@pytest.mark.parametrize("family", ONE_A_CALL)
def test_samples_of_layers_with_a_state_do_not(family: str, tmp_path: Path) -> None:
    model = load(family, tmp_path)
    why = ask(model)
    assert why is not None and "other ids in one sample change the next one's log-probabilities" in why
    rows = [row("a", 11, [3, 10]), row("a", 7, [1, 2, 6], seed=1)]
    together, alone = logprobs(model, rows)[2:], logprobs(model, rows[1:])
    assert (together - alone).abs().max() > 1e-3, "or packed samples do not see each other"


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_covered_is_refused_by_name(family: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=REFUSED[family]) as refused:
        ask(load(family, tmp_path))
    assert refused.value.field == "model"


def test_bfloat16_is_told_from_what_leaks(tmp_path: Path) -> None:
    for family, packed in (("qwen3", True), ("qwen3_moe", True), ("qwen3_5_moe_text", False)):
        build(family, tmp_path / family)
        model = load_model(str(tmp_path / family), precision="bfloat16", zero=None)
        assert (ask(model, precision="bfloat16") is None) == packed


def test_what_depends_on_the_longest_sample_is_not_shared(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    why = ask(load("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=128))
    assert why == "its rotary embedding depends on the longest sample of a call"


def test_what_is_random_while_training_is_refused(tmp_path: Path) -> None:
    model = load("llama", tmp_path)
    model.lm.model.layers[1].mlp = nn.Sequential(model.lm.model.layers[1].mlp, nn.Dropout(0.1))
    with pytest.raises(ConfigError, match="a part of it is random while training"):
        ask(model)


def test_spoiled_weights_are_left_to_the_steps_own_check(tmp_path: Path) -> None:
    model = load("qwen3", tmp_path)
    with torch.no_grad():
        model.lm.model.layers[0].mlp.up_proj.weight.fill_(torch.inf)
    assert ask(model) == "its log-probabilities are NaN or infinite"


def test_logits_that_are_bent_in_a_way_that_nobody_named_are_refused(tmp_path: Path) -> None:
    model = load("cohere", tmp_path)
    model._factor = 1.0
    with pytest.raises(ConfigError, match=r"differ from transformers' own by .* nats"):
        ask(model)


def test_windows_that_attention_is_not_told_of_are_refused(tmp_path: Path) -> None:
    model = load("llama", tmp_path, sliding_window=100)  # beyond what the samples of the examination show
    with pytest.raises(ConfigError, match="sliding_window is 100 in 2 layers, and attention was called with it in 0"):
        ask(model)
    assert ask(model, longest=100) is None
    assert ask(load("mistral", tmp_path / "told", sliding_window=100)) is None


def test_samples_with_a_state_are_not_cut_for_ranks_that_share_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sequence_parallel is 2, allowed: 1") as refused:
        examine(
            Engine(load("qwen3_5_text", tmp_path)), replace(ALONE, sequence_size=2), name="it", precision="float32",
            longest=LONGEST,
        )  # fmt: skip
    assert refused.value.field == "sequence_parallel"


def test_the_docs_say_what_became_of_every_family() -> None:
    assert {*PACKED, *ONE_A_CALL, *REFUSED} == TINY_CONFIGS.keys()
    for families, outcome in ((PACKED, "packed"), (ONE_A_CALL, "one sample per call"), (REFUSED, "refused")):
        rows = [line for line in PAGE.splitlines() if line.startswith(f"| {outcome} |")]
        assert [family for family in families if not any(f"`{family}`" in line for line in rows)] == []
