"""Advantages by group id, against formulas written out in float64 with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno_trainer.data.advantages import Estimator, ScoredTrial, group_advantages
from steno_trainer.data.ledger import Reason
from steno_trainer.errors import BadBatch


def scored(group: str, *rewards: float) -> list[ScoredTrial]:
    return [ScoredTrial(f"{group}.{i}", group, reward) for i, reward in enumerate(rewards)]


def reference(rewards: list[float], estimator: Estimator, batch: list[float] | None = None) -> np.ndarray:
    r = np.array(rewards, dtype=np.float64)
    match estimator:
        case Estimator.GRPO_BATCH_STD:
            return (r - r.mean()) / (np.array(batch or rewards, dtype=np.float64).std(ddof=1) + 1e-6)
        case Estimator.GRPO:
            return (r - r.mean()) / (r.std(ddof=1) + 1e-6)
        case Estimator.RLOO:
            return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])
    return r - r.mean()


@pytest.mark.parametrize("estimator", Estimator)
@pytest.mark.parametrize("rewards", [[0.0, 1.0], [1.0, 0.0, 0.0, 0.25], [-3.0, 5.5, 100.0, 1e-3, 2.0, 2.0, 2.0]])
def test_each_estimator_is_its_formula(estimator, rewards):
    found = group_advantages(scored("g", *rewards), estimator)
    assert [found.by_trial[f"g.{i}"] for i in range(len(rewards))] == pytest.approx(
        reference(rewards, estimator), rel=1e-12, abs=1e-12
    )
    assert found.dropped == {}


def test_groups_are_by_id_whatever_the_order_and_the_sizes():
    small, large = scored("a", 0.0, 1.0), scored("b", 1.0, 1.0, 0.0, 5.0, 2.0)
    mixed = [large[3], small[1], large[0], large[4], small[0], large[1], large[2]]
    found = group_advantages(mixed, Estimator.GRPO)
    apart = group_advantages(small, Estimator.GRPO).by_trial | group_advantages(large, Estimator.GRPO).by_trial
    assert found.by_trial == apart


def test_a_batchs_std_is_that_of_all_rewards_also_of_groups_that_say_nothing():
    groups = {"a": [0.0, 1.0, 1.0], "b": [2.0, 5.0], "equal": [1.0, 1.0], "single": [7.0]}
    found = group_advantages(
        [trial for group, rewards in groups.items() for trial in scored(group, *rewards)], Estimator.GRPO_BATCH_STD
    )
    batch = [reward for rewards in groups.values() for reward in rewards]
    for group in ("a", "b"):
        ours = [found.by_trial[f"{group}.{i}"] for i in range(len(groups[group]))]
        assert ours == pytest.approx(reference(groups[group], Estimator.GRPO_BATCH_STD, batch), rel=1e-12)
    assert found.dropped == {"equal": Reason.ZERO_VARIANCE, "single": Reason.GROUP_TOO_SMALL}


@pytest.mark.parametrize(
    "rewards", [[0.0, 0.0], [0.5] * 8, [1.0, 1.0, 1.0], [0.1, 0.1, 0.1], [0.1 + 0.2, 0.3], [-7e5] * 3, [1e-12] * 2]
)
def test_equal_rewards_say_nothing_whatever_they_are(rewards):
    found = group_advantages(scored("g", *rewards), Estimator.GRPO)
    assert (found.by_trial, found.dropped) == ({}, {"g": Reason.ZERO_VARIANCE})


@pytest.mark.parametrize("rewards", [[-1.0, 1.0], [0.0, 1e-12], [1e6 - 1, 1e6]])
def test_a_mean_of_zero_or_a_small_unit_is_no_zero_variance(rewards):
    assert group_advantages(scored("g", *rewards), Estimator.RLOO).dropped == {}


def test_a_single_scored_trial_has_nothing_to_be_compared_with():
    found = group_advantages([*scored("a", 1.0), *scored("b", 0.0, 1.0)], Estimator.RLOO)
    assert found.dropped == {"a": Reason.GROUP_TOO_SMALL}
    assert set(found.by_trial) == {"b.0", "b.1"}


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e200, -1e7])
@pytest.mark.parametrize("estimator", list(Estimator))
def test_a_reward_that_can_not_be_computed_with_drops_its_group_alone(reward, estimator):
    found = group_advantages([*scored("g", 0.0, reward), *scored("h", 0.0, 1.0)], estimator)
    assert found.dropped == {"g": Reason.MALFORMED}
    assert found.by_trial == group_advantages(scored("h", 0.0, 1.0), estimator).by_trial


def test_a_trial_has_one_reward_however_many_samples_it_forked_into():
    with pytest.raises(BadBatch, match="more than one reward"):
        group_advantages([*scored("g", 0.0, 1.0), ScoredTrial("g.0", "g", 0.0)], Estimator.GRPO)


def test_a_batchs_std_is_that_of_rewards_with_their_shaping():
    trials = [
        ScoredTrial("a.0", "a", 0.0),
        ScoredTrial("a.1", "a", 1.0, -0.5),
        ScoredTrial("b.0", "b", 3.0, -1.0),
        ScoredTrial("b.1", "b", 5.0),
    ]
    found = group_advantages(trials, Estimator.GRPO_BATCH_STD)
    batch = [0.0, 0.5, 2.0, 5.0]
    assert [found.by_trial[trial.trial_id] for trial in trials] == pytest.approx(
        [
            *reference(batch[:2], Estimator.GRPO_BATCH_STD, batch),
            *reference(batch[2:], Estimator.GRPO_BATCH_STD, batch),
        ],
        rel=1e-12,
    )


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.sampled_from(Estimator), st.randoms())
def test_a_groups_advantages_sum_to_zero_and_know_no_order(rewards, estimator, random):
    trials = scored("g", *rewards)
    found = group_advantages(trials, estimator).by_trial
    assert sum(found.values()) == pytest.approx(0.0, abs=1e-7)
    random.shuffle(trials)
    assert group_advantages(trials, estimator).by_trial == found
