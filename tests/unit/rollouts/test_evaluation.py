"""What an evaluation says of its trials."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steno_rollouts.evaluation import Evaluation
from steno_rollouts.outcome import TrialResult
from steno_rollouts.tasks.task import Task

TASKS = [Task("a", {}), Task("b", {})]


def result(task_id: str, index: int, reward: float | None) -> TrialResult:
    return TrialResult(
        "run", task_id, f"{task_id}.{index}", task_id, "eval-0", "completed", "x", reward, completion_tokens=3
    )


def test_each_task_weighs_alike_and_unscored_trials_are_counted_not_zero() -> None:
    found = Evaluation.of(
        20, [result("a", 0, 1.0), result("a", 1, 0.0), result("b", 0, 1.0), result("b", 1, None)], TASKS
    )
    assert found.by_task == {"a": 0.5, "b": 1.0}
    assert found.mean == 0.75 and found.std == pytest.approx(0.3535533905932738)
    assert found.scalars() == {
        "eval/reward": 0.75, "eval/reward_std": found.std, "eval/trials": 4.0, "eval/unscored": 1.0,
        "eval/completion_tokens": 12.0,
    }  # fmt: skip


def test_metrics_and_a_field_of_the_tasks_are_reported_by_name() -> None:
    tasks = [Task("a", {"level": "easy"}), Task("b", {"level": "hard"}), Task("c", {"level": "hard"}), Task("d", {})]
    results = [
        replace(result(name, 0, reward), metrics={"passed": reward})
        for name, reward in zip("abcd", (1, 0, 1, 1), strict=True)
    ]
    found = Evaluation.of(20, results, tasks, "level").scalars()
    own = {name: value for name, value in found.items() if name.count("/") == 2}
    assert own == {"eval/trial/passed": 0.75, "eval/reward_by/easy": 1.0, "eval/reward_by/hard": 0.5}


def test_a_mean_that_there_is_not_is_left_out() -> None:
    found = Evaluation.of(0, [result("a", 0, None)], TASKS)
    assert found.mean is None and found.std is None
    assert found.scalars() == {"eval/trials": 1.0, "eval/unscored": 1.0, "eval/completion_tokens": 3.0}
