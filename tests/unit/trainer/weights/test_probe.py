"""The probe is what a plain forward pass says, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steno_trainer.errors import WeightsUnavailable
from steno_trainer.weights.probe import LARGEST, ProbeTolerance
from tests.support.weights.probe import make_probe, probe_ids
from tests.unit.trainer.weights.models import qwen


def test_log_probabilities_are_those_of_each_token_given_the_ones_before() -> None:
    model = qwen().train()
    ids = probe_ids(64, count=6)
    probe = make_probe(model, ids)
    for end in range(1, 6):
        logits = model(torch.tensor([ids[:end]])).logits[0, -1].double()
        assert probe.logprobs[end - 1] == pytest.approx(torch.log_softmax(logits, -1)[ids[end]].item(), abs=1e-4)
    assert probe.token_ids == ids and probe.tolerance == LARGEST["float32"]
    assert model.training


def test_a_module_may_give_bare_logits() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids)

    assert len(make_probe(Bare(), [1, 2, 3], tolerance=ProbeTolerance.of("bfloat16")).logprobs) == 2


def test_ids_are_the_same_everywhere_and_within_the_vocabulary() -> None:
    assert probe_ids(100) == probe_ids(100) != probe_ids(100, seed=1)
    assert all(0 <= token < 5 for token in probe_ids(5))


def test_weights_that_are_no_numbers_are_not_sent() -> None:
    model = qwen()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(WeightsUnavailable, match="log-probabilities of the probe are NaN or infinite"):
        make_probe(model, [1, 2, 3])


def test_a_higher_tolerance_raises_the_others_with_it_and_a_lower_one_leaves_them() -> None:
    assert ProbeTolerance.of("bfloat16") == ProbeTolerance(1.0, 0.15, 0.05)
    assert ProbeTolerance.of("bfloat16", 2.0) == ProbeTolerance(2.0, 0.3, 0.1)
    assert ProbeTolerance.of("bfloat16", 0.1) == ProbeTolerance(0.1, 0.15, 0.05)
    assert ProbeTolerance.of("float32").largest < 0.1 * ProbeTolerance.of("bfloat16").largest
