"""What a sample of Inspect that has ended was worth. Values in, values out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from steno import Completion

_WORTH = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
"""Inspect's words: correct, incorrect, partly, no answer."""


class ScoredValue(Protocol):
    @property
    def value(self) -> Any: ...


def outcome(error: str | None, scores: Mapping[str, ScoredValue], chosen: str | None) -> Completion:
    """Args: error: of a sample that failed: it is not scored. chosen: `SCORER` or `SCORER/KEY`; None: the only one there is."""
    if error is not None:
        return Completion(status="aborted", end_reason=_line(f"sample_error: {error}"))
    numbers = dict(_numbers(scores))
    name = chosen or (next(iter(numbers)) if len(numbers) == 1 else "")
    if name in numbers:
        return Completion(reward=numbers[name], metrics=numbers)
    why = f"no score {name!r}" if name else "no score chosen (-M score=NAME)"
    return Completion(end_reason=_line(f"no_reward: {why}; there are {', '.join(numbers) or 'none'}"), metrics=numbers)


def _numbers(scores: Mapping[str, ScoredValue]) -> Iterable[tuple[str, float]]:
    for name, score in scores.items():
        for key, value in score.value.items() if isinstance(score.value, Mapping) else [("", score.value)]:
            number = _WORTH.get(value, math.nan) if isinstance(value, str) else _number(value)
            if math.isfinite(number):
                yield f"{name}/{key}" if key else name, number


def _number(value: Any) -> float:
    return float(value) if isinstance(value, bool | int | float) else math.nan


def _line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:128]
