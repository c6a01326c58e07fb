"""Recognises an assistant message that is the kept beginning of a turn that was cut off.

Clients keep what they got: all text up to where it broke (OpenCode keeps an aborted turn), or the blocks that were closed
(Claude Code, Codex); some take the white space around it off. What left for a client and what it has read need not be the
same, so any beginning of a cut turn's reply counts as an echo of it, and the recorded turn stands for it like any other. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steno.contracts.chat import Message
from steno_proxy.sessions.messages.normalise import message_digest


def is_beginning(echo: Message, reply: Message) -> bool:
    """Whether an assistant message is how `reply` began: some of its text, or all of it and its first calls."""
    said, whole = text_of(echo.get("content")).strip(), text_of(reply.get("content")).strip()
    calls, sampled = echo.get("tool_calls") or [], reply.get("tool_calls") or []
    if not calls:
        return bool(said) and whole.startswith(said)
    return said == whole and len(calls) <= len(sampled) and same_calls(calls, sampled[: len(calls)])


def same_calls(calls: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> bool:
    """Whether these are the same calls, whatever their ids and the spelling of their arguments."""
    bare: Message = {"role": "assistant", "content": ""}
    return message_digest({**bare, "tool_calls": calls}) == message_digest({**bare, "tool_calls": others})


def text_of(content: Any) -> str:
    """The text of canonical content."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""
