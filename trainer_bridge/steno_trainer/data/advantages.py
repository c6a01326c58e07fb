"""Advantages: rewards of a group's trials in, one advantage per trial out. No tensors.

A group is what its id says it is, never a position or a count: groups may be of any size, in any order, and a trial that forked
into several samples is still one reward. A group that says nothing (all rewards equal, or a single one) is dropped and
named, so that its tokens can be accounted for (I4).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ScoredTrial:
    """A trial with its reward, in the task's own units. A trial without one is absent, never 0.0.

    shaping: added to the reward, for how the trial went rather than for what it came to (`overlong`). It makes no group say
    something whose rewards are equal, as in DAPO, whose groups are judged by what is correct. tokens: that the policy sampled.
    """

    trial_id: str
    group_id: str
    reward: float
    shaping: float = 0.0
    tokens: int = 0

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


@dataclass(frozen=True)
class Advantages:
    """by_trial: dimensionless (where a std divides) or in reward units (else), of every trial in a group that says something.
    dropped: group id -> why its trials have none (`zero_variance`, `group_too_small`, `malformed`)."""

    by_trial: dict[str, float]
    dropped: dict[str, Reason]


def group_advantages(trials: Iterable[ScoredTrial], estimator: Estimator | GroupEstimator) -> Advantages:
    """Centre, and where a std divides scale, each group's rewards; or what a user's function makes of them.

    By ours the advantages of a group sum to 0, but for rounding. The order of trials changes nothing, not even the last bit: sums
    are exact (`math.fsum`). A user's function gets them by trial id.

    A group with a reward that is not finite, or beyond `MAX_REWARD`, is dropped as malformed and counts in nothing.

    Raises: BadBatch: a trial twice.
    """
    groups: dict[str, list[ScoredTrial]] = defaultdict(list)
    seen: set[str] = set()
    for trial in trials:
        if trial.trial_id in seen:
            raise BadBatch(f"trial {trial.trial_id}: more than one reward in a batch")
        seen.add(trial.trial_id)
        groups[trial.group_id].append(trial)
    dropped = {group_id: Reason.MALFORMED for group_id, members in groups.items() if any(map(unusable, members))}
    batch = [member.shaped for group_id, members in groups.items() if group_id not in dropped for member in members]
    batch_std = _std(batch) if len(batch) > 1 else 0.0
    by_trial: dict[str, float] = {}
    for group_id, members in groups.items():
        if group_id in dropped:
            continue
        rewards = [member.reward for member in members]
        if len(rewards) < 2:
            dropped[group_id] = Reason.GROUP_TOO_SMALL
        elif _std(rewards) <= EQUAL_WITHIN * max(abs(reward) for reward in rewards):
            dropped[group_id] = Reason.ZERO_VARIANCE
        else:
            members = sorted(members, key=lambda member: member.trial_id)
            values = _advantages(members, batch_std, estimator)
            by_trial.update(zip((member.trial_id for member in members), values, strict=True))
    return Advantages(by_trial, dropped)


def unusable(trial: ScoredTrial) -> bool:
    """Whether its reward can't be computed with. The proxy refuses such a reward; a record of an older one may hold it."""
    return not abs(trial.reward) <= MAX_REWARD or not math.isfinite(trial.shaped)


def _advantages(members: list[ScoredTrial], batch_std: float, estimator: Estimator | GroupEstimator) -> Sequence[float]:
    rewards = [member.shaped for member in members]
    if not isinstance(estimator, Estimator):
        return estimator(GroupRewards(tuple(rewards), tuple(member.tokens for member in members)))
    n = len(rewards)
    mean = math.fsum(rewards) / n
    match estimator:
        case Estimator.GRPO:
            scale = 1.0 / (_std(rewards) + STD_EPSILON)
        case Estimator.GRPO_BATCH_STD:
            scale = 1.0 / (batch_std + STD_EPSILON)
        case Estimator.GRPO_NO_STD | Estimator.DR_GRPO:
            scale = 1.0
        case Estimator.RLOO:
            scale = n / (n - 1)
        case _:
            raise ConfigError(f"unknown estimator: {estimator}", field="estimator")
    return [(reward - mean) * scale for reward in rewards]


def _std(rewards: list[float]) -> float:
    """Standard deviation with n - 1 degrees of freedom."""
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
