"""The result of one check of the doctor: level, message, advice."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class FindingLevel(StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, and a promise is weaker than it could be
    BAD = "bad"  # a promise is not kept, or agents get errors


class Finding(NamedTuple):
    """check: a stable name, `part.thing`.  advice: what to do; "" where nothing is."""

    level: FindingLevel
    check: str
    message: str
    advice: str = ""


def ok(check: str, message: str) -> Finding:
    return Finding(FindingLevel.OK, check, message)


def warning(check: str, message: str, advice: str) -> Finding:
    return Finding(FindingLevel.WARNING, check, message, advice)


def bad(check: str, message: str, advice: str) -> Finding:
    return Finding(FindingLevel.BAD, check, message, advice)


MAX_SKEW_S = 2.0
"""Records have Redis's time and logs each machine's: they can be read together only if these agree."""


def clock(check: str, skew_s: float, uncertainty_s: float) -> Finding:
    """skew_s: the other clock minus ours, known to ± uncertainty_s."""
    text = f"differs by {skew_s:+.1f} s from this machine's (± {uncertainty_s:.1f} s)"
    if abs(skew_s) - uncertainty_s <= MAX_SKEW_S:
        return ok(check, text)
    return bad(
        check, text, "run NTP (chrony, systemd-timesyncd) on both: records have Redis's time, logs each machine's"
    )
