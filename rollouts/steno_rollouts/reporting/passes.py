"""What a results file says of a policy: mean reward, pass@k, and how two of them compare. Pure.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374): of a task with n scored trials, c of which passed,
1 - C(n - c, k) / C(n, k); averaged over tasks. Intervals are bootstrapped over tasks, since trials of one task are alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steno_rollouts.outcome import EndReason, TrialResult

DRAWS = 2000
"""Bootstrap samples: the ends of an interval of 95 % are good to about a tenth of its width."""


@dataclass(frozen=True)
class TaskResult:
    """One task's trials. unscored: trials without a reward; no figure counts them."""

    task_id: str
    rewards: tuple[float, ...]
    unscored: int

    @property
    def mean(self) -> float:
        return math.fsum(self.rewards) / len(self.rewards)

    def passed(self, threshold: float) -> int:
        return sum(reward >= threshold for reward in self.rewards)


@dataclass(frozen=True)
class Figure:
    """A mean over tasks, and the interval of 95 % around it. tasks: how many it is of."""

    value: float
    low: float
    high: float
    tasks: int


@dataclass(frozen=True)
class Comparison:
    """Two results on the tasks that both scored. difference: of the second's mean rewards minus the first's, paired by task."""

    difference: Figure
    better: int
    worse: int
    equal: int
    only_first: int
    only_second: int


def by_task(results: Iterable[TrialResult]) -> list[TaskResult]:
    """In the order in which tasks are first seen. Spare trials, which were not needed, count for nothing."""
    rewards: dict[str, list[float]] = {}
    unscored: dict[str, int] = {}
    for result in results:
        if result.end_reason == EndReason.SPARE:
            continue
        found = rewards.setdefault(result.task_id, [])
        if result.reward is None:
            unscored[result.task_id] = unscored.get(result.task_id, 0) + 1
        else:
            found.append(result.reward)
    return [TaskResult(task_id, tuple(values), unscored.get(task_id, 0)) for task_id, values in rewards.items()]


def runs_of_one_task(results: Iterable[TrialResult]) -> list[str]:
    """Runs that share a task with another run: two evaluations that were written to one file, say. Figures then mix trials of
    both runs."""
    runs: dict[str, set[str]] = {}
    for result in results:
        if result.end_reason != EndReason.SPARE:
            runs.setdefault(result.task_id, set()).add(result.run_id)
    return sorted(set().union(*(found for found in runs.values() if len(found) > 1)))


def pass_at_k(trials: int, passed: int, k: int) -> float:
    """The chance that at least one of k trials passes, 0 to 1, estimated from `trials` >= k of which `passed` did."""
    if not 1 <= k <= trials or not 0 <= passed <= trials:
        raise ValueError(f"pass@{k} of {passed} passed trials of {trials}")
    return 1.0 - math.comb(trials - passed, k) / math.comb(trials, k)


def mean_reward(tasks: Sequence[TaskResult]) -> Figure | None:
    """Over tasks, so that each weighs alike. None: nothing was scored."""
    return _figure([task.mean for task in tasks if task.rewards])


def passes(tasks: Sequence[TaskResult], k: int, threshold: float) -> Figure | None:
    """pass@k over the tasks with at least k scored trials. None: there is none. threshold: least reward that passes."""
    return _figure(
        [pass_at_k(len(task.rewards), task.passed(threshold), k) for task in tasks if len(task.rewards) >= k]
    )


def compared(first: Sequence[TaskResult], second: Sequence[TaskResult]) -> Comparison | None:
    """None: no task was scored by both."""
    before = {task.task_id: task.mean for task in first if task.rewards}
    after = {task.task_id: task.mean for task in second if task.rewards}
    differences = [after[name] - before[name] for name in before if name in after]
    figure = _figure(differences)
    if figure is None:
        return None
    better, worse = sum(value > 0 for value in differences), sum(value < 0 for value in differences)
    return Comparison(
        figure, better, worse, len(differences) - better - worse,
        len(before.keys() - after.keys()), len(after.keys() - before.keys()),
    )  # fmt: skip


def _figure(values: Sequence[float]) -> Figure | None:
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    draw = random.Random(0)  # the same file gives the same interval
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(DRAWS))
    return Figure(mean, means[round(0.025 * (DRAWS - 1))], means[round(0.975 * (DRAWS - 1))], len(values))
