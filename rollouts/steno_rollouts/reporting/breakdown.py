"""Means by words of the user's own: metrics by their names, rewards by the value of a field of the tasks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from steno_rollouts.tasks.selection import lookup

log = logging.getLogger(__name__)

MOST_NAMES = 64
"""Of one kind in one step: each is a curve."""
MOST_CHARS = 96
"""Of a name. A longer one is cut."""


def metric_means(trials: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric, by name, over the trials that have it."""
    found: dict[str, list[float]] = {}
    for metrics in trials:
        for name, value in metrics.items():
            found.setdefault(_cut(name), []).append(value)
    return {name: mean(values) for name, values in bounded(found).items()}


def label_of(task: Mapping[str, Any], field: str) -> str | None:
    """What a task's field says, as text; also one inside another (`metadata.source`). None: the task has none."""
    value = lookup(task, field)
    return None if value is None else _cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def bounded(found: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The first `MOST_NAMES`, in the order of their names."""
    if len(found) > MOST_NAMES:
        _say_once()
    return dict(sorted(found.items())[:MOST_NAMES])


def mean(values: list[float]) -> float:
    """The mean of numbers of any size, whose sum may overflow."""
    return sum(value / len(values) for value in values)


def _cut(name: str) -> str:
    return "".join(char if char.isprintable() else " " for char in name)[:MOST_CHARS]


@cache
def _say_once() -> None:
    log.warning("a step has more than %d metrics, or values of report_by: the first, by name, are reported", MOST_NAMES)
