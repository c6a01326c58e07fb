"""What leaves a model: its checkpoint's names, each tensor once, in an order that every rank knows, in bounded buckets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from steno_trainer.errors import WeightsUnavailable
from steno_trainer.model.logprobs import LogprobHead
from steno_trainer.weights.source import ModelWeights
from tests.unit.trainer.weights.models import mixtral, qwen


def checkpoint(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The oracle: what transformers itself saves of a model."""
    model.save_pretrained(folder)
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def everything(source: ModelWeights) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket.items()}


@pytest.mark.parametrize("make", [qwen, lambda: qwen(tied=True), mixtral], ids=["untied", "tied", "experts"])
def test_names_and_values_are_those_of_the_saved_checkpoint(make, tmp_path: Path) -> None:
    model = make()
    expected = checkpoint(model, tmp_path)
    sent = everything(ModelWeights(model))
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], expected[name]) for name in expected)


def test_a_model_loaded_from_a_checkpoint_gives_that_checkpoints_names(tmp_path: Path) -> None:
    expected = checkpoint(mixtral(), tmp_path)
    again = type(mixtral()).from_pretrained(tmp_path, dtype=torch.float32)
    assert everything(ModelWeights(again)).keys() == expected.keys()


def test_the_plan_says_beforehand_what_the_buckets_hold() -> None:
    source = ModelWeights(mixtral(), dtype=torch.bfloat16, bucket_bytes=5000)
    for metas, bucket in zip(source.plan(), source.buckets(), strict=True):
        assert [(meta.name, meta.dtype, meta.shape) for meta in metas] == [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket.items()
        ]
        assert [meta.nbytes for meta in metas] == [tensor.nbytes for tensor in bucket.values()]


def test_no_bucket_is_larger_than_asked_unless_one_tensor_is() -> None:
    plan = ModelWeights(qwen(), bucket_bytes=10_000).plan()
    assert len(plan) > 5
    for metas in plan:
        assert sum(meta.nbytes for meta in metas) <= 10_000 or len(metas) == 1


def test_the_order_is_the_same_in_every_process_and_for_every_bucket_size() -> None:
    names = [meta.name for bucket in ModelWeights(qwen(seed=1)).plan() for meta in bucket]
    again = [meta.name for bucket in ModelWeights(qwen(seed=2), bucket_bytes=1).plan() for meta in bucket]
    assert names == again


def test_a_dtype_is_for_floating_point_only() -> None:
    class WithCounts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("counts", torch.ones(3, dtype=torch.int64))
            self.register_buffer("passing", torch.ones(3), persistent=False)

    sent = everything(ModelWeights(WithCounts(), dtype=torch.bfloat16))
    assert {name: tensor.dtype for name, tensor in sent.items()} == {"weight": torch.bfloat16, "counts": torch.int64}


def test_the_head_that_log_probabilities_use_is_sent_as_the_models_own() -> None:
    model = qwen()
    expected = everything(ModelWeights(model))
    model.lm_head = LogprobHead(model.lm_head.weight)
    sent = everything(ModelWeights(model))
    assert sent.keys() == expected.keys()


def test_what_can_not_be_converted_is_named() -> None:
    model = mixtral()
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj = nn.Parameter(torch.ones(()))  # no experts to take apart
    with pytest.raises(WeightsUnavailable, match=r"layers\.0\.mlp\.experts\.gate_up_proj"):
        ModelWeights(model)


def test_buckets_need_room() -> None:
    with pytest.raises(ValueError, match="bucket_bytes"):
        ModelWeights(qwen(), bucket_bytes=0)
