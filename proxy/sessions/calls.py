"""Tool-call ids: the unique ones that clients see, and the model's own that its template renders.

A client sees `<prefix>_<turn_id>_<i>` (`call_`, `toolu_`, `fc_`, whatever its dialect calls them), so an id that comes back
names the turn that sampled it and the place of the call in its reply. The model's own ids (Kimi and Mistral render them)
are in the index row; before a worker renders messages, ours are replaced by those.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxy.contracts.canonical import Message

if TYPE_CHECKING:
    from proxy.sessions.tree import Tree

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


def restore_calls(messages: Sequence[Message], tree: Tree) -> list[Message]:
    """The messages with our ids replaced by the model's own, in assistant calls and in tool results.

    An id that is not ours, names a turn that is not in this tree, or stands for a call whose format has no ids stays as
    it is. Turns of other branches count too: a rewritten history is rendered with the ids its model would write.
    Messages without such an id are the same objects as before; the others are copied no deeper than they change.
    """
    return [_restored(message, tree) for message in messages]


def _restored(message: Message, tree: Tree) -> Message:
    call_id = message.get("tool_call_id")
    if isinstance(call_id, str) and (own := _own(call_id, tree)):
        return {**message, "tool_call_id": own}
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed = False
    restored = []
    for call in calls:
        own = _own(call["id"], tree) if isinstance(call.get("id"), str) else ""
        changed = changed or bool(own)
        restored.append({**call, "id": own} if own else call)
    return {**message, "tool_calls": restored} if changed else message


def _own(call_id: str, tree: Tree) -> str:
    named = parse_call_id(call_id)
    if named is None:
        return ""
    number = tree.number(named[0])
    own = tree.own_call_ids(number) if number >= 0 else ()
    return own[named[1]] if named[1] < len(own) else ""
