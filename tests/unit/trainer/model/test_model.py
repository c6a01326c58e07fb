"""The model as the step calls it: packed samples give what each gives alone; what is not covered is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from steno.contracts.errors import ConfigError
from steno_trainer.config import TrainerSettings
from steno_trainer.errors import BadBatch
from steno_trainer.model.attention import Segments, packed_attention
from steno_trainer.model.model import cost_model, load_model
from steno_trainer.model.model_config import positions
from steno_trainer.model.sequence_parallel import take_share
from steno_trainer.model.zero_engine import PolicyEngine
from steno_trainer.packing.collate import collate
from steno_trainer.packing.plan import CostModel
from tests.unit.trainer.families import ALONE
from tests.unit.trainer.rows import row

TINY = str(Path(__file__).resolve().parents[4] / "steno/models/tiny")
ROWS = [row("a", 9, [3, 8]), row("b", 5, [1, 2, 4], seed=1), row("c", 2, [1], seed=2)]
ADVANTAGES = {"a": 1.0, "b": -1.0, "c": 0.5}


@pytest.fixture(scope="module")
def model():
    return load_model(TINY, precision="float32", zero=None)


def logprobs_of(model, rows, chunks=2):
    share = take_share(collate(rows, ADVANTAGES, [1.0] * len(rows)))
    return model(share.packed, share.segments, chunks)


def test_packed_samples_do_not_see_each_other(model) -> None:
    together, entropies = logprobs_of(model, ROWS)
    alone = [logprobs_of(model, [one]) for one in ROWS]
    torch.testing.assert_close(together, torch.cat([found[0] for found in alone]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropies, torch.cat([found[1] for found in alone]), rtol=1e-4, atol=1e-4)


def test_they_are_what_transformers_computes(model) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="eager")
    expected = []
    for one in ROWS:
        logprobs = plain(input_ids=one.token_ids_T[None]).logits[0].log_softmax(-1)
        expected += [logprobs[t - 1, one.token_ids_T[t]] for t in one.loss_mask_T.nonzero()[:, 0].tolist()]
    torch.testing.assert_close(logprobs_of(model, ROWS)[0], torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_parameters_keep_the_models_own_names(model) -> None:
    from safetensors import safe_open

    with safe_open(f"{TINY}/model.safetensors", "pt") as file:
        assert {name for name, _ in model.lm.named_parameters()} == set(file.keys())


def test_offloaded_states_change_no_gradient() -> None:
    gradients = []
    for offload in (False, True):
        model = load_model(TINY, precision="float32", zero=None, checkpointing=True, offload_activations=offload)
        logprobs, _ = logprobs_of(model, ROWS)
        logprobs.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_cost_counts_neither_embedding_nor_head(model) -> None:
    config = model.lm.config
    whole = sum(parameter.numel() for parameter in model.parameters())
    cost = cost_model(model.lm)
    assert cost.per_token == 6 * (whole - 2 * config.vocab_size * config.hidden_size)
    assert cost.per_trained == 6 * config.vocab_size * config.hidden_size


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_are_equally_long_and_hold_each_trained_token_once(ranks: int) -> None:
    packed = collate(ROWS, ADVANTAGES, [1.0] * 3)
    shares = [take_share(packed, ranks=ranks, rank=rank) for rank in range(ranks)]
    assert len({share.packed.input_ids_1S.shape for share in shares}) == 1
    assert torch.equal(torch.cat([share.chosen for share in shares]).sort()[0], torch.arange(len(packed.targets_N)))
    ids = torch.cat([share.packed.input_ids_1S for share in shares], 1)[0]
    positions = torch.cat([share.packed.position_ids_1S for share in shares], 1)[0]
    length = ids.shape[0] // ranks
    assert torch.equal(ids[:16], packed.input_ids_1S[0]) and len(ids) == shares[0].segments.starts[-1]
    assert torch.equal(positions[:16], packed.position_ids_1S[0]) and (positions[16:] < ranks).all()
    for rank, share in enumerate(shares):
        assert torch.equal(share.packed.predictor_N + rank * length, packed.predictor_N[share.chosen])
        assert torch.equal(share.packed.targets_N, packed.targets_N[share.chosen])


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("given", "longest"),
    [
        ({"rope_scaling": YARN}, 131072),  # as Qwen2.5's card has it
        ({"rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 1e6}}, 131072),
        ({"rope_scaling": YARN, "max_position_embeddings": 163840}, 163840),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 131072),  # as vLLM has it
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            32768,
        ),
        ({}, 32768),
    ],
)
def test_a_model_takes_what_its_config_stretches_its_context_to(
    tmp_path: Path, given: dict[str, Any], longest: int
) -> None:
    from transformers import AutoConfig

    body = json.loads(Path(f"{TINY}/config.json").read_text())
    for name in ("rope_scaling", "rope_parameters"):
        body.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps({**body, "max_position_embeddings": 32768, **given}))
    assert positions(AutoConfig.from_pretrained(tmp_path)) == longest


@pytest.mark.parametrize(("model", "reference"), [(32768, None), (131072, 32768), (32768, 16384), (131072, None)])
def test_samples_that_the_models_do_not_take_are_told_of_at_the_start(
    model: int, reference: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    def engine_of(longest: int) -> Any:
        lm = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=longest))
        return SimpleNamespace(module=SimpleNamespace(lm=lm))

    caplog.set_level("INFO")
    frozen = engine_of(reference) if reference is not None else None
    settings = TrainerSettings(model="m", micro_batch_tokens=65536)
    PolicyEngine(ALONE, settings, engine_of(model), frozen, CostModel(1.0, 1.0, 1.0)).tell_lengths()
    words = []
    if model < 65536:
        words.append(f"model: it takes {model} tokens, fewer than micro_batch_tokens")
    if reference is not None:
        words.append(f"reference: it takes {reference} tokens, fewer than the model")
    assert caplog.messages == [f"{one}: longer samples are not trained (too_long)" for one in words]


def test_a_folder_that_holds_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model"):
        load_model(str(tmp_path), precision="float32", zero=None)


def test_a_checkpoint_that_lacks_tensors_of_the_model_is_refused(tmp_path: Path) -> None:
    """As those of models that also see, which have the text part under other names: it would begin with random weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY, tmp_path / "model")
    tensors = load_file(f"{TINY}/model.safetensors")
    gone = sorted(tensors)[-1]
    renamed = {f"language_model.{name}" if name == gone else name: tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"its checkpoint has no {gone} .1 of the model's tensors"):
        load_model(str(tmp_path / "model"), precision="float32", zero=None)


@pytest.mark.parametrize("asked", [{"dropout": 0.1}, {"softcap": 5.0}, {"s_aux": torch.ones(1)}])
def test_attention_that_is_not_covered_is_an_error(asked) -> None:
    segments = Segments((0, 4), torch.tensor([0, 4], dtype=torch.int32), ((),))
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(BadBatch, match="not supported"):
        packed_attention(nn.Module(), x, x, x, None, segments=segments, **asked)
    with pytest.raises(BadBatch, match="does not pass"):
        packed_attention(nn.Module(), x, x, x, None)


@pytest.mark.parametrize("window", [1, 3, 8, 16])
def test_a_window_is_what_a_mask_would_leave(window: int) -> None:
    starts = (0, 17, 20, 28)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 28, 8, generator=generator) for heads in (4, 2, 2))
    found, _ = packed_attention(
        nn.Module(), q, k, v, None, segments=Segments(starts, torch.tensor(starts, dtype=torch.int32), ((),) * 3),
        sliding_window=window,
    )  # fmt: skip
    at = torch.arange(28)
    sample = torch.bucketize(at, torch.tensor(starts[1:]), right=True)
    away = at[:, None] - at
    seen = (sample[:, None] == sample) & (away >= 0) & (away < window)
    expected = nn.functional.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), seen)
    torch.testing.assert_close(found, expected.transpose(1, 2))
