"""At the defaults of bfloat16, a probe passes engines with other kernels, and none whose weights are in the wrong place (I10).

The trainer is two ranks that share samples: its probe is drawn and scored by ZeRO-3 and Ulysses. Engines are transformers' own
attention, in bfloat16 and in float32, as `compare` of the worker sees them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from steno.contracts.errors import WeightsRefused
from steno.contracts.policy import Probe
from steno_worker.weights.prove import LogprobDistance, compare
from tests.integration.trainer.launching import run_ranks
from tests.integration.trainer.materials import random_model
from tests.support.weights.trained import logprobs_of

LAYERS, TOKENS = 6, 64


class Case:
    """A trainer's probe, and engines of the weights that it is of."""

    def __init__(self, folder: Path) -> None:
        self.model = random_model(folder / "model", tied=True, layers=LAYERS)
        self.old = random_model(folder / "old", tied=True, layers=LAYERS, seed=1)
        settings = {
            "model": str(self.model),
            "precision": "bfloat16",
            "micro_batch_tokens": 512,
            "sequence_parallel": 2,
        }
        told = run_ranks(2, {"settings": settings, "batches": [], "probe": TOKENS}, folder / "ranks")["probe"]
        self.probe = Probe.model_validate_json(told)

    def engine(self, attention: str, dtype: torch.dtype, path: Path | None = None) -> Any:
        """The weights are bfloat16's in any case: that is what is sent."""
        loaded = AutoModelForCausalLM.from_pretrained(
            path or self.model, dtype=torch.bfloat16, attn_implementation=attention
        )
        return loaded.to(dtype).train(False)

    def distance(self, engine: Any) -> LogprobDistance:
        engine.config.use_cache = False
        return compare(self.probe, logprobs_of(engine, self.probe.token_ids))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(tmp_path_factory.mktemp("probe"))


def test_ids_are_drawn_from_the_model(case: Case) -> None:
    assert len(case.probe.token_ids) == TOKENS and len(case.probe.logprobs) == TOKENS - 1
    # Its own entropy, and not that of ids that it would hardly say: of uniform ones the mean would be far lower.
    generator = torch.Generator().manual_seed(0)
    engine = case.engine("sdpa", torch.float32)
    uniform = torch.randint(0, 97, (400,), generator=generator).tolist()
    assert sum(case.probe.logprobs) / (TOKENS - 1) > sum(logprobs_of(engine, uniform)) / 399 + 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_engines_with_other_kernels_pass(case: Case, attention: str, dtype: torch.dtype) -> None:
    distance = case.distance(case.engine(attention, dtype))
    assert 0 < distance.mean < distance.p90 < distance.largest


def _reordered(model: Any, order: list[int]) -> None:
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in order])
    model.config.num_hidden_layers = len(order)


def _swapped(model: Any, first: int) -> None:
    order = list(range(LAYERS))
    order[first], order[first + 1] = order[first + 1], order[first]
    _reordered(model, order)


def _permuted(model: Any, part: str, layer: int, dim: int) -> None:
    weight = model.get_submodule(f"model.layers.{layer}.{part}").weight
    weight.data = torch.cat(weight.data.chunk(2, dim)[::-1], dim)


CONTROLS: dict[str, Callable[[Any], None]] = {
    **{f"layer {i} is left out": lambda m, i=i: _reordered(m, [n for n in range(LAYERS) if n != i]) for i in range(LAYERS)},
    **{f"layers {i} and {i + 1} are swapped": lambda m, i=i: _swapped(m, i) for i in range(LAYERS - 1)},
    **{
        f"the shards of {part} in layer {layer} are swapped": lambda m, p=part, n=layer, d=dim: _permuted(m, p, n, d)
        for layer in (0, LAYERS - 1)
        for part, dim in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("mlp.down_proj", 1))
    },
}  # fmt: skip


def test_weights_in_the_wrong_place_are_refused(case: Case) -> None:
    whole = case.engine("sdpa", torch.float32)
    passed = []
    for name, damage in CONTROLS.items():
        engine = copy.deepcopy(whole)
        damage(engine)
        try:
            passed.append((name, case.distance(engine)))
        except WeightsRefused as refused:
            assert "probe_tolerance" in refused.message and refused.field == "probe"
    assert not passed


def test_a_tied_head_that_was_kept_is_refused(case: Case) -> None:
    engine, old = case.engine("sdpa", torch.float32), case.engine("sdpa", torch.float32, case.old)
    engine.lm_head.weight = torch.nn.Parameter(old.lm_head.weight.detach())
    with pytest.raises(WeightsRefused, match="differ by"):
        case.distance(engine)


def test_weights_that_are_no_numbers_are_refused(case: Case) -> None:
    engine = case.engine("sdpa", torch.float32)
    with torch.no_grad():
        engine.model.layers[3].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(WeightsRefused, match="log-probabilities are NaN or infinite"):
        case.distance(engine)
