"""Figures of results files."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno_rollouts.outcome import TrialResult
from steno_rollouts.reporting.passes import by_task, compared, mean_reward, pass_at_k, passes, runs_of_one_task

TRIAL = TrialResult("r", "g", "t", "a", "0", "completed", "completed")


def results(**tasks: list[float | None]) -> list[TrialResult]:
    return [
        replace(TRIAL, task_id=task, trial_id=f"{task}.{i}", reward=reward)
        for task, rewards in tasks.items()
        for i, reward in enumerate(rewards)
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_pass(trials: list[bool], k: int) -> None:
    if k > len(trials):
        with pytest.raises(ValueError):
            pass_at_k(len(trials), sum(trials), k)
        return
    choices = list(itertools.combinations(trials, k))
    assert pass_at_k(len(trials), sum(trials), k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_a_spare_trial_counts_for_nothing() -> None:
    [task] = by_task(
        [*results(a=[1.0, None]), replace(TRIAL, end_reason="spare"), replace(TRIAL, task_id="b", end_reason="spare")]
    )
    assert (task.rewards, task.unscored) == ((1.0,), 1)


def test_two_evaluations_in_one_file_are_noticed() -> None:
    first, second = results(a=[1.0, 0.0], b=[1.0]), [replace(TRIAL, run_id="s", trial_id=f"s.{i}") for i in range(2)]
    assert runs_of_one_task(first) == []
    assert runs_of_one_task([*first, *second]) == ["r", "s"]
    assert runs_of_one_task([*first, *(replace(trial, task_id="c") for trial in second)]) == [], "other tasks"
    assert runs_of_one_task([*first, *(replace(trial, end_reason="spare") for trial in second)]) == []


def test_each_task_weighs_alike_and_what_was_not_scored_is_in_no_figure() -> None:
    tasks = by_task(results(a=[1.0, 1.0, 1.0, 1.0], b=[0.0, None], c=[None]))
    reward, at_1, at_2 = mean_reward(tasks), passes(tasks, 1, 1.0), passes(tasks, 2, 1.0)
    assert reward and (reward.value, reward.tasks) == (0.5, 2)
    assert at_1 and (at_1.value, at_1.tasks) == (0.5, 2)
    assert at_2 and (at_2.value, at_2.tasks) == (1.0, 1)  # b has one scored trial
    assert passes(tasks, 5, 1.0) is None
    assert [task.unscored for task in tasks] == [0, 1, 1]


def test_what_passes_is_at_least_the_threshold() -> None:
    tasks = by_task(results(a=[0.5, 0.4]))
    figure = passes(tasks, 1, 0.5)
    assert figure and figure.value == 0.5


def test_an_interval_holds_the_mean_and_gets_narrower_with_more_tasks() -> None:
    few = mean_reward(by_task(results(**{f"t{i}": [float(i % 2)] for i in range(8)})))
    many = mean_reward(by_task(results(**{f"t{i}": [float(i % 2)] for i in range(200)})))
    assert few and many
    for figure in (few, many):
        assert figure.low < 0.5 < figure.high
    # 1.96 standard errors of a coin: 0.35 of 8 tasks, 0.07 of 200
    assert 0.5 - many.low == pytest.approx(0.07, abs=0.015) and 0.5 - few.low == pytest.approx(0.35, abs=0.13)


def test_two_results_are_compared_on_the_tasks_that_both_scored() -> None:
    first = by_task(results(a=[0.0], b=[1.0], c=[1.0], d=[1.0], e=[None]))
    second = by_task(results(a=[1.0], b=[1.0], c=[0.5], e=[1.0], f=[1.0]))
    found = compared(first, second)
    assert found is not None
    assert (found.better, found.worse, found.equal, found.only_first, found.only_second) == (1, 1, 1, 1, 2)
    assert found.difference.value == pytest.approx(0.5 / 3)
    assert compared(first, by_task(results(z=[1.0]))) is None
