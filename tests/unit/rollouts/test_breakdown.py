"""Numbers by words of the user's own."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from steno_rollouts.reporting import breakdown
from steno_rollouts.reporting.breakdown import MOST_CHARS, MOST_NAMES, label_of, metric_means


def test_a_metric_is_the_mean_over_the_trials_that_have_it() -> None:
    found = metric_means([{"passed": 3.0, "lint": 1.0}, {"passed": 1.0}, {}])
    assert found == {"lint": 1.0, "passed": 2.0}


def test_metrics_of_any_size_have_a_mean() -> None:
    largest = sys.float_info.max
    assert metric_means([{"x": largest}, {"x": largest}, {"x": -largest}]) == {"x": pytest.approx(largest / 3)}


def test_names_are_bounded_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    breakdown._say_once.cache_clear()
    many = {f"m{n:03}": float(n) for n in range(MOST_NAMES + 5)}
    with caplog.at_level(logging.WARNING):
        first, second = metric_means([many]), metric_means([many, {"zz": 1.0}])
    assert list(first) == [f"m{n:03}" for n in range(MOST_NAMES)] and first == second
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        f"a step has more than {MOST_NAMES} metrics"
    ]
    assert list(metric_means([{"a\nb" * 100: 1.0}])) == [("a b" * 100)[:MOST_CHARS]]


@pytest.mark.parametrize(
    ("task", "label"),
    [
        ({"source": "gsm8k"}, "gsm8k"), ({"source": 3}, "3"), ({"source": True}, "true"), ({"source": ["a", 1]}, '["a", 1]'),
        ({"source": None}, None), ({}, None),
    ],
)  # fmt: skip
def test_what_a_field_says_is_text(task: dict[str, Any], label: str | None) -> None:
    assert label_of(task, "source") == label
    assert label_of({"metadata": task}, "metadata.source") == label
