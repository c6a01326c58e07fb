"""One weight per token for the whole step, in every mode."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.errors import ConfigError
from steno_trainer.errors import BadBatch
from steno_trainer.objective.aggregation import Aggregation, SampleShare, SilentTotals, token_weights

FORKED = [SampleShare("a", 3), SampleShare("b", 4), SampleShare("a", 5), SampleShare("c", 0), SampleShare("a", 0)]


def test_token_mean_is_one_over_all_trained_tokens():
    assert token_weights(FORKED, Aggregation.TOKEN_MEAN) == [1 / 12, 1 / 12, 1 / 12, 0.0, 0.0]


def test_rollout_mean_shares_a_rollouts_weight_over_its_samples():
    assert token_weights(FORKED, Aggregation.ROLLOUT_MEAN) == [1 / 16, 1 / 8, 1 / 16, 0.0, 0.0]


def test_the_constant_knows_no_lengths():
    assert token_weights(FORKED, Aggregation.CONSTANT, 100) == [1 / 200, 1 / 200, 1 / 200, 0.0, 0.0]


@pytest.mark.parametrize("mode", [Aggregation.TOKEN_MEAN, Aggregation.ROLLOUT_MEAN, Aggregation.CONSTANT])
def test_silent_trials_count_in_what_is_divided_by(mode):
    constant = 100 if mode is Aggregation.CONSTANT else None
    quiet = [SampleShare("d", 7), SampleShare("e", 2), SampleShare("d", 1), SampleShare("f", 0)]
    assert SilentTotals.of(quiet) == SilentTotals(10, 2)
    among = token_weights([*FORKED, *quiet], mode, constant)
    assert token_weights(FORKED, mode, constant, SilentTotals.of(quiet)) == among[: len(FORKED)]
    assert SilentTotals(10, 2).share(4) == SilentTotals(2.5, 0.5)


@pytest.mark.parametrize(
    ("mode", "constant"),
    [(Aggregation.CONSTANT, None), (Aggregation.CONSTANT, 0), (Aggregation.CONSTANT, -4), (Aggregation.TOKEN_MEAN, 8)],
)
def test_a_constant_belongs_to_its_mode(mode, constant):
    with pytest.raises(ConfigError, match="constant_tokens"):
        token_weights(FORKED, mode, constant)


def test_counts_are_counts():
    with pytest.raises(BadBatch, match="-1 trained"):
        token_weights([SampleShare("a", -1)], Aggregation.TOKEN_MEAN)


def test_nothing_to_train_weighs_nothing():
    assert token_weights([SampleShare("a", 0)], Aggregation.ROLLOUT_MEAN) == [0.0]
    assert token_weights([], Aggregation.TOKEN_MEAN) == []


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 50)), min_size=1, max_size=20))
def test_the_weights_of_a_step_sum_to_one(parts):
    made = [SampleShare(trial, tokens) for trial, tokens in parts]
    for mode in (Aggregation.TOKEN_MEAN, Aggregation.ROLLOUT_MEAN):
        weights = token_weights(made, mode)
        assert sum(w * part.trained_tokens for w, part in zip(weights, made, strict=True)) == pytest.approx(
            1.0 if any(tokens for _, tokens in parts) else 0.0
        )


@given(st.integers(1, 40), st.lists(st.integers(1, 39), unique=True, max_size=6))
def test_a_trial_that_forks_weighs_what_it_would_as_one(tokens, cuts):
    edges = sorted({0, tokens, *(cut for cut in cuts if cut < tokens)})
    forked = [SampleShare("a", b - a) for a, b in itertools.pairwise(edges)]
    for mode, constant in (
        (Aggregation.TOKEN_MEAN, None),
        (Aggregation.ROLLOUT_MEAN, None),
        (Aggregation.CONSTANT, 64),
    ):
        whole, other = token_weights([SampleShare("a", tokens), SampleShare("b", 7)], mode, constant)
        *pieces, same = token_weights([*forked, SampleShare("b", 7)], mode, constant)
        assert set(pieces) == {whole}
        assert same == other
