"""The OpenAPI operations of the Messages format. Bounds of numbers are those of `bounds.py`, others those of `jobs.py`."""

from __future__ import annotations

from typing import Any

from steno_proxy.dialects import bounds

_STRING: dict[str, Any] = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object"}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _block(kind: str, **fields: dict[str, Any]) -> dict[str, Any]:
    properties = {"type": {"const": kind}, **fields}
    return {"type": "object", "properties": properties, "required": list(properties)}


_TEXT = _block("text", text=_STRING)
_TEXTS: dict[str, Any] = {"anyOf": [_STRING, {"type": "array", "items": _TEXT}]}
_IMAGE = _block(
    "image",
    source={
        "anyOf": [
            _block("base64", media_type={"type": "string", "pattern": "^image/"}, data=_STRING),
            _block("url", url=_STRING),
        ]
    },
)
_RESULT: dict[str, Any] = {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": [_TEXT, _IMAGE]}}]}
_NAME: dict[str, Any] = {"type": "string", "minLength": 1}
_TOOL_RESULT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_result"},
        "tool_use_id": _NAME,
        "content": _nullable(_RESULT),
        "is_error": _nullable({"type": "boolean"}),
    },
    "required": ["type", "tool_use_id"],
}


def _message(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    content = {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": list(blocks)}}]}
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
            _block("thinking", thinking=_STRING, signature=_STRING),
            _block("tool_use", id=_STRING, name=_NAME, input=_OBJECT),
        ),
        _message("system", _TEXT),
    ]
}
_TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "custom"},
        "name": _NAME,
        "description": _nullable(_STRING),
        "input_schema": _OBJECT,
        "strict": _nullable({"type": "boolean"}),
    },
    "required": ["name", "input_schema"],
}
_PROMPT: dict[str, Any] = {
    "model": _STRING,
    "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
    "system": _nullable(_TEXTS),
    "tools": _nullable({"type": "array", "items": _TOOL}),
    "tool_choice": _nullable(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["auto", "any", "tool", "none"]},
                "name": _STRING,
                "disable_parallel_tool_use": {"type": "boolean"},
            },
            "required": ["type"],
        }
    ),
    "thinking": _nullable(
        {"type": "object", "properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]}}, "required": ["type"]}
    ),
}
_BODY: dict[str, Any] = {
    "type": "object",
    "properties": _PROMPT
    | {
        "max_tokens": bounds.schema(bounds.Limit),
        "temperature": _nullable(bounds.schema(bounds.Temperature)),
        "top_p": _nullable(bounds.schema(bounds.TopP)),
        "top_k": _nullable(bounds.schema(bounds.TopK)),
        "stop_sequences": _nullable({"type": "array", "items": _STRING, "maxItems": 64}),
        "stream": _nullable({"type": "boolean"}),
        "metadata": _nullable(_OBJECT),
        "output_config": _nullable(_OBJECT),
    },
    "required": ["model", "messages", "max_tokens"],
}

ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": _STRING, "message": _STRING},
            "required": ["type", "message"],
        },
        "request_id": _STRING,
    },
    "required": ["type", "error"],
}


def _operation(name: str, summary: str, body: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": ["generation"],
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": "The answer; with `stream`, server-sent events.", "content": answers},
            "default": {
                "description": "Refused or failed; `retry-after` where trying again helps.",
                "content": {"application/json": {"schema": ERROR}},
            },
        },
    }


def _answer(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": {"type": "object", "properties": fields, "required": list(fields)}}}


MESSAGES = _operation(
    "create_message",
    "Anthropic Messages",
    _BODY,
    _answer(type={"const": "message"}, content={"type": "array"}, usage=_OBJECT) | {"text/event-stream": {}},
)
COUNT_TOKENS = _operation(
    "count_message_tokens",
    "Tokens of a prompt in the Messages format; nothing is generated or recorded",
    {"type": "object", "properties": _PROMPT, "required": ["model", "messages"]},
    _answer(input_tokens={"type": "integer"}),
)
