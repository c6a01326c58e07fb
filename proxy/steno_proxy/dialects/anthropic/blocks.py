"""Anthropic Messages, its blocks -> canonical messages.

What the blocks of one message become:

    user       texts, images -> one user message; each tool_result -> a tool message of its own, in the order they stand in
    assistant  one message: texts -> content, thinking -> reasoning, tool_use -> tool calls (`input` as JSON)
    system     the field comes first; `role: system` in the middle stays where it is, unless it only adds or removes tools

Clients echo our turns in other clothes (a moved `cache_control`, a list of one text for a string, parsed tool input, no
whitespace-only texts, LiteLLM's words in place of an empty one, another billing header): all of that ends here or in
`sessions/messages/normalise.py`, so that the echo is recognised. A block of a type that is not known is left out and named in
`SeenParts.dropped`; binary documents, audio and video are refused, as are images outside of user messages and tool results.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from steno.contracts.chat import EMPTY_TEXT, Message, after_billing_headers
from steno.contracts.errors import BadRequest
from steno_proxy.dialects.anthropic.offers import CHANGES, OfferedTools
from steno_proxy.dialects.parts import Part, SeenParts, content_of, data_url, says_nothing, text_part
from steno_proxy.dialects.refusals import must_be

_UNREADABLE = frozenset({"video", "audio"})
_REDACTED = frozenset({"redacted_thinking"})
FOUND = "Tools that can be called now: "
"""In the result of a tool search, this text precedes the names of the tools found. The list of tools defines them."""
ERROR_PREFIX = "Error: "
"""Put before the text of a tool result with `is_error`, unless the text already says it: templates have no such field."""


class MessageBody(msgspec.Struct):
    role: str
    content: str | list[Any] | None = None


def system_of(given: str | list[Any] | None, seen: SeenParts) -> list[Message]:
    texts = [given] if isinstance(given, str) else _texts("system", given or [], seen)
    # A text of nothing but billing headers goes as a whole, with the space after them.
    texts = [rest for text in texts if (rest := after_billing_headers(text)) == text or rest.strip()]
    return [{"role": "system", "content": content_of([text_part(text) for text in texts])}] if any(texts) else []


def messages_of(path: str, given: MessageBody, seen: SeenParts, offered: OfferedTools) -> list[Message]:
    content: list[Any] = (
        [{"type": "text", "text": given.content}] if isinstance(given.content, str) else given.content or []
    )
    if given.role == "assistant":
        return [_assistant(f"{path}.content", content, seen)]
    if given.role == "system":
        return _system(f"{path}.content", content, seen, offered)
    if given.role != "user":
        raise BadRequest(
            f"{path}.role: got {given.role[:40]!r}, must be one of user, assistant, system", field=f"{path}.role"
        )
    return _user(f"{path}.content", content, seen, offered)


def _system(path: str, content: list[Any], seen: SeenParts, offered: OfferedTools) -> list[Message]:
    """The system message; [] if its blocks only add or remove tools."""
    texts: list[str] = []
    for j, block in enumerate(content):
        if _type(f"{path}.{j}", block) in CHANGES:
            offered.change(f"{path}.{j}", block)
        else:
            texts += _text(f"{path}.{j}", block, seen)
    return [{"role": "system", "content": content_of([text_part(text) for text in texts])}] if any(texts) else []


def _user(path: str, content: list[Any], seen: SeenParts, offered: OfferedTools) -> list[Message]:
    """One message per tool result; neighbouring texts and images are one user message. The order of the blocks is kept."""
    messages: list[Message] = []
    parts: list[Part] = []
    for j, block in enumerate(content):
        if _type(f"{path}.{j}", block) == "tool_result":
            if not says_nothing(parts):
                messages.append({"role": "user", "content": content_of(parts)})
            parts = []
            messages.append(_tool_result(f"{path}.{j}", block, seen, offered))
        else:
            parts += _parts(f"{path}.{j}", block, seen)
    if not says_nothing(parts) or not messages:
        messages.append({"role": "user", "content": content_of(parts)})
    return messages


def _tool_result(path: str, block: dict[str, Any], seen: SeenParts, offered: OfferedTools) -> Message:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str) or not call_id:
        raise BadRequest(f"{path}.tool_use_id is required", field=f"{path}.tool_use_id")
    given = block.get("content")
    if isinstance(given, str):
        parts = [text_part(given)]
    elif given is None:
        parts = []
    elif isinstance(given, list):
        parts = _result(f"{path}.content", given, seen, offered)
    else:
        raise must_be("a string or a list of blocks", f"{path}.content", given)
    if block.get("is_error") is True:
        parts = _as_error(parts)
    return {"role": "tool", "tool_call_id": call_id, "content": content_of(parts)}


def _result(path: str, content: list[Any], seen: SeenParts, offered: OfferedTools) -> list[Part]:
    """What a tool answered. The tools that a search found are one text, with their names."""
    parts: list[Part] = []
    found: list[str] = []
    for j, block in enumerate(content):
        if _type(f"{path}.{j}", block) == "tool_reference":
            found.append(offered.found(f"{path}.{j}", block))
        else:
            parts += _parts(f"{path}.{j}", block, seen)
    return [*parts, text_part(FOUND + ", ".join(found))] if found else parts


def _as_error(parts: list[Part]) -> list[Part]:
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if "error" in "".join(texts)[:64].lower():
        return parts
    if parts and parts[0]["type"] == "text":
        return [text_part(ERROR_PREFIX + parts[0]["text"]), *parts[1:]]
    return [text_part(ERROR_PREFIX), *parts]


def _assistant(path: str, content: list[Any], seen: SeenParts) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for j, block in enumerate(content):
        at = f"{path}.{j}"
        kind = _type(at, block)
        if kind == "thinking":
            reasoning.append(string(f"{at}.thinking", block.get("thinking")))
        elif kind == "tool_use":
            calls.append(_tool_use(at, block))
        elif kind not in _REDACTED:
            texts += [text for text in _text(at, block, seen) if text != EMPTY_TEXT]
    message: Message = {"role": "assistant", "content": content_of([text_part(text) for text in texts])}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(path: str, block: dict[str, Any]) -> dict[str, Any]:
    name = block.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{path}.name is required", field=f"{path}.name")
    given = block.get("input")
    arguments = given if isinstance(given, str) else _json(given if given is not None else {})
    return {"id": str(block.get("id") or ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except OverflowError:  # integers beyond 64 bits, which JSON may hold
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _texts(path: str, blocks: list[Any], seen: SeenParts) -> list[str]:
    return [text for j, block in enumerate(blocks) for text in _text(f"{path}.{j}", block, seen)]


def _parts(path: str, block: Any, seen: SeenParts) -> list[Part]:
    """What a block of a user message or a tool result holds: its image, else its texts."""
    if _type(path, block) == "image":
        return [_image(path, block, seen)]
    return [text_part(text) for text in _text(path, block, seen)]


def _image(path: str, block: dict[str, Any], seen: SeenParts) -> Part:
    source = block.get("source")
    path = f"{path}.source"
    if not isinstance(source, dict):
        raise must_be("an object", path, source)
    kind = source.get("type")
    if kind == "base64":
        return seen.image(path, data_url(path, source.get("media_type"), source.get("data")))
    if kind == "url":
        return seen.image(path, source.get("url"))
    raise must_be("base64 or url (the proxy stores no files)", f"{path}.type", kind)


def _text(path: str, block: Any, seen: SeenParts) -> list[str]:
    """The texts of a block: one of a text, those inside a document or a search result, none of a type that is not known."""
    kind = _type(path, block)
    if kind == "text":
        return [block if isinstance(block, str) else string(f"{path}.text", block.get("text"))]
    if kind == "image":
        raise BadRequest(
            f"{path}.type: images are allowed only in user messages and tool results", field=f"{path}.type"
        )
    if kind in _UNREADABLE:
        raise BadRequest(f"{path}.type: {kind!r} blocks are not supported", field=f"{path}.type")
    if kind == "document":
        return _document(path, block, seen)
    if kind == "search_result":
        return _search_result(path, block, seen)
    seen.dropped.append(kind)
    return []


def _document(path: str, block: dict[str, Any], seen: SeenParts) -> list[str]:
    given = block.get("source")
    source: dict[str, Any] = given if isinstance(given, dict) else {}
    kind = source.get("type")
    if kind == "text":
        return [string(f"{path}.source.data", source.get("data"))]
    if kind == "content" and isinstance(content := source.get("content"), str | list):
        path = f"{path}.source.content"
        inner = [content] if isinstance(content, str) else content
        for j, one in enumerate(inner):
            if isinstance(one, dict) and one.get("type") == "document":
                at = f"{path}.{j}.type"
                raise BadRequest(f"{at}: a document must not contain a document", field=at)
        return _texts(path, inner, seen)
    raise must_be("text or content: other documents are not supported", f"{path}.source.type", kind)


def _search_result(path: str, block: dict[str, Any], seen: SeenParts) -> list[str]:
    """The texts of a search result of the client: title and source are the first text, then come the found texts."""
    named = [string(f"{path}.{key}", block.get(key)) for key in ("title", "source")]
    content = block.get("content")
    if not isinstance(content, list):
        raise must_be("a list of text blocks", f"{path}.content", content)
    for j, one in enumerate(content):
        if _type(at := f"{path}.content.{j}", one) != "text":
            raise BadRequest(f"{at}.type: a search_result holds text blocks only", field=f"{at}.type")
    return ["\n".join(name for name in named if name) + "\n", *_texts(f"{path}.content", content, seen)]


def _type(path: str, block: Any) -> str:
    if isinstance(block, str):
        return "text"
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise BadRequest(f"{path}.type is required, as a string", field=f"{path}.type")
    return kind


def string(path: str, value: Any) -> str:
    if not isinstance(value, str | None):
        raise must_be("a string", path, value)
    return value or ""
