"""What a trial may still spend. Verdicts from recorded counts and from what the caller says of the turns in flight: an agent that
asks for 64 choices, or 64 times at once, is held to the same limits (I8)."""

from __future__ import annotations

from steno.contracts.errors import BudgetSpent
from steno.contracts.records import Limits, Session


def spent(limits: Limits, session: Session, now: float, *, busy: bool = False) -> str | None:
    """Name of the first spent limit (`max_turns`, …), or None. The session then ends with end_reason `limit:<name>`.

    Args: now, busy: as in `timed_out`.
    """
    counts = session.counts
    if limits.max_turns is not None and counts.turns >= limits.max_turns:
        return "max_turns"
    if limits.max_tokens is not None and counts.completion_tokens >= limits.max_tokens:
        return "max_tokens"
    return timed_out(limits, session, now, busy=busy)


def timed_out(limits: Limits, session: Session, now: float, *, busy: bool = False) -> str | None:
    """Name of the spent limit of time, or None. Both begin with the first turn: a trial that waits for its agent is not idle.

    Args: now: Unix seconds, as the session's times. busy: a turn is running, so the session is not idle; else idle time
        counts from its last update.
    """
    if session.first_turn_at is None:
        return None
    if limits.max_wall_s is not None and now - session.first_turn_at >= limits.max_wall_s:
        return "max_wall_s"
    if limits.max_idle_s is not None and not busy and now - session.updated_at >= limits.max_idle_s:
        return "max_idle_s"
    return None


def timed_out_at(limits: Limits, session: Session, now: float) -> float | None:
    """The earliest Unix time at which a limit of time can be spent, whatever is recorded until then; None: there is none.
    Before the first turn it moves with `now`."""
    began = now if session.first_turn_at is None else session.first_turn_at
    idle_since = now if session.first_turn_at is None else session.updated_at
    times = [limits.max_wall_s and began + limits.max_wall_s, limits.max_idle_s and idle_since + limits.max_idle_s]
    return min((at for at in times if at is not None), default=None)


def without_room(limits: Limits, session: Session, n: int, *, recorded: int, running: int) -> str | None:
    """Name of the limit that leaves no room for `n` more turns of a token each, or None.

    Args: recorded: turns on record, as far as is known. running: turns in flight that are not among them.
    """
    if limits.max_turns is not None and recorded + running + n > limits.max_turns:
        return "max_turns"
    if limits.max_tokens is not None and session.counts.completion_tokens + n > limits.max_tokens:
        return "max_tokens"
    return None


def used_up_by_running(name: str) -> BudgetSpent:
    """The error for a request that this limit leaves no room for beside the running turns; the session goes on."""
    return BudgetSpent(
        f"{name} of this trial: its running requests may use all that is left; send this one again once they have ended"
    )


def wall_left_s(limits: Limits, session: Session, now: float) -> float | None:
    """Seconds that a turn which begins now may take, at least 0; None: no limit."""
    if limits.max_wall_s is None:
        return None
    began = now if session.first_turn_at is None else session.first_turn_at
    return max(0.0, began + limits.max_wall_s - now)


def tokens_left(limits: Limits, session: Session, n: int = 1) -> int | None:
    """How many tokens each of `n` next turns may sample, at least 0; None: no limit. Clamp `max_tokens` with it."""
    if limits.max_tokens is None:
        return None
    return max(0, limits.max_tokens - session.counts.completion_tokens) // n
