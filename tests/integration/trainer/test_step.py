"""A step on real ZeRO-3 ranks gives the weights that a plain single process gives, however it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from steno_trainer.data.ledger import Ledger
from steno_trainer.step.step_plan import _mini_batches
from tests.integration.trainer.launching import run_ranks
from tests.integration.trainer.materials import random_batch, random_model
from tests.integration.trainer.reference import Reference

RATE, EPSILON = 1e-3, 1e-3
BATCHES: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2, "trials": 1}, {"seed": 3}]
"""The second has fewer samples than ranks: the others run dummies."""


def settings(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model), "precision": "float32", "micro_batch_tokens": 64, "chunk_tokens": 7, "mismatch": "masked",
        "learning_rate": RATE, "adam_epsilon": EPSILON, "max_grad_norm": 0.0, "entropy_bonus": 0.01, **more,
    }  # fmt: skip


CASES = {
    "one rank": (1, {}, {}),
    "two ranks, tied head": (2, {}, {"tied": True}),
    "three ranks, large micro-batches": (3, {"micro_batch_tokens": 200, "chunk_tokens": 1000}, {}),
    "two ranks, clipped, nothing computed again": (2, {"max_grad_norm": 0.5, "activation_checkpointing": False}, {}),
    "two ranks, activations and optimizer in the host's memory": (
        2, {"activation_offload": True, "offload_optimizer": True}, {},
    ),
    "two ranks that share samples": (2, {"sequence_parallel": 2}, {}),
    "four ranks that share samples over two key heads": (
        4, {"sequence_parallel": 4, "micro_batch_tokens": 80}, {"heads": 4, "groups": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_number_and_the_same_weights_on_any_ranks(case: str, tmp_path: Path) -> None:
    count, more, shape = CASES[case]
    model = random_model(tmp_path / "model", **shape)
    found = run_ranks(count, {"settings": settings(model, **more), "batches": BATCHES}, tmp_path / "job")
    plain = Reference(model, learning_rate=RATE, epsilon=EPSILON, max_grad_norm=more.get("max_grad_norm", 0.0))
    for report, drawn in zip(found["reports"], BATCHES, strict=True):
        batch = random_batch(**drawn)
        expected = plain.step(batch, [range(len(batch.rows))])
        measured = {name: report["metrics"][name] for name in expected}
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-6)
        ledger = Ledger.from_bytes(report["ledger"]).total()
        assert ledger.trained + sum(ledger.untrained.values()) == sum(row.trained_tokens for row in batch.rows)
        assert ledger.trained > 0 and ledger.untrained
    compare(found["weights"], plain.weights())


@pytest.mark.parametrize("reduce_precision", ["float32", "bfloat16"])
def test_bfloat16_ranks_add_up_their_gradients_in_float32_unless_told_otherwise(
    reduce_precision: str, tmp_path: Path
) -> None:
    model = random_model(tmp_path / "model")
    given = settings(model, precision="bfloat16", micro_batch_tokens=200)
    if reduce_precision != "float32":
        given["reduce_precision"] = reduce_precision
    [pairs] = run_ranks(2, {"settings": given, "batches": BATCHES[:1], "gradients": True}, tmp_path)["gradients"]
    differs = [name for name, (used, total) in pairs.items() if not torch.equal(used, total)]
    assert len(pairs) > 10 and all(total.abs().max() > 0 for _, total in pairs.values())
    # Rounding every sum to 8 bits leaves hardly a parameter as it was, however small.
    assert len(differs) == 0 if reduce_precision == "float32" else len(differs) > len(pairs) / 2, differs


def test_ranks_of_the_deepspeed_launcher_are_as_forked_ones(tmp_path: Path) -> None:
    """Those of torchrun: test_checkpoint.py."""
    model = random_model(tmp_path / "model")
    job = {"settings": settings(model), "batches": BATCHES[:1]}
    found = run_ranks(2, job, tmp_path / "job", launcher="deepspeed")
    plain = Reference(model, learning_rate=RATE, epsilon=EPSILON)
    batch = random_batch(**BATCHES[0])
    plain.step(batch, [range(len(batch.rows))])
    compare(found["weights"], plain.weights())


FOREST: list[dict[str, Any]] = [{"seed": seed, "alike": 0.8, "alphabet": 3} for seed in (11, 12, 13)]
"""Of three ids: samples that begin alike, also in what their trials sampled, that are equal, and that are parts of others."""
FOREST_CASES = {
    "one rank": (1, {}),
    "two ranks, small micro-batches": (2, {"micro_batch_tokens": 48}),
    "three ranks": (3, {"activation_checkpointing": False}),
    "two ranks that share micro-batches": (2, {"sequence_parallel": 2}),
}


@pytest.mark.parametrize("case", FOREST_CASES)
def test_a_step_over_samples_that_begin_alike_is_that_over_each_by_itself(case: str, tmp_path: Path) -> None:
    count, more = FOREST_CASES[case]
    model = random_model(tmp_path / "model")
    found = run_ranks(count, {"settings": settings(model, **more), "batches": FOREST}, tmp_path / "job")
    plain = Reference(model, learning_rate=RATE, epsilon=EPSILON)
    for report, drawn in zip(found["reports"], FOREST, strict=True):
        rows = (batch := random_batch(**drawn)).rows
        expected = plain.step(batch, [range(len(rows))])
        metrics = report["metrics"]
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        ids = [row.token_ids_T.tolist() for row in rows]
        beginnings = {tuple(sample[:end]) for sample in ids for end in range(1, len(sample) + 1)}
        assert metrics["compute/unique_tokens"] == len(beginnings) < sum(map(len, ids))
        computed = len(beginnings) + metrics["compute/repeated_tokens"]
        assert len(beginnings) <= computed < sum(map(len, ids))
        budgets = metrics["pack/micro_batches"] * (1 if "sequence_parallel" in more else count)
        assert metrics["pack/fill"] == pytest.approx(computed / budgets / more.get("micro_batch_tokens", 64))
        booked = Ledger.from_bytes(report["ledger"]).total()
        assert booked.trained + sum(booked.untrained.values()) == sum(row.trained_tokens for row in rows)
    compare(found["weights"], plain.weights())


def test_mini_batches_a_reference_and_shared_ratios_are_as_they_were_where_samples_begin_alike(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    bounds = {"clip_low": 0.01, "clip_high": 0.015}
    more = {"epochs": 2, "mini_batches": 2, "reference_kl": 0.3, "learning_rate": 3e-3, "seed": 5, **bounds}
    more["importance_sampling_level"] = "completion"
    found = run_ranks(3, {"settings": settings(model, **more), "batches": FOREST[:1]}, tmp_path / "job")
    plain = Reference(model, learning_rate=3e-3, epsilon=EPSILON)
    batch = random_batch(**FOREST[0])
    passes = [part for epoch in range(2) for part in _mini_batches(batch.rows, 2, f"5:0:{epoch}")]
    expected = plain.step(batch, passes, reference_kl=0.3, level="completion", low=0.01, high=0.015)
    [report] = found["reports"]
    assert {name: report["metrics"][name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert report["metrics"]["compute/unique_tokens"] < 2 * sum(row.tokens for row in batch.rows)
    compare(found["weights"], plain.weights(), atol=2e-5)


def test_mini_batches_clip_against_the_start_and_a_reference_pulls(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    more = {"epochs": 2, "mini_batches": 2, "reference_kl": 0.3, "learning_rate": 1e-2, "seed": 5}
    found = run_ranks(2, {"settings": settings(model, **more), "batches": [{"seed": 1}]}, tmp_path / "job")
    plain = Reference(model, learning_rate=1e-2, epsilon=EPSILON)
    batch = random_batch(1)
    passes = [part for epoch in range(2) for part in _mini_batches(batch.rows, 2, f"5:0:{epoch}")]
    expected = plain.step(batch, passes, reference_kl=0.3)
    [report] = found["reports"]
    assert report["metrics"]["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert report["metrics"]["reference/kl"] > 0 and report["metrics"]["policy/kl"] > 0
    assert report["metrics"]["policy/clip_high_fraction"] + report["metrics"]["policy/clip_low_fraction"] > 0
    compare(found["weights"], plain.weights(), atol=2e-5)


def test_a_teacher_is_another_model_that_scores_each_token(tmp_path: Path) -> None:
    """Of another shape than the policy, with fewer ids, and for shorter texts."""
    few, short = 88, 48
    model = random_model(tmp_path / "model", tokens=97)
    teacher = random_model(tmp_path / "teacher", layers=3, heads=2, vocabulary=90, positions=short, tokens=few, seed=1)
    more = {"reference": str(teacher), "distillation": 0.3, "epochs": 2, "learning_rate": 1e-2}
    drawn = {"seed": 1, "alphabet": few}
    found = run_ranks(2, {"settings": settings(model, **more), "batches": [drawn]}, tmp_path / "job")
    plain = Reference(model, learning_rate=1e-2, epsilon=EPSILON, frozen=teacher)
    batch = random_batch(**drawn)
    expected = plain.step(batch, [range(len(batch.rows))] * 2, distillation=0.3)
    [report] = found["reports"]
    assert {name: report["metrics"][name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert report["metrics"]["reference/kl"] > 0.1 and found["takes"] == (few, short)
    compare(found["weights"], plain.weights(), atol=2e-5)


@pytest.mark.parametrize(
    ("count", "level", "more"),
    [
        (2, "sequence", {}),
        (2, "completion", {"sequence_parallel": 2}),
        (4, "sequence", {"sequence_parallel": 2}),
    ],
)
def test_tokens_that_share_a_ratio_do_so_on_any_ranks(
    count: int, level: str, more: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(tmp_path / "model")
    bounds = {"clip_low": 0.01, "clip_high": 0.015}
    given = {"importance_sampling_level": level, "epochs": 2, "learning_rate": 3e-3, "seed": 5, **bounds, **more}
    batches = [{"seed": 2, "trials": 1}, {"seed": 1}]
    found = run_ranks(count, {"settings": settings(model, **given), "batches": batches}, tmp_path / "job")
    plain = Reference(model, learning_rate=3e-3, epsilon=EPSILON)
    for report, drawn in zip(found["reports"], batches, strict=True):
        batch = random_batch(**drawn)
        expected = plain.step(batch, [range(len(batch.rows))] * 2, level=level, low=0.01, high=0.015)
        assert {name: report["metrics"][name] for name in expected} == pytest.approx(expected, rel=1e-3)
        stopped = sum(report["metrics"][f"policy/sequence_clip_{side}_fraction"] for side in ("high", "low"))
        assert stopped == pytest.approx(plain.stopped, abs=1e-6)
    assert plain.stopped > 0, "or the bounds were met by nothing"
    compare(found["weights"], plain.weights(), atol=2e-5)


@pytest.mark.parametrize(
    ("count", "level", "batches", "more"),
    [
        (1, "sequence", BATCHES, {}),
        (2, "geometric", BATCHES, {"sequence_parallel": 2}),
        (3, "sequence", FOREST, {}),
        (2, "sequence", BATCHES, {"importance_sampling_level": "completion", "epochs": 2}),
    ],
)
def test_one_weight_of_the_mismatch_for_many_tokens_is_the_same_on_any_ranks(
    count: int, level: str, batches: list[dict[str, Any]], more: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(tmp_path / "model")
    bounds = {"clip_low": 0.01, "clip_high": 0.015} if "epochs" in more else {}
    low, high = kept = (0.05, 20.0) if level == "sequence" else (0.8, 1.25)  # some samples are within them
    given = settings(model, mismatch_level=level, mismatch_low=low, mismatch_high=high, **bounds, **more)
    found = run_ranks(count, {"settings": given, "batches": batches}, tmp_path / "job")
    plain = Reference(model, learning_rate=RATE, epsilon=EPSILON)
    for report, drawn in zip(found["reports"], batches, strict=True):
        batch = random_batch(**drawn)
        kinds = {"level": "completion", "low": 0.01, "high": 0.015} if "epochs" in more else {}
        passes = [range(len(batch.rows))] * more.get("epochs", 1)
        expected = plain.step(batch, passes, corrected=level, kept=kept, **kinds)
        assert {name: report["metrics"][name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)
    ledgers = [Ledger.from_bytes(report["ledger"]).total() for report in found["reports"]]
    assert sum(one.trained for one in ledgers) > 0 and any(one.untrained for one in ledgers)
    compare(found["weights"], plain.weights(), atol=2e-5)


LOSS, NORM = "the loss is", "the gradient norm"
BAD: dict[str, tuple[int, dict[str, Any], float, str]] = {
    "the loss overflows": (2, {}, float("inf"), LOSS),
    "the loss overflows, and three ranks do not divide the embedding": (3, {}, float("inf"), LOSS),
    "the gradient overflows, in the host's memory": (2, {"offload_optimizer": True}, 1e38, NORM),
    "the loss alone": (3, {"objective": "LARGE"}, 1e8, LOSS),
    "the loss alone, in the host's memory": (2, {"objective": "LARGE", "offload_optimizer": True}, 1e8, LOSS),
}
"""Ranks, settings, by how much advantages are multiplied, why the step is not taken."""
LARGE = """
import torch
def large(terms):
    bad = terms.advantages_N.abs() > 1e6
    return torch.where(bad, float("inf"), 0.0) - terms.ratios_N * terms.advantages_N
"""


@pytest.mark.parametrize("case", BAD)
def test_a_step_whose_loss_or_gradient_is_no_number_changes_nothing(case: str, tmp_path: Path) -> None:
    """Not the weights, not the optimizer's moments, not the count of steps: those that follow are as if it had not been."""
    model = random_model(tmp_path / "model")
    count, more, scale, why = BAD[case]
    if "objective" in more:
        (tmp_path / "own.py").write_text(LARGE)
        more = {**more, "objective": f"{tmp_path / 'own.py'}:large"}
    poison = {"seed": 8, "scale": scale}
    batches = [BATCHES[0], poison, BATCHES[2]]
    given = settings(model, **more)
    reports = (found := run_ranks(count, {"settings": given, "batches": batches}, tmp_path / "job"))["reports"]
    assert [(report["step"], report["updated"]) for report in reports] == [(1, True), (1, False), (2, True)]
    plain = Reference(model, learning_rate=RATE, epsilon=EPSILON)
    for report, drawn in ((reports[0], BATCHES[0]), (reports[2], BATCHES[2])):
        batch = random_batch(**drawn)
        expected = plain.step(batch, [range(len(batch.rows))])
        measured = {name: report["metrics"][name] for name in expected}
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-6)
    compare(found["weights"], plain.weights())
    total = Ledger.from_bytes(reports[1]["ledger"]).total()
    assert total.untrained == {"poisoned": sum(row.trained_tokens for row in random_batch(**poison).rows)}
    assert total.trained == 0 and reports[1]["metrics"]["optimizer/skipped_passes"] == 1
    assert list(reports[1]["poisoned"]) == ["g"] and why in reports[1]["poisoned"]["g"]
    assert "loss" not in reports[1]["metrics"]


def test_bfloat16_trains_about_the_same(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    found = run_ranks(2, {"settings": settings(model, precision="bfloat16"), "batches": BATCHES[:1]}, tmp_path / "job")
    plain = Reference(model, learning_rate=RATE, epsilon=EPSILON)
    batch = random_batch(**BATCHES[0])
    expected = plain.step(batch, [range(len(batch.rows))])
    assert found["reports"][0]["metrics"]["optimizer/grad_norm"] == pytest.approx(
        expected["optimizer/grad_norm"], rel=0.1
    )
    assert all(weight.dtype == torch.bfloat16 for weight in found["weights"].values())


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 2e-6) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(
            weight, expected[name], rtol=1e-4, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )
