"""Maps the tool-call ids that clients see (`call_ids.py`) back to the model's own, which some templates render (Kimi, Mistral).

The model's own ids are in the index row; before a worker renders messages, ours are replaced by those.
"""

from __future__ import annotations

from collections.abc import Sequence

from steno.contracts.chat import Message
from steno_proxy.sessions.messages.call_ids import parse_call_id
from steno_proxy.sessions.tree import Tree


def restore_calls(messages: Sequence[Message], tree: Tree) -> list[Message]:
    """The messages with our ids replaced by the model's own, in assistant calls and in tool results.

    An id that is not ours, names a turn that is not in this tree, or stands for a call whose format has no ids stays as
    it is. Turns of other branches count too: a rewritten history is rendered with the ids its model would write.
    Messages without such an id are the same objects as before; the others are copied no deeper than they change.
    """
    return [_restored(message, tree) for message in messages]


def answer_reply(echo: Message, reply: Message, new: Sequence[Message]) -> list[Message]:
    """Return `new`; tool results that name calls by the echo's ids get the ids of the recorded reply's calls instead.

    Some clients know no ids (Gemini's may leave them out), and some write their own. Call i of the echo is call i of the reply.
    """
    ids = {
        said["id"]: call["id"]
        for said, call in zip(echo.get("tool_calls") or (), reply.get("tool_calls") or (), strict=False)
        if said.get("id") and said["id"] != call["id"]
    }
    if not ids:
        return list(new)
    return [
        {**message, "tool_call_id": ids[message["tool_call_id"]]} if message.get("tool_call_id") in ids else message
        for message in new
    ]


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
