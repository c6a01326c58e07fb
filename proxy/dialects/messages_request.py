"""Anthropic Messages, the request: blocks to canonical messages.

What the blocks of one message become:

    user       text -> one user message; each tool_result -> a tool message of its own, in the order they stand in
    assistant  one message: texts -> content, thinking -> reasoning, tool_use -> tool calls (`input` as JSON)
    system     the field comes first; `role: system` in the middle stays where it is

Clients echo our turns in other clothes (a moved `cache_control`, a list of one text for a string, parsed tool input, no
whitespace-only texts, another billing header): all of that ends here or in `sessions/normalise.py`, so that the echo is
recognised. A block of a type that is not known is left out and named in `dropped`; images and binary documents are refused.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from proxy.contracts.canonical import CanonicalRequest, Job, Message, ResponseFormat, Sampling, Tool
from proxy.contracts.errors import BadRequest
from proxy.dialects.base import check_range, check_wire

MAX_TOKENS = 2**31 - 1
MAX_STOP_SEQUENCES = 64
BILLING_HEADER = "x-anthropic-billing-header:"
"""How the first system block of Claude Code begins: a word to the provider, whose hash changes between conversations."""
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stop_sequences")
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""The provider's words for effort, as the templates that know `reasoning_effort` spell them."""
_IMAGES = frozenset({"image", "video", "audio"})
_REDACTED = frozenset({"redacted_thinking"})
ERROR_PREFIX = "Error: "
"""Before the text of a tool result with `is_error`, unless it says so itself: templates know no such mark."""


class MessageBody(msgspec.Struct):
    role: str
    content: str | list[Any] | None = None


class Body(msgspec.Struct):
    """What is read of a request; unknown fields are ignored, null counts as absent."""

    messages: list[MessageBody]
    model: str | None = None
    system: str | list[Any] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


def canonical(body: Body, *, complete: bool = True) -> CanonicalRequest:
    """Args: complete: an answer is wanted; False: only what the prompt is made of counts (`count_tokens`).

    Raises: BadRequest naming the field.
    """
    if not body.messages:
        raise BadRequest("messages: at least one message is required", field="messages")
    dropped: list[str] = []
    messages = _system(body.system, dropped)
    for i, message in enumerate(body.messages):
        messages += _messages(f"messages.{i}", message, dropped)
    if complete and messages[-1]["role"] == "assistant":
        raise BadRequest(
            "messages: the conversation must end with a user message: an answer can't be begun for the model",
            field=f"messages.{len(body.messages) - 1}.role",
        )
    tools = [tool for i, given in enumerate(body.tools or ()) if (tool := _tool(f"tools.{i}", given, dropped))]
    choice, parallel = _tool_choice(body.tool_choice, tools)
    job = Job(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_format(body),
        template_kwargs=_template_kwargs(body),
        sampling=_sampling(body),
    )
    user = (body.metadata or {}).get("user_id")
    return CanonicalRequest(
        dialect="messages",
        model=body.model or "",
        job=job,
        asked={name: value for name in _SAMPLING if (value := getattr(body, name)) is not None},
        stream=bool(body.stream),
        user=user if isinstance(user, str) else None,
        dropped=dropped,
    )


# -- messages -------------------------------------------------------------------------------------------------------------


def _system(given: str | list[Any] | None, dropped: list[str]) -> list[Message]:
    texts = [given] if isinstance(given, str) else _texts("system", given or [], dropped)
    texts = [text for text in texts if not text.lstrip().lower().startswith(BILLING_HEADER)]
    return [{"role": "system", "content": _content(texts)}] if any(texts) else []


def _messages(path: str, given: MessageBody, dropped: list[str]) -> list[Message]:
    content: list[Any] = (
        [{"type": "text", "text": given.content}] if isinstance(given.content, str) else given.content or []
    )
    if given.role == "assistant":
        return [_assistant(f"{path}.content", content, dropped)]
    if given.role == "system":
        return [{"role": "system", "content": _content(_texts(f"{path}.content", content, dropped))}]
    if given.role != "user":
        raise BadRequest(f"{path}.role: {given.role[:40]!r} is none of the roles", field=f"{path}.role")
    return _user(f"{path}.content", content, dropped)


def _user(path: str, content: list[Any], dropped: list[str]) -> list[Message]:
    """Tool results apart from texts, in their order. Texts that stand together are one message."""
    messages: list[Message] = []
    texts: list[str] = []
    for j, block in enumerate(content):
        if _type(f"{path}.{j}", block) == "tool_result":
            if any(texts):
                messages.append({"role": "user", "content": _content(texts)})
            texts = []
            messages.append(_tool_result(f"{path}.{j}", block, dropped))
        else:
            texts += _text(f"{path}.{j}", block, dropped)
    if any(texts) or not messages:
        messages.append({"role": "user", "content": _content(texts)})
    return messages


def _tool_result(path: str, block: dict[str, Any], dropped: list[str]) -> Message:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str) or not call_id:
        raise BadRequest(f"{path}.tool_use_id is required", field=f"{path}.tool_use_id")
    given = block.get("content")
    if isinstance(given, str):
        texts = [given]
    elif given is None:
        texts = []
    elif isinstance(given, list):
        texts = _texts(f"{path}.content", given, dropped)
    else:
        raise BadRequest(f"{path}.content: expected a string or blocks", field=f"{path}.content")
    if block.get("is_error") is True and "error" not in "".join(texts)[:64].lower():
        texts = [ERROR_PREFIX + (texts[0] if texts else ""), *texts[1:]]
    return {"role": "tool", "tool_call_id": call_id, "content": _content(texts)}


def _assistant(path: str, content: list[Any], dropped: list[str]) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for j, block in enumerate(content):
        at = f"{path}.{j}"
        kind = _type(at, block)
        if kind == "thinking":
            reasoning.append(_string(f"{at}.thinking", block.get("thinking")))
        elif kind == "tool_use":
            calls.append(_tool_use(at, block))
        elif kind not in _REDACTED:
            texts += _text(at, block, dropped)
    message: Message = {"role": "assistant", "content": _content(texts)}
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


def _texts(path: str, blocks: list[Any], dropped: list[str]) -> list[str]:
    return [text for j, block in enumerate(blocks) for text in _text(f"{path}.{j}", block, dropped)]


def _text(path: str, block: Any, dropped: list[str]) -> list[str]:
    """The texts of a block: one of a text, those inside a document, none of a type that is not known."""
    kind = _type(path, block)
    if kind == "text":
        return [block if isinstance(block, str) else _string(f"{path}.text", block.get("text"))]
    if kind in _IMAGES:
        raise BadRequest(f"{path}.type: {kind!r} can't be read by this model; only text can", field=f"{path}.type")
    if kind == "document":
        return _document(path, block, dropped)
    dropped.append(kind)
    return []


def _document(path: str, block: dict[str, Any], dropped: list[str]) -> list[str]:
    given = block.get("source")
    source: dict[str, Any] = given if isinstance(given, dict) else {}
    kind = source.get("type")
    if kind == "text":
        return [_string(f"{path}.source.data", source.get("data"))]
    if kind == "content" and isinstance(content := source.get("content"), str | list):
        return [content] if isinstance(content, str) else _texts(f"{path}.source.content", content, dropped)
    raise BadRequest(f"{path}.source.type: only documents of plain text can be read", field=f"{path}.source.type")


def _type(path: str, block: Any) -> str:
    if isinstance(block, str):
        return "text"
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise BadRequest(f"{path}.type: a block must name its type", field=f"{path}.type")
    return kind


def _string(path: str, value: Any) -> str:
    if not isinstance(value, str | None):
        raise BadRequest(f"{path}: expected a string", field=path)
    return value or ""


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    """One text is itself, several are parts, none is ""."""
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return texts[0] if texts else ""


# -- tools ----------------------------------------------------------------------------------------------------------------


def _tool(path: str, given: Any, dropped: list[str]) -> Tool | None:
    """A tool of the client's own; None for those that the provider defines or runs itself."""
    if not isinstance(given, dict):
        raise BadRequest(f"{path}: expected an object", field=path)
    kind = given.get("type")
    if kind not in (None, "custom"):
        dropped.append(kind if isinstance(kind, str) else "tool")
        return None
    name, description, schema = given.get("name"), given.get("description"), given.get("input_schema")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{path}.name is required", field=f"{path}.name")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = _string(f"{path}.description", description)
    if schema is not None:
        if not isinstance(schema, dict):
            raise BadRequest(f"{path}.input_schema: expected an object", field=f"{path}.input_schema")
        check_wire(f"{path}.input_schema", schema)
        function["parameters"] = schema
    if isinstance(strict := given.get("strict"), bool):
        function["strict"] = strict
    return {"type": "function", "function": function}


def _tool_choice(given: dict[str, Any] | None, tools: list[Tool]) -> tuple[str, bool]:
    """The canonical choice, and whether parallel calls are allowed."""
    if given is None:
        return "auto", True
    kind, parallel = given.get("type"), given.get("disable_parallel_tool_use") is not True
    if kind in ("auto", "none"):
        return kind, parallel
    if kind == "any":
        if not tools:
            raise BadRequest("tool_choice is any, but there are no tools", field="tool_choice")
        return "required", parallel
    if kind == "tool":
        name = given.get("name")
        if not isinstance(name, str) or not any(tool["function"]["name"] == name for tool in tools):
            raise BadRequest("tool_choice.name names no tool that there is", field="tool_choice.name")
        return f"function:{name}", parallel
    raise BadRequest("tool_choice.type must be auto, any, tool or none", field="tool_choice.type")


# -- the rest -------------------------------------------------------------------------------------------------------------


def _format(body: Body) -> ResponseFormat:
    given = body.output_format or (body.output_config or {}).get("format")
    if given is None:
        return ResponseFormat()
    path = "output_format" if body.output_format else "output_config.format"
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(schema, dict):
        raise BadRequest(f"{path} must be a json_schema with its schema", field=path)
    check_wire(f"{path}.schema", schema)
    return ResponseFormat("json_schema", "", schema, True)


def _template_kwargs(body: Body) -> dict[str, Any]:
    """What models call thinking and effort. `adaptive` leaves it to the model, as without the field."""
    kwargs: dict[str, Any] = {}
    kind = (body.thinking or {}).get("type")
    if kind in ("enabled", "disabled"):
        kwargs["enable_thinking"] = kind == "enabled"
    effort = (body.output_config or {}).get("effort")
    if isinstance(effort, str) and effort in _EFFORTS:
        kwargs["reasoning_effort"] = _EFFORTS[effort]
    return kwargs


def _sampling(body: Body) -> Sampling:
    check_range("temperature", body.temperature, 0.0, 100.0)
    check_range("top_p", body.top_p, 0.0, 1.0)
    check_range("top_k", body.top_k, -1, MAX_TOKENS)
    check_range("max_tokens", body.max_tokens, 1, 2**63)
    if body.top_p == 0.0:
        raise BadRequest("top_p must be above 0", field="top_p")
    stops = body.stop_sequences or []
    if len(stops) > MAX_STOP_SEQUENCES:
        raise BadRequest(f"stop_sequences takes at most {MAX_STOP_SEQUENCES}", field="stop_sequences")
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        max_tokens=min(body.max_tokens, MAX_TOKENS) if body.max_tokens is not None else None,
        stop=[stop for stop in stops if stop],
    )
