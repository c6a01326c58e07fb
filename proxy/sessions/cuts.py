"""An assistant message that is what a client kept of a turn that was cut off.

Clients keep what they got: all text up to where it broke (OpenCode keeps an aborted turn), or the blocks that were closed
(Claude Code, Codex). What left for a client and what it has read need not be the same, so any beginning of a cut turn's
reply counts as an echo of it, and the recorded turn stands for it like any other. Pure.
"""

from __future__ import annotations

from typing import Any

from proxy.contracts.canonical import Message
from proxy.sessions.normalise import message_digest


def is_beginning(echo: Message, reply: Message) -> bool:
    """Whether an assistant message is how `reply` began: some of its text, or all of it and its first calls."""
    said, whole = text_of(echo.get("content")), text_of(reply.get("content"))
    calls, sampled = echo.get("tool_calls") or [], reply.get("tool_calls") or []
    if not calls:
        return bool(said.strip()) and whole.startswith(said)
    if len(calls) > len(sampled):
        return False
    return message_digest(echo) == message_digest({**reply, "tool_calls": sampled[: len(calls)]})


def text_of(content: Any) -> str:
    """The text of canonical content."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""
