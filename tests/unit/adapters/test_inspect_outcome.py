"""What a sample of Inspect was worth: without Inspect."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from steno import Completion
from steno_adapters.inspect.outcome import outcome


@dataclass
class Score:
    value: Any


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        ("C", 1.0), ("I", 0.0), ("P", 0.5), ("N", 0.0), (True, 1.0), (0, 0.0), (0.25, 0.25),
        ("yes", 1.0), ("No", 0.0), ("TRUE", 1.0), ("false", 0.0), ("0.7", 0.7), ("-1e1", -10.0),
    ],
)  # fmt: skip
def test_the_only_score_is_the_reward(value: Any, reward: float) -> None:
    assert outcome(None, {"match": Score(value)}, None) == Completion(reward=reward, metrics={"match": reward})


def test_one_of_several_is_chosen_and_the_others_are_metrics() -> None:
    scores = {"match": Score("C"), "graded": Score({"style": 0.5, "facts": "I", "note": "good"})}
    numbers = {"match": 1.0, "graded/style": 0.5, "graded/facts": 0.0}
    assert outcome(None, scores, "graded/style") == Completion(reward=0.5, metrics=numbers)
    undecided = outcome(None, scores, None)
    assert (undecided.reward, undecided.status) == (None, "completed")
    assert (
        undecided.end_reason
        == "no_reward: no score chosen (-M score=NAME); there are match, graded/style, graded/facts"
    )
    assert "no_reward: no score 'grade'; there are match" in outcome(None, scores, "grade").end_reason


@pytest.mark.parametrize("value", ["B+", "", "nan", math.nan, math.inf, None, [1.0]])
@pytest.mark.parametrize("chosen", ["match", None])
def test_what_is_no_number_is_no_reward_and_the_reason_says_what_it_is(value: Any, chosen: str | None) -> None:
    found = outcome(None, {"match": Score(value)}, chosen)
    assert found.reward is None and found.end_reason == f"no_reward: score 'match' is no number: {value!r}"


@pytest.mark.parametrize("said", ["yes", "42", "unclear", ""])
def test_what_another_score_says_changes_nothing_of_which_one_is_the_reward(said: str) -> None:
    """Of two samples of a group the same scorer gives the reward."""
    assert outcome(None, {"judge": Score("C"), "verdict": Score(said)}, None).reward == 1.0
    assert outcome(None, {"graded": Score({"score": 0.4, "answer": said})}, None).reward == 0.4
    assert outcome(None, {"judge": Score("B+"), "format": Score(said)}, None).reward is None


def test_scores_of_which_none_is_a_number_are_named() -> None:
    found = outcome(None, {"match": Score("B+"), "graded": Score({"style": "good"})}, None)
    assert found.end_reason == "no_reward: no score chosen (-M score=NAME); there are match, graded/style"
    assert outcome(None, {}, None).end_reason == "no_reward: no score chosen (-M score=NAME); there are none"


def test_a_sample_that_failed_is_aborted_with_one_line() -> None:
    found = outcome("first\nsecond\x1b" + "x" * 200, {"match": Score("C")}, None)
    assert (found.status, found.reward, len(found.end_reason)) == ("aborted", None, 128)
    assert found.end_reason.startswith("sample_error: first second x")
