"""Rewards of a group in, advantages out, by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean, stdev

Advantages = Callable[[Mapping[str, float]], Mapping[str, float]]
"""Rewards by trial of one group -> advantages by trial. A trial that failed is in neither."""

STD_EPSILON = 1e-6


def grpo_advantages(rewards: Mapping[str, float]) -> dict[str, float]:
    """(r - mean) / (std + 1e-6), std with n - 1 degrees of freedom: `steno train --estimator grpo`, and not TRL's own
    asynchronous worker, which takes n and 1e-8. Equal rewards, and a single one, give zeros."""
    values = list(rewards.values())
    mean, spread = fmean(values), stdev(values) if len(values) > 1 else 0.0
    return {trial: (reward - mean) / (spread + STD_EPSILON) for trial, reward in rewards.items()}
