"""When a sweep is to look at an open session next: not before a limit of time of its own can be spent. Pure."""

from __future__ import annotations

from steno.contracts.records import Session
from steno_proxy.sessions.limits import timed_out_at

UNTIMED_S = 3600.0
"""How soon the sweep looks again at a session without such a limit: an older release, which sets no time for the sweep, may make
another session under the same trial id."""


def look_at(session: Session, now: float) -> float:
    """When a session is to be looked at next for its limits of time, Unix seconds. At or before `now`: a limit of its time is
    spent, as far as its record says."""
    at = timed_out_at(session.limits, session, now)
    return now + UNTIMED_S if at is None else at
