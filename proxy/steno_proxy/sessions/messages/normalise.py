"""Digests that are equal when two messages are the same message, however a client happened to write it back.

Clients change a history in ways that mean nothing, and each of them has been seen. Two messages get one digest when they
differ only in:

    content        a string or text parts (merged); null, "" and absent; parts of nothing but whitespace; in a reply, what LiteLLM
                   puts there for that (EMPTY_TEXT)
    tool calls     the spelling of the arguments' JSON: key order, spaces, 1.0 for 1, the digits an integer above 2**53
                   loses in a double, `{"__unparsedToolInput": raw}` for raw, "" for {}; text that is no JSON is stripped, and of
                   a long one the first 2,000 characters count, since the wrapped `{"raw": …, "len": …}` holds no more
    ids            those of assistant messages and calls; of tool results, unless the id is ours (clients keep those, and it
                   names the very turn that asked)
    the rest       reasoning, `name`, `cache_control`, provider fields; the billing header some put before a system prompt

Everything else counts, to the byte: role, order, tool names, and all other whitespace, leading and trailing too, since a
sampled token may be what it came from. What a client makes of a reply beyond this is told by the reply itself (`echoes.py`).

A message digest is one byte for the role and 15 of blake2b, so that a tree built from digests alone still knows who spoke.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from steno.contracts.chat import EMPTY_TEXT, Message, Tool, after_billing_headers
from steno_proxy.sessions.messages.call_ids import parse_call_id

DIGEST_BYTES = 16
SYSTEM, USER, ASSISTANT, TOOL, OTHER = (ord(letter) for letter in "suato")
"""First byte of a message digest."""

_ROLES = {"system": b"s", "developer": b"s", "user": b"u", "assistant": b"a", "tool": b"t"}
_EXACT_INTEGERS = 2**53 - 1
"""JavaScript's MAX_SAFE_INTEGER: the next integer is the same double as the one after it."""
_KEPT_UNITS, _COMPARED_UNITS = 2048, 2000
"""Claude Code 2.1 sends back so many UTF-16 code units of a tool input that is no JSON, give or take half a character."""
_LONG_DIGITS = re.compile(r"[0-9]{16}")
_THINKING = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text"})
# 0xff occurs in no UTF-8 text, so it can't be forged by content.
_SEP = b"\xff"


def message_digest(message: Message) -> bytes:
    """16 bytes: the role's letter and blake2b-15 of what of the message counts (see the module's docstring).

    Accepts canonical messages, and the looser shapes they come from (null content, arguments absent).
    """
    role = _ROLES.get(message.get("role", ""), b"o")
    content = message.get("content")
    if type(content) is str and role != b"s":
        empty = content.isspace() or (content == EMPTY_TEXT and role == b"a")
        data = b"" if empty else _utf8(content)
    else:
        data = _content(content, system=role == b"s")
    if role == b"a":
        calls = message.get("tool_calls")
        if calls:
            data += b"".join(map(_call, calls))
    elif role == b"t":
        named = parse_call_id(message.get("tool_call_id") or "")
        if named is not None:
            data += b"\xff%b_%d" % (named[0].encode(), named[1])
    elif role == b"o":
        data = _utf8(str(message.get("role"))) + _SEP + data
    return role + blake2b(data, digest_size=15).digest()


def tools_digest(tools: Sequence[Tool] | None) -> bytes:
    """8 bytes of blake2b. No tools and an empty list are equal; order counts, since templates render tools in order."""
    return _digest8([_without_marks(tool) for tool in tools or ()])


def options_digest(options: dict[str, Any] | None) -> bytes:
    """8 bytes of blake2b over whatever else changes how a conversation is rendered (`template_kwargs`).

    None values, empty mappings and absent keys are equal.
    """
    return _digest8({key: value for key, value in (options or {}).items() if value is not None and value != {}})


def same_value(one: Any, other: Any) -> bool:
    """Whether two values of arguments are one, however their JSON is spelled."""
    return _arguments([one]) == _arguments([other])


def _digest8(value: Any) -> bytes:
    return blake2b(msgspec.json.encode(value, order="sorted"), digest_size=8).digest()


def _without_marks(tool: Tool) -> Tool:
    kept = {key: value for key, value in tool.items() if value is not None and key != "cache_control"}
    function = kept.get("function")
    if isinstance(function, dict):
        kept["function"] = {k: v for k, v in function.items() if v is not None and k != "cache_control"}
    return kept


def _utf8(text: str) -> bytes:
    # surrogatepass: JSON may hold half a surrogate pair, and a client's odd text must not be an error here.
    return text.encode("utf-8", "surrogatepass")


def _content(content: Any, *, system: bool) -> bytes:
    if content is None:
        return b""
    if isinstance(content, str):
        return _utf8(_text(content, system))
    merged: list[bytes] = []
    for part in content:
        if isinstance(part, str):
            merged.append(_utf8(_text(part, system)))
        elif isinstance(part.get("text"), str) and part.get("type") not in _THINKING:
            merged.append(_utf8(_text(part["text"], system)))
        elif part.get("type") not in _THINKING:
            merged.append(_SEP + _other_part(part) + _SEP)
    return b"".join(merged)


def _other_part(part: dict[str, Any]) -> bytes:
    """An image by the digest of its URL, in which its pixels are; anything else as it is."""
    if part.get("type") == "image_url" and isinstance(image := part.get("image_url"), dict):
        digest = blake2b(_utf8(str(image.get("url"))), digest_size=32).digest()
        return b"image:" + digest + _utf8(str(image.get("detail") or ""))
    bare = {key: value for key, value in part.items() if key != "cache_control"}
    return msgspec.json.encode(bare, order="sorted")


def _text(text: str, system: bool) -> str:
    if system:
        text = after_billing_headers(text)
    return "" if text.isspace() else text


def _call(call: dict[str, Any]) -> bytes:
    function = call.get("function") or {}
    return _SEP + _utf8(function.get("name") or "") + _SEP + _arguments(function.get("arguments"))


def _arguments(arguments: Any) -> bytes:
    """Arguments as bytes that are equal for equal arguments: `{` sorted JSON, or `!` and stripped text."""
    if not isinstance(arguments, str):
        return b"{" + msgspec.json.encode(_loose(arguments if arguments is not None else {}), order="sorted")
    if not arguments or arguments.isspace():
        return b"{{}"
    try:
        value = _decoder.decode(arguments)
        if _LONG_DIGITS.search(arguments):
            value = _loose(value)
        if type(value) is dict and len(value) == 1 and (raw := value.get("__unparsedToolInput")) is not None:
            if isinstance(raw, str):
                return _arguments(raw)
            if isinstance(raw, dict) and isinstance(raw.get("raw"), str) and isinstance(raw.get("len"), int):
                return _no_json(raw["raw"], raw["len"])
        return b"{" + msgspec.json.encode(value, order="sorted")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return _no_json(arguments, _utf16_length(arguments))


def _no_json(text: str, length: int) -> bytes:
    """Arguments that are no JSON. text: the whole, or its beginning. length: of the whole, in UTF-16 code units."""
    text = text.strip()
    if length <= _KEPT_UNITS:
        return b"!" + _utf8(text)
    return b"!!" + text.encode("utf-16-le", "surrogatepass")[: 2 * _COMPARED_UNITS]


def _utf16_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def _number(text: str) -> int | float:
    """A JSON number with a point or an exponent, as JavaScript would write it back."""
    return _loose_number(float(text))


def _loose_number(value: int | float) -> int | float:
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _EXACT_INTEGERS else value
    if abs(value) <= _EXACT_INTEGERS:
        return value
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _loose(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _loose(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_loose(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _loose_number(value)
    return value


_decoder = msgspec.json.Decoder(float_hook=_number)
