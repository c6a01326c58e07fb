"""The words in which a request is refused: the field, the value seen, the values allowed."""

from __future__ import annotations

from typing import Any

from steno.contracts.errors import BadRequest
from steno_proxy.dialects.bounds import number

COMPUTERS = frozenset({"computer", "computer_use", "computer_use_preview"})
"""Tools that the client runs by screenshots, and that are not offered here."""
_SHOWN_CHARS = 40


def must_be(allowed: str, path: str, value: Any) -> BadRequest:
    """The error to raise. Args: allowed: what follows `must be`; path: of the field, dotted; value: as it came, None if there is
    none."""
    return BadRequest(f"{path}: got {shown(value)}, must be {allowed}", field=path)


def nothing_said() -> BadRequest:
    """The error for a conversation whose messages only bring tools."""
    told = "messages: got only system messages without text, must be at least one message with content"
    return BadRequest(told, field="messages")


def nobody_runs(path: str, value: Any) -> BadRequest:
    """The error for a request whose tools are all left out: without them, a model would invent what the tools should find."""
    told = "only the provider can run it, and the request has no other tool"
    return BadRequest(f"{path}: got {shown(value)}: {told}", field=path)


def not_by_screenshots(path: str, kind: str) -> BadRequest:
    """The error for a tool of COMPUTERS."""
    return BadRequest(
        f"{path}.type: got {kind!r}: the client runs it by screenshots, which no model here was taught. Offer what it does as"
        " function tools",
        field=f"{path}.type",
    )


def shown(value: Any) -> str:
    """A value of JSON in a few words: numbers and short texts as they are, of objects and lists only what they are."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, str):
        return repr(value[:_SHOWN_CHARS])
    kind = "an object" if isinstance(value, dict) else "a list"
    return kind if value else f"{kind} with nothing in it"
