"""What both stores show of a recording besides the record itself: events for watchers, cursors for pages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec

from steno.contracts.errors import BadRequest
from steno.contracts.records import OPEN, Session, Turn
from steno.contracts.rest import END
from steno_proxy.store.encoding.codec import decode_entry, decode_row
from steno_proxy.store.encoding.head import Head, head_of

Event = tuple[str, dict[str, Any]]


def turn_events(start: int, entries: Sequence[bytes], *, ended: bool) -> list[Event]:
    """One event per turn from number `start` on; its cursor is the number of turns seen with it.

    Up to the first turn that is still open, while the session has not ended: each is told once, when all of it is there. One that
    another turn goes on from stays open for good: its proxy died, and its client made do with what it had."""
    events = []
    for number, raw in enumerate(entries, start):
        if not ended and decode_row(raw).finish == OPEN and not _gone_on_from(number, entries[number - start + 1 :]):
            break
        events.append((str(number + 1), _turn_event(number, raw)))
    return events


def _gone_on_from(number: int, later: Sequence[bytes]) -> bool:
    return any(decode_row(raw).parent == number for raw in later)


def _turn_event(number: int, raw: bytes) -> dict[str, Any]:
    entry = decode_entry(raw)
    row, meta = entry.row, entry.meta
    return {
        "type": "turn", "index": number, "turn_id": row.turn_id, "parent": row.parent, "fork_reason": meta.fork_reason,
        "finish_reason": row.finish if meta.finish is None else meta.finish, "partial": row.partial,
        "prompt_tokens": entry.prompt_tokens, "completion_tokens": entry.completion_tokens, "at": meta.at(2),
    }  # fmt: skip


def past_events(start: int, session: Session, turns: Sequence[Turn]) -> list[Event]:
    """All events of a session that is in the archive, from turn number `start` on."""
    numbers = {turn.turn_id: turn.index for turn in turns}
    events: list[Event] = [
        (str(turn.index + 1), {
            "type": "turn", "index": turn.index, "turn_id": turn.turn_id, "parent": numbers.get(turn.parent_id or "", -1),
            "fork_reason": turn.fork_reason, "finish_reason": turn.finish_reason, "partial": turn.partial,
            "prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.completion_tokens,
            "at": turn.timings.last_token,
        })
        for turn in turns[start:]
    ]  # fmt: skip
    return [*events, end_event(head_of(session))]


def end_event(head: Head | None) -> Event:
    """The last event. `head` None: deleted."""
    if head is None or head.status == "deleted":
        return END, {"type": "deleted"}
    return END, {"type": head.status, "reward": head.reward, "end_reason": head.end_reason, "at": head.ended}


def check_cursor(cursor: str | None) -> None:
    """Whether it is one of a session's events, the last included. Raises BadRequest."""
    if cursor != END:
        turns_seen(cursor)


def turns_seen(cursor: str | None) -> int:
    """How many turns a cursor stands for. Raises BadRequest."""
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 16):
        raise BadRequest(f"after: got {cursor[:80]!r}, must be the id of one of this session's events", field="after")
    return int(cursor)


class ListPosition(msgspec.Struct, array_like=True, frozen=True, order=True):
    """A place in a list of sessions: creation time, then trial id. Stable whatever is inserted before or after."""

    created: float
    trial_id: str

    def cursor(self) -> str:
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")


def position(cursor: str | None) -> ListPosition | None:
    """Raises BadRequest."""
    if cursor is None:
        return None
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return msgspec.msgpack.decode(raw, type=ListPosition)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise BadRequest(
            f"cursor: got {cursor[:80]!r}, must be the next_cursor of a page of this list", field="cursor"
        ) from None
