"""Evaluation in a training loop: the same tasks every N steps, in groups that are never trained.

evaluator = Evaluator(prepared.rollouts(client), prepared.tasks, every_steps=20)
if evaluator.due(step):
    scalars |= (await evaluator.run(step, version)).scalars()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from steno.contracts.errors import ConfigError
from steno_rollouts.build import Prepared
from steno_rollouts.groups.plan import Planned
from steno_rollouts.harness import Rollouts
from steno_rollouts.outcome import TrialResult
from steno_rollouts.reporting.breakdown import bounded, label_of, metric_means
from steno_rollouts.tasks.task import Task

GREEDY = {"temperature": 0.0}
"""Evaluation's own sampling, unless told otherwise: what differs between two steps is then the policy, not the draw."""


@dataclass(frozen=True)
class Evaluation:
    """Rewards by task, in the tasks' order and units. unscored: trials without a reward; they are in no mean. metrics: by name,
    means over the trials that have it. labels: by task, what its field `report_by` says."""

    step: int
    rewards: dict[str, list[float]]
    unscored: int
    completion_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, step: int, results: Sequence[TrialResult], tasks: Sequence[Task] = (), report_by: str | None = None
    ) -> Evaluation:
        rewards: dict[str, list[float]] = {task.task_id: [] for task in tasks}
        for result in sorted(results, key=lambda result: result.trial_id):
            if result.reward is not None:
                rewards.setdefault(result.task_id, []).append(result.reward)
        unscored = sum(result.reward is None for result in results)
        tokens = sum(result.completion_tokens for result in results)
        found = {} if report_by is None else {task.task_id: label_of(task.fields, report_by) for task in tasks}
        labels = {task_id: label for task_id, label in found.items() if label is not None}
        return cls(step, rewards, unscored, tokens, metric_means(result.metrics for result in results), labels)

    @property
    def by_task(self) -> dict[str, float]:
        """Mean reward of each task that has one."""
        return {task_id: math.fsum(values) / len(values) for task_id, values in self.rewards.items() if values}

    @property
    def mean(self) -> float | None:
        """Over tasks, so that each weighs alike however many of its trials were scored. None: nothing was scored."""
        means = self.by_task.values()
        return math.fsum(means) / len(means) if means else None

    @property
    def std(self) -> float | None:
        """Between the tasks' means, with n - 1 degrees of freedom. None: fewer than two."""
        means, mean = list(self.by_task.values()), self.mean
        if mean is None or len(means) < 2:
            return None
        return math.sqrt(math.fsum((value - mean) ** 2 for value in means) / (len(means) - 1))

    def scalars(self) -> dict[str, float]:
        """As a trainer logs them. A mean that there is not is left out: 0.0 would be a measured zero."""
        found = {"eval/reward": self.mean, "eval/reward_std": self.std}
        trials = self.unscored + sum(map(len, self.rewards.values()))
        return {
            **{name: value for name, value in found.items() if value is not None},
            "eval/trials": float(trials),
            "eval/unscored": float(self.unscored),
            "eval/completion_tokens": float(self.completion_tokens),
            **{f"eval/trial/{name}": value for name, value in self.metrics.items()},
            **{f"eval/reward_by/{label}": mean for label, mean in self._by_label().items()},
        }

    def _by_label(self) -> dict[str, float]:
        """Over tasks, as `mean`."""
        found: dict[str, list[float]] = {}
        for task_id, mean in self.by_task.items():
            if (label := self.labels.get(task_id)) is not None:
                found.setdefault(label, []).append(mean)
        return {label: math.fsum(means) / len(means) for label, means in bounded(found).items()}


class Evaluator:
    """Rolls the same tasks out again and again."""

    def __init__(
        self, rollouts: Rollouts, tasks: Sequence[Task], every_steps: int, report_by: str | None = None
    ) -> None:
        """Args: rollouts: with purpose `eval` and sampling of their own. report_by: field of the tasks by which rewards are
        reported as well. Raises: ConfigError: their purpose is another."""
        if every_steps < 1:
            raise ConfigError(f"every_steps: got {every_steps}, must be at least 1", field="every_steps")
        if rollouts.options.purpose != "eval":
            raise ConfigError(
                f"purpose: got {rollouts.options.purpose!r}, must be 'eval': other groups would be trained",
                field="purpose",
            )
        self._rollouts = rollouts
        self._tasks = list(tasks)
        self._every_steps = every_steps
        self._report_by = report_by

    def due(self, step: int) -> bool:
        """Whether to evaluate before this step is taken. True for 0: the curve begins with what training starts from."""
        return step % self._every_steps == 0

    async def run(self, step: int, version: str | None = None) -> Evaluation:
        """Evaluate the policy that is served now.

        An evaluation that was cut short goes on where it stopped, if the same version is asked for again.
        Args: version: of the policy, `<lineage>/<step>`; two lineages may both have a step of this number. Default: the number.
        Raises: as `Rollouts.run`.
        """
        name = f"eval-{step if version is None else version}"
        results = await self._rollouts.run(Planned(task, name) for task in self._tasks)
        return Evaluation.of(step, results, self._tasks, self._report_by)


def greedy(prepared: Prepared) -> Prepared:
    """The same as an evaluation: purpose `eval`, no staleness bound, no spare trials, greedy sampling where none was chosen.
    Trials that fail before their first turn are unscored, and stop nothing: a training run goes on without one of its numbers."""
    settings = prepared.settings
    sampling = settings.sampling or GREEDY
    update = {
        "purpose": "eval",
        "groups_per_step": None,
        "sampling": sampling,
        "stop_after_failures": 0,
        "spare_trials": 0,
    }
    return replace(prepared, settings=settings.model_copy(update=update))
