"""`estimator: gdpo`: several rewards, each normalised by itself, against the formula written out with numpy."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steno.contracts.errors import ConfigError
from steno.contracts.records import Group
from steno.contracts.runs.leases import Lease
from steno_trainer.data.advantages import Estimator, Gdpo, ScoredTrial, group_advantages
from steno_trainer.data.ledger import Reason
from steno_trainer.data.overlong import Overlong
from steno_trainer.data.own_estimator import estimator_named
from steno_trainer.run_config import RunSettings
from steno_trainer.step.assemble import assemble, says_something
from tests.unit.trainer.data.test_overlong import TERMS, leased, spoken
from tests.unit.trainer.recorded import session

WEIGHTS = {"correct": 1.0, "short": 0.5, "cost": -2.0}


def scored(group: str, **metrics: Sequence[float]) -> list[ScoredTrial]:
    """Trials whose reward is the sum of their metrics."""
    names = list(metrics)
    rows = [dict(zip(names, row, strict=True)) for row in zip(*metrics.values(), strict=True)]
    return [ScoredTrial(f"{group}.{i}", group, sum(row.values()), metrics=row) for i, row in enumerate(rows)]


def reference(groups: Mapping[str, Sequence[ScoredTrial]], weights: Mapping[str, float]) -> dict[str, float]:
    """arXiv:2601.05242: decoupled normalisation in each group, the weighted sum, the division by the spread over the batch."""
    sums: dict[str, float] = {}
    for trials in groups.values():
        total = np.zeros(len(trials))
        for name, weight in weights.items():
            r = np.array([trial.metrics[name] for trial in trials])
            total += weight * (r - r.mean()) / r.std(ddof=1) if r.std() else 0.0
        sums |= dict(zip((trial.trial_id for trial in trials), total, strict=True))
    spread = np.array(list(sums.values())).std(ddof=1)
    return {name: value / (spread + 1e-6) for name, value in sums.items()}


def test_it_is_the_formula_whatever_the_order_of_the_trials() -> None:
    groups = {
        "a": scored("a", correct=[1, 0, 0, 1], short=[0.2, 0.9, 0.1, 0.4], cost=[3, 3, 3, 3]),
        "b": scored("b", correct=[0, 0, 1], short=[5.0, 5.0, 5.0], cost=[0.001, 0.002, 0.009]),
        "silent": scored("silent", correct=[1, 1], short=[2, 2], cost=[0, 0]),
    }
    trials = [trial for some in groups.values() for trial in some]
    found = group_advantages(trials, Gdpo(WEIGHTS))
    assert found.dropped == {"silent": Reason.ZERO_VARIANCE}
    wanted = reference(groups, WEIGHTS)
    assert found.by_trial == pytest.approx({name: wanted[name] for name in wanted if "silent" not in name}, rel=1e-9)
    for group in ("a", "b"):
        assert sum(v for name, v in found.by_trial.items() if name.startswith(group)) == pytest.approx(0, abs=1e-9)
    random.Random(0).shuffle(trials)
    assert group_advantages(trials, Gdpo(WEIGHTS)).by_trial == found.by_trial


def test_trials_of_equal_sums_are_told_apart_where_grpo_drops_them() -> None:
    alike = scored("g", correct=[1, 0, 1], short=[0, 1, 0])
    assert group_advantages(alike, Estimator.GRPO).dropped == {"g": Reason.ZERO_VARIANCE}
    found = group_advantages(alike, Gdpo({"correct": 1.0, "short": 0.25}))
    assert found.dropped == {}
    assert found.by_trial["g.0"] == found.by_trial["g.2"] > 0 > found.by_trial["g.1"]


def test_rewards_that_cancel_out_say_nothing() -> None:
    """In a group of two any two rewards do, or add up. What is left must not be the epsilon's."""
    trials = [trial for name in "ab" for trial in scored(name, correct=[1, 0], tokens=[2000, 1000])]
    found = group_advantages(trials, Gdpo({"correct": 1.0, "tokens": -1.0})).by_trial
    assert set(found) == {"a.0", "a.1", "b.0", "b.1"} and max(map(abs, found.values())) < 1e-6


def test_units_of_a_metric_do_not_matter() -> None:
    ones = scored("g", correct=[1, 0, 0, 1], cost=[1, 2, 3, 4])
    thousands = scored("g", correct=[1, 0, 0, 1], cost=[1000, 2000, 3000, 4000])
    weights = {"correct": 1.0, "cost": -0.5}
    small, large = (group_advantages(some, Gdpo(weights)).by_trial for some in (ones, thousands))
    assert small == pytest.approx(large, rel=1e-9)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"short": 1.0}, "trial g.1: metrics.correct: got none, and gdpo_metrics names it"),
        ({"correct": float("nan")}, "trial g.1: metrics.correct: got nan, must be within ±1e+06"),
        ({"correct": 1e7}, "trial g.1: metrics.correct: got 10000000.0, must be within ±1e+06"),
    ],
)
def test_a_trial_without_a_metric_takes_its_group_alone_out_and_is_named(metrics: dict[str, float], said: str) -> None:
    trials = [
        (session("g.0", reward=0.0, metrics={"correct": 0.0}), spoken((5, {}))),
        (session("g.1", reward=1.0, metrics=metrics), spoken((5, {}))),
    ]
    found = assemble([leased(*trials)], TERMS, Gdpo({"correct": 1.0}), Overlong())
    assert found.malformed == {"g": said} and found.batch.rows == [] and found.batch.advantages == {}


def test_a_steps_groups_are_judged_by_the_metrics_of_their_trials() -> None:
    trials = [
        (session(f"g.{i}", reward=1.0, metrics={"correct": float(i), "x": 5.0}), spoken((5, {}))) for i in range(2)
    ]
    found = assemble([leased(*trials)], TERMS, estimator_named("gdpo", {"correct": 1.0}), Overlong())
    assert found.lacking == () and assemble(
        [leased(*trials)], TERMS, Gdpo({"a": 1.0, "x": 1.0}), Overlong()
    ).lacking == ("a",)
    assert found.malformed == {} and found.values["reward/zero_variance_fraction"] == 0
    assert found.batch.advantages == pytest.approx({"g.0": -(0.5**0.5), "g.1": 0.5**0.5}, rel=1e-5)


def test_dynamic_sampling_counts_groups_by_the_metrics_too() -> None:
    trials = [session(f"g.{i}", reward=1.0, metrics={"correct": float(i), "x": 5.0}) for i in range(2)]
    group = Group(group_id="g", size=2, created_at=0.0)
    lease = Lease(lease_id="l", group=group, trials=trials, tokens={}, expires_at=1e12)
    assert not says_something(lease)
    assert says_something(lease, Gdpo({"correct": 1.0, "x": 1.0}))
    assert not says_something(lease, Gdpo({"x": 1.0}))
    assert not says_something(lease, Gdpo({"missing": 1.0}))


def settings(**fields: Any) -> RunSettings:
    return RunSettings(**{"model": "m", "run": "r", **fields})


def test_metrics_are_named_with_their_weights() -> None:
    (given := settings(estimator="gdpo", gdpo_metrics=["correct", "a=b=0.5", "cost=-2"])).check()
    assert given.gdpo_weights == {"correct": 1.0, "a=b": 0.5, "cost": -2.0}


@pytest.mark.parametrize("wrong", ["", "=1", "x=", "x=0", "x=nan", "x=1e7", "x=heavy", "correct=2"])
def test_a_metric_that_can_not_be_read_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"gdpo_metrics: got {wrong}, must be NAME or NAME=WEIGHT") as refused:
        settings(estimator="gdpo", gdpo_metrics=["correct", wrong]).check()
    assert refused.value.field == "gdpo_metrics"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "gdpo_metrics: got nothing, estimator gdpo needs the metrics that are rewards"),
        (
            {"estimator": "grpo", "gdpo_metrics": ["x"]},
            "gdpo_metrics: got .*, needs estimator: gdpo; estimator is grpo",
        ),
        (
            {"gdpo_metrics": ["x"], "overlong_max_tokens": 9, "overlong_buffer_tokens": 5},
            "overlong_max_tokens: got 9, needs another estimator than gdpo, .*; estimator is gdpo",
        ),
        (
            {"gdpo_metrics": ["x"], "records": Path("r.jsonl")},
            "gdpo_metrics: got .*, needs trials with metrics, which those of a file do not have; records is r.jsonl",
        ),
    ],
)
def test_what_gdpo_can_not_go_with_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(**{"estimator": "gdpo", **fields}).check()
