"""Each objective is its paper's formula, in plain float64 loops; a user's own is tried before it is trusted."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

from steno.contracts.errors import ConfigError
from steno_trainer.config import TrainerSettings
from steno_trainer.errors import BadBatch
from steno_trainer.objective.loss import MEANS, Objective, means, policy_loss
from steno_trainer.objective.mismatch import Correction, Mismatch
from steno_trainer.objective.own import objective_named
from steno_trainer.objective.registry import REGISTRY
from steno_trainer.objective.terms import Terms
from steno_trainer.run_config import RunSettings
from steno_trainer.step.step import objective_of
from tests.unit.trainer.objective.test_loss import case

FOLDER = Path(__file__).parents[4] / "trainer_bridge/steno_trainer/objective"


def clip(r, a, _, low, high, c):
    """(loss, its derivative by log r, high, low, beyond)"""
    bounded = min(max(r, 1 - low), 1 + high)
    stopped = (a > 0 and r > 1 + high, a < 0 and r < 1 - low)
    return -min(r * a, bounded * a), 0.0 if any(stopped) else -r * a, *stopped, None


def dual_clip(r, a, logprob, low, high, c):
    value, slope, *stopped, _ = clip(r, a, logprob, low, high, c)
    if a < 0 and r > c:
        return -c * a, 0.0, *stopped, True
    return value, slope, *stopped, False


def cispo(r, a, logprob, low, high, c):
    weight = min(max(r, 1 - low), 1 + high)
    return -weight * a * logprob, -weight * a, r > 1 + high, r < 1 - low, None


def sft(r, a, logprob, low, high, c):
    return -logprob, -1.0, None, None, None


BY_HAND = {"clip": clip, "dual_clip": dual_clip, "cispo": cispo, "sft": sft}


def settings(**given):
    return TrainerSettings(model="m", **given)


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("correction", [Correction.OFF, Correction.TRUNCATED])
def test_each_objective_is_its_formula_with_its_gradient_and_metrics(name, correction):
    for seed in range(3):
        tokens, logprobs, entropies = case(seed, spread=1.2)
        made = objective_of(settings(objective=name, mismatch=correction.value, dual_clip=1.3, clip_high=0.3))
        found = policy_loss(made, tokens, logprobs, entropies)
        found.total.backward()
        total, rows = 0.0, []
        for i in tokens.loss_mask_N.nonzero()[:, 0].tolist():
            near, weight = tokens.proximal_logprobs_N[i].item(), tokens.weights_N[i].item()
            m = 1.0
            if correction is Correction.TRUNCATED and name != "sft":
                m = min(math.exp(near - tokens.sampling_logprobs_N[i].item()), 2.0)
            now = logprobs[i].item()
            value, slope, *stopped = BY_HAND[name](
                math.exp(now - near), tokens.advantages_N[i].item(), now, made.clip_low, made.clip_high, 1.3
            )
            total += weight * m * value
            assert logprobs.grad[i].item() == pytest.approx(weight * m * slope, rel=1e-12, abs=1e-15)
            rows.append([*stopped, -now if name == "sft" else None])
        assert found.total.item() == pytest.approx(total, rel=1e-12)
        measured = means(found.sums_M2, found.maxima_X)
        names = ("policy/clip_high_fraction", "policy/clip_low_fraction", "policy/dual_clip_fraction", "policy/nll")
        for metric, column in zip(names, zip(*rows, strict=True), strict=True):
            if column[0] is None:
                assert metric not in measured
            else:
                assert measured[metric] == pytest.approx(sum(column) / len(column), rel=1e-12)
                assert metric == "policy/nll" or (name, metric) == ("cispo", names[1]) or 0 < measured[metric] < 1


def test_what_imitates_reads_no_probabilities_that_were_sampled():
    tokens, logprobs, entropies = case()
    made = objective_of(settings(objective="sft", mini_batches=2))
    measured = means(*vars_of(policy_loss(made, tokens, logprobs, entropies)))
    assert set(measured) == {"policy/nll", "policy/entropy", "reference/kl", "reference/log_ratio"}


def vars_of(found):
    return found.sums_M2, found.maxima_X


def test_bounds_are_those_of_the_objective_where_nothing_is_said():
    bounds = {name: (of.clip_low, of.clip_high) for name in REGISTRY if (of := objective_of(settings(objective=name)))}
    assert bounds == {"clip": (0.2, 0.28), "dual_clip": (0.2, 0.28), "cispo": (1.0, 4.0), "sft": (0.2, 0.28)}
    assert objective_of(settings(objective="cispo", clip_high=7.0)).clip_high == 7.0


def test_each_objective_is_a_file_with_its_source():
    for entry in REGISTRY.values():
        said = ast.get_docstring(ast.parse((FOLDER / f"{entry.module}.py").read_text()))
        assert said is not None and "arXiv:" in said and "loss = " in said


GOOD = """
from __future__ import annotations
from dataclasses import dataclass
import torch

@dataclass
class Bounds:
    low: float

def clipped(terms):
    '''As clip.'''
    r, a = terms.ratios_N, terms.advantages_N
    return -torch.minimum(r * a, r.clamp(1 - terms.clip_low, 1 + terms.clip_high) * a)
"""


def own(folder: Path, text: str, function: str = "loss") -> str:
    (folder / "own.py").write_text(text)
    return f"{folder / 'own.py'}:{function}"


def test_a_users_objective_is_taken_in_the_place_of_ours(tmp_path):
    results = []
    for name in (own(tmp_path, GOOD, "clipped"), "clip"):
        tokens, logprobs, entropies = case(1)
        found = policy_loss(objective_of(settings(objective=name)), tokens, logprobs, entropies)
        found.total.backward()
        results.append((found.total.detach(), logprobs.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_dummy_has_a_graph_whatever_a_users_objective_makes_of_nothing(tmp_path):
    made = objective_of(
        settings(objective=own(tmp_path, "def loss(t):\n    return -t.logprobs_N + 0 * t.logprobs_N[0]\n"))
    )
    tokens, logprobs, entropies = case(n=0)
    found = policy_loss(made, tokens, logprobs, entropies)
    found.total.backward()
    assert found.total.item() == 0.0 and logprobs.grad.shape == (0,)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return -t.logprobs_N.sum()", r"shape \(\), must be \(6,\)"),
        ("return -t.logprobs_N.mean() * t.advantages_N", "the loss of token 0 is 1.30397 by itself and 1.12038 among others"),
        ("a = t.advantages_N\n    return -(a - a.mean()) * t.ratios_N", "by itself and .* among others"),
        ("return -t.logprobs_N.detach()", "has no gradient"),
        ("return -t.logprobs_N.double()", "it returned torch.float64, must be torch.float32"),
        ("return 1.0", "it returned a float, must be a tensor"),
        ("return t.logprobs_N / 0", "must be finite"),
        ("return t.reward_N", "it raised AttributeError: .*reward_N"),
        ("return t.logprobs_N[None]", r"shape \(1, 6\)"),
    ],
)  # fmt: skip
def test_what_is_no_loss_of_each_token_is_said_before_anything_is_loaded(tmp_path, body, said):
    with pytest.raises(ConfigError, match=said) as error:
        objective_named(own(tmp_path, f"def loss(t):\n    {body}\n"))
    assert error.value.field == "objective"


@pytest.mark.parametrize(
    ("text", "function", "said"),
    [
        ("import nothing_such\n", "loss", "ModuleNotFoundError: No module named 'nothing_such'"),
        ("def losses(t): ...\n", "loss", "has no function 'loss'; it has losses"),
        ("loss = 3\n", "loss", "has no function 'loss'; it has none"),
        ("def loss(:\n", "loss", "SyntaxError"),
    ],
)
def test_a_file_without_that_function_is_named(tmp_path, text, function, said):
    with pytest.raises(ConfigError, match=said):
        objective_named(own(tmp_path, text, function))


def test_a_loss_that_goes_wrong_later_stops_the_step(tmp_path):
    given = objective_named(
        own(tmp_path, "def loss(t):\n    return -t.logprobs_N if len(t.logprobs_N) < 9 else -t.logprobs_N.sum()\n")
    )
    n = torch.zeros(9)
    with pytest.raises(BadBatch, match=r"own.py:loss: it returned a tensor of shape \(\), must be \(9,\)"):
        given(Terms(n.clone().requires_grad_(), n, n, n, n, 0.2, 0.28, 3.0))


@pytest.mark.parametrize("name", ["ppo", "own.py", "own.py:", "own.txt:loss", "a.py:b.c", ""])
def test_a_name_that_is_none_is_refused_by_the_settings(name):
    with pytest.raises(ConfigError, match=r"must be clip, dual_clip, cispo, sft or FILE\.py:function"):
        settings(objective=name).check()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "objective"),
        ({"offline": True, "dynamic_sampling": True}, "dynamic_sampling"),
        ({"offline": True, "annotate": True}, "annotate"),
        ({"offline": True, "proximal": "sampler"}, "proximal"),
        ({"offline": True, "importance_sampling_level": "sequence", "epochs": 2}, "importance_sampling_level"),
        ({"offline": True, "overlong_max_tokens": 9, "overlong_buffer_tokens": 1}, "overlong_max_tokens"),
        ({"offline": True, "overlong_penalty_factor": 9.0}, "overlong_penalty_factor"),
        ({"offline": True, "mismatch": "masked"}, "mismatch"),
        ({"offline": True, "mismatch_high": 4.0}, "mismatch_high"),
        ({"offline": True, "clip_low": 0.1}, "clip_low"),
        ({"offline": True, "clip_high": 0.3}, "clip_high"),
        ({"offline": True, "dual_clip": 5.0}, "dual_clip"),
        ({"offline": True, "estimator": "rloo"}, "estimator"),
        ({"offline": True, "count_silent_groups": False}, "count_silent_groups"),
    ],
)
def test_what_imitation_would_ignore_is_refused(given, field):
    with pytest.raises(ConfigError) as error:
        RunSettings(model="m", objective="sft", **given).check()
    assert error.value.field == field
    RunSettings(model="m", objective="sft", records="r.jsonl", epochs=2, overlong_filtering="completion").check()


def test_every_metric_of_an_objective_has_a_place(tmp_path):
    tokens, logprobs, _ = case()
    for name in REGISTRY:
        made: Objective = objective_of(settings(objective=name, mismatch="off"))
        terms = Terms(
            logprobs, (logprobs - tokens.proximal_logprobs_N).exp(), *([tokens.advantages_N] * 3), 0.2, 0.28, 3.0
        )
        assert set(made.losses(terms).metrics) <= set(MEANS) and made.mismatch == Mismatch(Correction.OFF)
