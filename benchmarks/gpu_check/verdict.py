"""How a part of the check ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class Verdict:
    """why: of a part that is not `ok`, or what to know of one that is; empty: nothing. figures: what was measured."""

    state: Literal["ok", "failed", "not possible"]
    why: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {"state": self.state, "why": self.why, "seconds": self.seconds, "figures": self.figures}


def failed(why: str, figures: Mapping[str, Any] | None = None) -> Verdict:
    return Verdict("failed", why, dict(figures or {}))


def not_possible(why: str, figures: Mapping[str, Any] | None = None) -> Verdict:
    return Verdict("not possible", why, dict(figures or {}))


def judged(figures: Mapping[str, Any], wrong: list[str], note: str = "") -> Verdict:
    """`ok` where nothing is wrong. note: what to know then."""
    return failed("; ".join(wrong), figures) if wrong else Verdict("ok", note, dict(figures))


def beyond(what: str, found: float, bound: float) -> list[str]:
    """Nothing, or a sentence. Not a number is beyond every bound."""
    return [] if found <= bound else [f"{what}: {found:.3g}, {bound:.3g} at most"]


def below(what: str, found: float, bound: float) -> list[str]:
    return [] if found >= bound else [f"{what}: {found:.6g}, {bound:.6g} at least"]
