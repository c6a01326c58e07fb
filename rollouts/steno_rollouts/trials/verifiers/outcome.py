"""What became of an episode of verifiers', in this project's words. Values in, values out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from steno.contracts.records import MAX_REWARD
from steno_rollouts.outcome import CommandOutcome, EndReason, RewardError
from steno_rollouts.trials.executor import Exit

FAILED = 1
"""Exit code of an episode that failed after its first call to the model."""
REWARD = "reward"
"""`reward_key` that means the sum of a trace's rewards, each by its weight, as verifiers has it."""


def exit_of(traces: Iterable[Any], complete: bool, problem: str) -> Exit:
    """How a trial ended. One without a call to the model did not start.

    Args: traces: all that were begun: one that was cut off is not among its episode's. complete: verifiers takes the episode's
        result. problem: what is said otherwise.
    """
    if not any(trace.calls for trace in traces):
        return Exit(None, error=problem)
    return Exit(0) if complete else Exit(FAILED, error=problem)


def problem_of(episode: Any) -> str:
    """Why it failed, on one line: the first error of those that it ended with, or what stopped it."""
    errors = [*(error for trace in episode.traces if not trace.ok for error in trace.errors), *episode.errors]
    if errors:
        return f"{errors[0].type}: {' '.join(errors[0].message.split())}"
    stopped = next((trace.stop_condition for trace in episode.traces if trace.stop_condition), None)
    return f"stopped: {stopped}" if stopped else "the episode failed"


def worth(episode: Any, key: str) -> CommandOutcome:
    """The reward of an episode that went well: the sum of an agent's rewards, each by its weight; the mean of these, where it ran
    several times. It is the one agent that is trained and has rewards, or the one that is named by the key. Each reward by itself
    and all metrics are metrics: of several agents as `AGENT/NAME`.

    Raises: RewardError: several agents have rewards; a reward was not computed; none that can be trained.
    """
    several = len({trace.agent.name for trace in episode.traces}) > 1
    traces = [trace for trace in episode.traces if trace.ok]
    told: dict[str, list[float]] = {}
    for trace in traces:
        for name, value in _metrics(trace):
            told.setdefault(f"{trace.agent.name}/{name}" if several else name, []).append(value)
    metrics = {name: _mean(values) for name, values in told.items()}
    having = [
        trace
        for trace in episode.traces
        if trace.rewards and (trace.agent.trainable if key == REWARD else trace.agent.name == key)
    ]
    names = sorted({trace.agent.name for trace in having})
    scored = [trace for trace in having if trace.ok]
    if not scored and len(names) < 2:
        return CommandOutcome(EndReason.NO_REWARD, None, metrics, "verifiers gave no reward")
    if len(names) > 1:
        raise RewardError(
            f"reward_key: got {key!r}, and {', '.join(names)} have rewards, while a trial has one: name one of them"
        )
    for trace in scored:
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            raise RewardError(
                f"verifiers: reward {missing[0]!r} was not computed: {trace.stop_condition or 'no reason'}"
            )
    reward = _mean([trace.reward for trace in scored])
    if not math.isfinite(reward) or abs(reward) > MAX_REWARD:
        raise RewardError(f"verifiers: reward: got {reward:g}, must be within ±{MAX_REWARD:g}")
    return CommandOutcome(EndReason.COMPLETED, reward, metrics)


def _metrics(trace: Any) -> Iterator[tuple[str, float]]:
    found = {name: reward.score for name, reward in trace.rewards.items() if reward is not None} | trace.metrics
    for name, value in found.items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
