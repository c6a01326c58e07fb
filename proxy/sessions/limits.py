"""What a trial may still spend. Verdicts from recorded counts; turns in flight are the caller's to know."""

from __future__ import annotations

from proxy.contracts.records import Limits, Session


def spent(limits: Limits, session: Session, now: float) -> str | None:
    """Name of the first spent limit (`max_turns`, …), or None. The session then ends with end_reason `limit:<name>`.

    Args: now: Unix seconds, as the session's times. Idle time counts from the session's last update.
    """
    counts = session.counts
    if limits.max_turns is not None and counts.turns >= limits.max_turns:
        return "max_turns"
    if limits.max_tokens is not None and counts.completion_tokens >= limits.max_tokens:
        return "max_tokens"
    started = session.first_turn_at
    if limits.max_wall_s is not None and started is not None and now - started >= limits.max_wall_s:
        return "max_wall_s"
    if limits.max_idle_s is not None and now - session.updated_at >= limits.max_idle_s:
        return "max_idle_s"
    return None


def tokens_left(limits: Limits, session: Session) -> int | None:
    """How many tokens a next turn may sample, at least 0; None: no limit. Clamp `max_tokens` with it."""
    if limits.max_tokens is None:
        return None
    return max(0, limits.max_tokens - session.counts.completion_tokens)
