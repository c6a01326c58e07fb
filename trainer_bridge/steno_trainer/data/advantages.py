"""Advantages: rewards of a group's trials in, one advantage per trial out. No tensors.

A group is what its id says it is, never a position or a count: groups may be of any size, in any order, and a trial that forked
into several samples is still one reward, or with `Gdpo` one of each kind. A group that says nothing (all rewards equal, or a
single one) is dropped and named, so that its tokens can be accounted for (I4).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from steno.contracts.errors import ConfigError
from steno.contracts.records import MAX_REWARD
from steno_trainer.data.ledger import Reason
from steno_trainer.errors import BadBatch

STD_EPSILON = 1e-6
"""Added to the standard deviation, in the reward's units (as verl). Keeps near-equal rewards from blowing up."""
EQUAL_WITHIN = 1e-9
"""Rewards count as equal if their standard deviation is at most this fraction of the largest of them: sums that were rounded
differently (0.1 + 0.2 and 0.3) differ by 1e-16 of it, and so does a rounded mean. Relative, so that no reward's unit matters."""


class Estimator(StrEnum):
    """r: a trial's reward; n: scored trials in its group; mean and std: over those n.

    GRPO            (r - mean) / (std + 1e-6), std with n - 1 degrees of freedom as in verl and TRL. arXiv:2402.03300, 4.1.2
    GRPO_BATCH_STD  (r - mean) / (batch std + 1e-6), that of all rewards together, whatever their groups; n - 1 as well. What is
                    weighed alike is then a reward's difference, and not each question's own spread. arXiv:2508.08221
    GRPO_NO_STD     r - mean. Dividing by std weighs questions by how hard they are; see DR_GRPO.
    RLOO            r - mean of the other n - 1 = n / (n - 1) (r - mean). arXiv:2402.14740
    DR_GRPO         r - mean, as GRPO_NO_STD: the rest of Dr. GRPO is a constant in place of lengths, which is
                    `aggregation.Aggregation.CONSTANT`. arXiv:2503.20783, 3.2
    """

    GRPO = "grpo"
    GRPO_BATCH_STD = "grpo_batch_std"
    GRPO_NO_STD = "grpo_no_std"
    RLOO = "rloo"
    DR_GRPO = "dr_grpo"


GDPO = "gdpo"
"""The setting `estimator` that means `Gdpo`."""


@dataclass(frozen=True)
class Gdpo:
    """Several rewards, each normalised by itself: trials with equal sums may have different advantages. arXiv:2601.05242

    s = sum of weight (r - mean) / std over the rewards r, which are metrics of the trial; mean and std as in GRPO. The
    advantage is s / (batch std + 1e-6), that of the s of all trials together.

    weights: metric of the trials -> its weight. Metrics are in whatever units; the trial's reward itself is not read.
    """

    weights: Mapping[str, float]


@dataclass(frozen=True)
class ScoredTrial:
    """A trial with its reward, in the task's own units. A trial without one is absent, never 0.0.

    shaping: added to the reward, for how the trial went rather than for what it came to (`overlong`). A group
    whose rewards are equal is dropped even if its shaping differs, as in DAPO, which judges groups by correctness. tokens: that
    the policy sampled.
    metrics: posted with the reward; `Gdpo` alone reads them.
    """

    trial_id: str
    group_id: str
    reward: float
    shaping: float = 0.0
    tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def shaped(self) -> float:
        return self.reward + self.shaping


@dataclass(frozen=True)
class GroupRewards:
    """What an estimator of a user's is told of a group that says something: of each trial with a reward, in one order.

    rewards: with the length penalty, where there is one. lengths: tokens that the policy sampled in the trial's completions that
    are trained.
    """

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]


GroupEstimator = Callable[[GroupRewards], Sequence[float]]
"""One advantage for each trial (`own_estimator.py`)."""
AnyEstimator = Estimator | Gdpo | GroupEstimator


@dataclass(frozen=True)
class Advantages:
    """by_trial: dimensionless (where a std divides) or in reward units (else), of every trial in a group that says something.
    dropped: group id -> why its trials have none (`zero_variance`, `group_too_small`, `malformed`)."""

    by_trial: dict[str, float]
    dropped: dict[str, Reason]


def group_advantages(trials: Iterable[ScoredTrial], estimator: AnyEstimator) -> Advantages:
    """Centre, and where a std divides scale, each group's rewards; or what a user's function makes of them.

    By ours the advantages of a group sum to 0, but for rounding. The order of trials changes nothing, not even the last bit: sums
    are exact (`math.fsum`). A user's function gets them by trial id.

    A group with a trial that has a `fault` is dropped as malformed and counts in nothing.

    Raises: BadBatch: a trial twice.
    """
    groups: dict[str, list[ScoredTrial]] = defaultdict(list)
    seen: set[str] = set()
    for trial in trials:
        if trial.trial_id in seen:
            raise BadBatch(f"trial {trial.trial_id}: more than one reward in a batch")
        seen.add(trial.trial_id)
        groups[trial.group_id].append(trial)
    for members in groups.values():
        members.sort(key=lambda member: member.trial_id)
    dropped = {name: why for name, members in groups.items() if (why := why_silent(members, estimator)) is not None}
    values = {
        name: _values(members, estimator)
        for name, members in groups.items()
        if dropped.get(name) is not Reason.MALFORMED
    }
    batch = [value for some in values.values() for value in some]
    batch_std = _std(batch) if len(batch) > 1 else 0.0
    by_trial: dict[str, float] = {}
    for name, members in groups.items():
        if name not in dropped:
            found = _advantages(members, values[name], batch_std, estimator)
            by_trial.update(zip((member.trial_id for member in members), found, strict=True))
    return Advantages(by_trial, dropped)


def why_silent(members: Sequence[ScoredTrial], estimator: AnyEstimator) -> Reason | None:
    """Why the scored trials of a group have no advantages; None: they have."""
    if any(fault(member, estimator) for member in members):
        return Reason.MALFORMED
    if len(members) < 2:
        return Reason.GROUP_TOO_SMALL
    return Reason.ZERO_VARIANCE if all(map(_equal, _rewards(members, estimator))) else None


def fault(trial: ScoredTrial, estimator: AnyEstimator) -> str:
    """Why its rewards can't be computed with, naming the field; "": they can. The proxy refuses such a reward; a record of an
    older one may hold it."""
    if not abs(trial.reward) <= MAX_REWARD or not math.isfinite(trial.shaped):
        return f"reward: got {trial.reward}, must be within ±{MAX_REWARD:g}"
    for name in estimator.weights if isinstance(estimator, Gdpo) else ():
        value = trial.metrics.get(name)
        if value is None:
            return f"metrics.{name}: got none, and gdpo_metrics names it"
        if not abs(value) <= MAX_REWARD:
            return f"metrics.{name}: got {value}, must be within ±{MAX_REWARD:g}"
    return ""


def _rewards(members: Sequence[ScoredTrial], estimator: AnyEstimator) -> list[list[float]]:
    """The rewards by which a group is judged: a list for each kind of reward, with one number per trial."""
    if isinstance(estimator, Gdpo):
        return [[member.metrics[name] for member in members] for name in estimator.weights]
    return [[member.reward for member in members]]


def _values(members: Sequence[ScoredTrial], estimator: AnyEstimator) -> list[float]:
    """For each trial the number whose standard deviation over the batch is taken: its reward with shaping, or `Gdpo`'s s."""
    if not isinstance(estimator, Gdpo):
        return [member.shaped for member in members]
    kinds = zip(estimator.weights.values(), _rewards(members, estimator), strict=True)
    # Without an epsilon: the small differences that it makes are all that is left where two rewards cancel out.
    weighted = [[weight * value for value in _normalised(rewards, 0.0)] for weight, rewards in kinds]
    return [math.fsum(of_trial) for of_trial in zip(*weighted, strict=True)]


def _normalised(rewards: list[float], epsilon: float = STD_EPSILON) -> list[float]:
    """(r - mean) / (std + epsilon); zeros, where all are equal."""
    if len(rewards) < 2 or _equal(rewards):
        return [0.0] * len(rewards)
    mean, scale = math.fsum(rewards) / len(rewards), 1.0 / (_std(rewards) + epsilon)
    return [(reward - mean) * scale for reward in rewards]


def _advantages(
    members: Sequence[ScoredTrial], values: list[float], batch_std: float, estimator: AnyEstimator
) -> Sequence[float]:
    """Args: values: as `_values` gives them."""
    if isinstance(estimator, Gdpo):
        return [value / (batch_std + STD_EPSILON) for value in values]
    if not isinstance(estimator, Estimator):
        return estimator(GroupRewards(tuple(values), tuple(member.tokens for member in members)))
    if estimator is Estimator.GRPO:
        return _normalised(values)
    n = len(values)
    mean = math.fsum(values) / n
    match estimator:
        case Estimator.GRPO_BATCH_STD:
            scale = 1.0 / (batch_std + STD_EPSILON)
        case Estimator.GRPO_NO_STD | Estimator.DR_GRPO:
            scale = 1.0
        case Estimator.RLOO:
            scale = n / (n - 1)
        case _:
            raise ConfigError(f"unknown estimator: {estimator}", field="estimator")
    return [(value - mean) * scale for value in values]


def _equal(rewards: list[float]) -> bool:
    return _std(rewards) <= EQUAL_WITHIN * max(abs(reward) for reward in rewards)


def _std(rewards: list[float]) -> float:
    """Standard deviation with n - 1 degrees of freedom."""
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
