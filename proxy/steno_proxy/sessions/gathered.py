"""One reply whose calls come back each with its own result behind it (Goose): put together again before anything is compared.

    said        assistant(text, call 0)  result 0  assistant(call 1)  result 1 ...
    is read as  assistant(text, call 0, call 1)  result 0  result 1 ...

Only where the ids name all calls of one turn of this trial, in their order (of one that was cut off: the first of them), nothing
else stands between them but results of these calls, and no message but the first has a text. So nothing is lost or added, and
whether it is the recorded reply is asked afterwards, as of any other message. Pure; linear in the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from steno.contracts.chat import Message, joined
from steno_proxy.sessions.messages.call_ids import parse_call_id
from steno_proxy.sessions.messages.echoes import named_turn
from steno_proxy.sessions.tree import Tree


def gathered(messages: Sequence[Message], tree: Tree, recorded: int = 0) -> tuple[Sequence[Message], frozenset[int]]:
    """The messages with each such reply as one message before its results, and the places of those replies among them.

    Args: recorded: so many messages are on record as they are; replies among these stay so.
    Where there is none, the messages are the same object.
    """
    found: list[Message] = []
    places: set[int] = set()
    place = done = 0
    while place < len(messages):
        end = _end_of_turn(messages, place, tree) if messages[place].get("tool_calls") else place
        if end == place or end <= recorded:
            place = max(end, place + 1)
            continue
        found += messages[done:place]
        places.add(len(found))
        part = messages[place:end]
        found.append(_one([message for message in part if message["role"] == "assistant"]))
        found += [message for message in part if message["role"] == "tool"]
        place = done = end
    return ([*found, *messages[done:]], frozenset(places)) if places else (messages, frozenset())


def _end_of_turn(messages: Sequence[Message], start: int, tree: Tree) -> int:
    """The place after the last call of the reply that begins at `start`; `start`: there is nothing to put together."""
    turn_id = named_turn(messages[start])
    number = tree.number(turn_id)
    wanted = len(tree.own_call_ids(number)) if number >= 0 else 0
    if len(messages[start]["tool_calls"]) >= wanted:
        return start
    place, calls, pieces, results = start, 0, 0, 0
    while place < len(messages) and calls < wanted:
        message = messages[place]
        if message["role"] == "tool":
            named = parse_call_id(message.get("tool_call_id") or "")
            if named is None or named[0] != turn_id or named[1] >= calls:
                break
            results += 1
        else:
            if message["role"] != "assistant" or (calls and not _is_calls_alone(message)):
                break
            ids = [parse_call_id(call.get("id") or "") for call in message["tool_calls"]]
            if ids != [(turn_id, calls + i) for i in range(len(ids))]:
                break
            calls += len(ids)
            pieces += 1
        place += 1
    whole = calls == wanted or (tree.partial(number) and pieces > 1)
    return place if whole and results else start


def _is_calls_alone(message: Message) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return bool(message.get("tool_calls")) and all(
        part.get("type") == "text" and not part["text"].strip() for part in parts
    )


def _one(replies: Sequence[Message]) -> Message:
    """The reply in one message. Reasoning that stands on each of its messages counts once."""
    first, *others = replies
    thought = first.get("reasoning_content")
    return joined([first, *(_but_for(thought, message) for message in others)])


def _but_for(thought: str | None, message: Message) -> Message:
    if message.get("reasoning_content") != thought:
        return message
    return {key: value for key, value in message.items() if key != "reasoning_content"}
