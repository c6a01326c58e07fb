"""The tool-call ids that clients see: unique, and naming their turn.

A client sees `<prefix>_<turn_id>_<i>` (`call_`, `toolu_`, `fc_`, whatever its dialect calls them), so an id that comes back
names the turn that sampled it and the place of the call in its reply.
"""

from __future__ import annotations

import re

from steno.contracts.chat import Message

_OURS = re.compile(r".+_([0-9a-f]{12})_(0|[1-9][0-9]{0,3})", re.DOTALL)


def client_call_id(prefix: str, turn_id: str, i: int) -> str:
    """The id that a client sees for call `i` of a turn. `prefix`: the dialect's word, without the underscore."""
    return f"{prefix}_{turn_id}_{i}"


def parse_call_id(call_id: str) -> tuple[str, int] | None:
    """(turn_id, i) of an id made by `client_call_id`, whatever its prefix; None: not one of ours."""
    found = _OURS.fullmatch(call_id)
    return (found[1], int(found[2])) if found else None


def echoed_ids(message: Message) -> list[str]:
    """Every tool-call id that a message carries, as the client sent it: what `Tree.recognise` wants per message."""
    if message.get("role") == "tool":
        call_id = message.get("tool_call_id")
        return [call_id] if isinstance(call_id, str) else []
    return [call["id"] for call in message.get("tool_calls") or () if isinstance(call.get("id"), str)]
