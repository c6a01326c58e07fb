"""The OpenAPI operations of the Messages format. Bounds of numbers are those of `bounds.py`, others those of `jobs.py`."""

from __future__ import annotations

from typing import Any

from steno_proxy.dialects import bounds
from steno_proxy.dialects.operations import OBJECT, STRING, json, nullable, operation


def _block(kind: str, **fields: dict[str, Any]) -> dict[str, Any]:
    properties = {"type": {"const": kind}, **fields}
    return {"type": "object", "properties": properties, "required": list(properties)}


_TEXT = _block("text", text=STRING)
_TEXTS: dict[str, Any] = {"anyOf": [STRING, {"type": "array", "items": _TEXT}]}
_IMAGE = _block(
    "image",
    source={
        "anyOf": [
            _block("base64", media_type={"type": "string", "pattern": "^image/"}, data=STRING),
            _block("url", url=STRING),
        ]
    },
)
_RESULT: dict[str, Any] = {"anyOf": [STRING, {"type": "array", "items": {"anyOf": [_TEXT, _IMAGE]}}]}
_NAME: dict[str, Any] = {"type": "string", "minLength": 1}
_TOOL_RESULT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_result"},
        "tool_use_id": _NAME,
        "content": nullable(_RESULT),
        "is_error": nullable({"type": "boolean"}),
    },
    "required": ["type", "tool_use_id"],
}


def _message(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    content = {"anyOf": [STRING, {"type": "array", "items": {"anyOf": list(blocks)}}]}
    return {
        "type": "object",
        "properties": {"role": {"const": role}, "content": content},
        "required": ["role", "content"],
    }


_MESSAGE: dict[str, Any] = {
    "anyOf": [
        _message("user", _TEXT, _IMAGE, _TOOL_RESULT),
        _message(
            "assistant",
            _TEXT,
            _block("thinking", thinking=STRING, signature=STRING),
            _block("tool_use", id=STRING, name=_NAME, input=OBJECT),
        ),
        _message("system", _TEXT),
    ]
}
_TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "custom"},
        "name": _NAME,
        "description": nullable(STRING),
        "input_schema": OBJECT,
        "strict": nullable({"type": "boolean"}),
    },
    "required": ["name", "input_schema"],
}
_PROMPT: dict[str, Any] = {
    "model": STRING,
    "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
    "system": nullable(_TEXTS),
    "tools": nullable({"type": "array", "items": _TOOL}),
    "tool_choice": nullable(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["auto", "any", "tool", "none"]},
                "name": STRING,
                "disable_parallel_tool_use": {"type": "boolean"},
            },
            "required": ["type"],
        }
    ),
    "thinking": nullable(
        {"type": "object", "properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]}}, "required": ["type"]}
    ),
}
_BODY: dict[str, Any] = {
    "type": "object",
    "properties": _PROMPT
    | {
        "max_tokens": bounds.schema(bounds.Limit),
        "temperature": nullable(bounds.schema(bounds.Temperature)),
        "top_p": nullable(bounds.schema(bounds.TopP)),
        "top_k": nullable(bounds.schema(bounds.TopK)),
        "stop_sequences": nullable({"type": "array", "items": STRING, "maxItems": 64}),
        "stream": nullable({"type": "boolean"}),
        "metadata": nullable(OBJECT),
        "output_config": nullable(OBJECT),
    },
    "required": ["model", "messages", "max_tokens"],
}

ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": STRING, "message": STRING},
            "required": ["type", "message"],
        },
        "request_id": STRING,
    },
    "required": ["type", "error"],
}


def _answer(**fields: dict[str, Any]) -> dict[str, Any]:
    return json({"type": "object", "properties": fields, "required": list(fields)})


_SAID = "The answer; with `stream`, server-sent events."
MESSAGES = operation(
    "create_message",
    "Anthropic Messages",
    _answer(type={"const": "message"}, content={"type": "array"}, usage=OBJECT) | {"text/event-stream": {}},
    error=ERROR,
    body=_BODY,
    answer=_SAID,
)
COUNT_TOKENS = operation(
    "count_message_tokens",
    "Tokens of a prompt in the Messages format; nothing is generated or recorded",
    _answer(input_tokens={"type": "integer"}),
    error=ERROR,
    body={"type": "object", "properties": _PROMPT, "required": ["model", "messages"]},
    answer=_SAID,
)
