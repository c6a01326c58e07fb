"""Neighbouring messages of one role: which there are, and the one message that says what they say together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from steno.contracts.chat import Message

MERGED = frozenset({"user", "assistant"})
"""Roles whose neighbours are one message, where a provider says so of its format (`CanonicalRequest.merges`)."""


def runs(messages: Sequence[Message], roles: Collection[str]) -> Iterator[tuple[int, int]]:
    """[start, end) of all that are two or more, of these roles, in order. Tells roles apart and nothing else."""
    start, last = 0, len(messages)
    for place in range(1, last + 1):
        if place < last and messages[place]["role"] == messages[start]["role"]:
            continue
        if place - start > 1 and messages[start]["role"] in roles:
            yield start, place
        start = place


def joined(messages: Sequence[Message]) -> Message:
    """One message with the texts, images, reasoning and calls of all of these, in their order. An empty one adds nothing.

    As if its client had put all of it into one message: texts stay parts of their own.
    """
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for message in messages:
        content = message["content"]
        parts += content if not isinstance(content, str) else [{"type": "text", "text": content}] if content else []
        reasoning.append(message.get("reasoning_content") or "")
        calls += message.get("tool_calls") or []
    one: Message = {"role": messages[0]["role"], "content": parts or ""}
    if len(parts) == 1 and parts[0]["type"] == "text":
        one["content"] = parts[0]["text"]
    if any(reasoning):
        one["reasoning_content"] = "".join(reasoning)
    if calls:
        one["tool_calls"] = calls
    return one


def merged(messages: Sequence[Message], roles: Collection[str]) -> list[Message]:
    """The messages with every run of them joined."""
    found: list[Message] = []
    place = 0
    for start, end in runs(messages, roles):
        found += [*messages[place:start], joined(messages[start:end])]
        place = end
    return [*found, *messages[place:]]
