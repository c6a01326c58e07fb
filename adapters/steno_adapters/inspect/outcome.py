"""What a sample of Inspect that has ended was worth. Values in, values out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from steno import Completion

_WORTH = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
"""Inspect's words: correct, incorrect, partly, no answer."""
_SAID = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""Words that Inspect accepts in upper and lower case."""


class ScoredValue(Protocol):
    @property
    def value(self) -> Any: ...


def outcome(error: str | None, scores: Mapping[str, ScoredValue], chosen: str | None) -> Completion:
    """The sample's reward, or why it has none, as the completion of its trial.

    Args: error: of a sample that failed: it is not scored. chosen: `SCORER` or `SCORER/KEY`; None: the only one there is.
    """
    if error is not None:
        return Completion(status="aborted", end_reason=_line(f"sample_error: {error}"))
    values = dict(_values(scores))
    numbers = {name: number for name, value in values.items() if math.isfinite(number := _number(value))}
    # Texts other than Inspect's grades don't decide which of several is chosen: in another sample they may be no numbers, or the
    # only ones.
    graded = {name: numbers[name] for name in numbers if not isinstance(values[name], str) or values[name] in _WORTH}
    name = chosen or _only(graded) or _only(values)
    if name in numbers:
        return Completion(reward=numbers[name], metrics=numbers)
    if name in values:
        return Completion(
            end_reason=_line(f"no_reward: score {name!r} is no number: {values[name]!r}"), metrics=numbers
        )
    why = f"no score {name!r}" if name else "no score chosen (-M score=NAME)"
    return Completion(
        end_reason=_line(f"no_reward: {why}; there are {', '.join(numbers or values) or 'none'}"), metrics=numbers
    )


def _values(scores: Mapping[str, ScoredValue]) -> Iterable[tuple[str, Any]]:
    for name, score in scores.items():
        if isinstance(score.value, Mapping):
            yield from ((f"{name}/{key}", value) for key, value in score.value.items())
        else:
            yield name, score.value


def _only(names: Mapping[str, Any]) -> str:
    return next(iter(names)) if len(names) == 1 else ""


def _number(value: Any) -> float:
    """The number that Inspect takes for its metrics; NaN for what Inspect can't read and takes as 0."""
    if not isinstance(value, str):
        return float(value) if isinstance(value, bool | int | float) else math.nan
    worth = _WORTH.get(value, _SAID.get(value.lower()))
    try:
        return float(value) if worth is None else worth
    except ValueError:
        return math.nan


def _line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:128]
