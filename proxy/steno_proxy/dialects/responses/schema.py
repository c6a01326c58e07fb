"""The OpenAPI operations of the Responses format, by hand like those in `dialects/openai/schema.py`. The bounds of numbers
are those that msgspec enforces (`bounds.py`).
"""

from __future__ import annotations

from typing import Any

from steno_proxy.dialects import bounds
from steno_proxy.dialects.openai.schema import ERROR
from steno_proxy.dialects.operations import OBJECT, STRING, json, nullable, operation


def _number(kind: Any) -> dict[str, Any]:
    return nullable(bounds.schema(kind))


_BOOLEAN: dict[str, Any] = nullable({"type": "boolean"})
_TEXTS: dict[str, Any] = {
    "type": "array",
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": STRING},
                "required": ["type", "text"],
            },
            {
                "description": "From users and tools, where the model takes images.",
                "type": "object",
                "properties": {
                    "type": {"const": "input_image"},
                    "image_url": STRING,
                    "detail": nullable(STRING),
                },
                "required": ["type", "image_url"],
            },
        ]
    },
}
_NAME: dict[str, Any] = {"type": "string", "minLength": 1}


def _item(kind: str, required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, "id": STRING} | properties,
        "required": ["type", *required.split()],
    }


_ROLE: dict[str, Any] = {"enum": ["user", "system", "developer", "assistant"]}
_CONTENT: dict[str, Any] = {"anyOf": [STRING, _TEXTS]}
_ITEMS: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _item("message", "role content", role=_ROLE, content=_CONTENT),
            _item("function_call", "call_id name arguments", call_id=_NAME, name=_NAME, arguments=STRING),
            _item("function_call_output", "call_id output", call_id=_NAME, output=_CONTENT),
            _item("custom_tool_call", "call_id name input", call_id=_NAME, name=_NAME, input=STRING),
            _item("custom_tool_call_output", "call_id output", call_id=_NAME, output=_CONTENT),
            _item("reasoning", "summary", summary={"type": "array", "items": OBJECT}),
        ]
    },
}
_FUNCTION = _item(
    "function", "name", name=_NAME, description=nullable(STRING), parameters=nullable(OBJECT), strict=_BOOLEAN
)
_CUSTOM = _item("custom", "name", name=_NAME, description=nullable(STRING), format=OBJECT)
_INNER: dict[str, Any] = {"type": "array", "items": {"anyOf": [_FUNCTION, _CUSTOM]}}
_BODY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "model": nullable(STRING),
        "input": {"anyOf": [{"type": "string"}, _ITEMS]},
        "instructions": nullable(STRING),
        "previous_response_id": nullable({"type": "string", "pattern": "^resp_[0-9a-f]{12}$"}),
        "store": _BOOLEAN,
        "stream": _BOOLEAN,
        "include": nullable({"type": "array", "items": STRING}),
        "tools": nullable(
            {
                "type": "array",
                "items": {"anyOf": [_FUNCTION, _CUSTOM, _item("namespace", "name tools", name=_NAME, tools=_INNER)]},
            }
        ),
        "tool_choice": nullable({"anyOf": [{"enum": ["auto", "none", "required"]}, OBJECT]}),
        "parallel_tool_calls": _BOOLEAN,
        "text": nullable(
            {
                "type": "object",
                "properties": {
                    "format": nullable(
                        {
                            "type": "object",
                            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "schema": OBJECT},
                            "required": ["type"],
                        }
                    )
                },
            }
        ),
        "reasoning": nullable(
            {"type": "object", "properties": {"effort": nullable(STRING), "summary": nullable(STRING)}}
        ),
        "max_output_tokens": _number(bounds.Limit),
        "max_tool_calls": _number(bounds.Limit),
        "temperature": _number(bounds.Temperature),
        "top_p": _number(bounds.TopP),
        "top_logprobs": _number(bounds.TopLogprobs),
        "metadata": nullable(OBJECT),
        "prompt_cache_key": nullable(STRING),
        "safety_identifier": nullable(STRING),
        "user": nullable(STRING),
    },
    "required": ["input"],
}
_RESPONSE: dict[str, Any] = {
    "type": "object",
    "properties": {"id": STRING, "object": {"const": "response"}, "output": {"type": "array"}},
    "required": ["id", "object", "status", "output"],
}


def _operation(name: str, summary: str, answer: dict[str, Any], body: dict[str, Any] | None = None) -> dict[str, Any]:
    return operation(name, summary, json(answer), error=ERROR, body=body)


RESPONSES = operation(
    "create_response",
    "OpenAI Responses",
    json(_RESPONSE) | {"text/event-stream": {}},
    error=ERROR,
    body=_BODY,
    answer="The response; with `stream`, server-sent events.",
)
COUNT = operation(
    "count_response_tokens",
    "How many tokens a request's prompt has; nothing is recorded",
    json({"type": "object", "required": ["object", "input_tokens"]}),
    error=ERROR,
    body=_BODY,
    answer="The count.",
)
COMPACT = _operation(
    "compact_response",
    "A conversation made short by the model, to go on from; a turn on record",
    {
        "type": "object",
        "properties": {"object": {"const": "response.compaction"}, "output": {"type": "array"}},
        "required": ["id", "object", "output", "usage"],
    },
    _BODY,
)
INPUT_ITEMS = _operation(
    "list_response_input_items",
    "What a stored response was an answer to",
    {
        "type": "object",
        "properties": {"object": {"const": "list"}, "data": {"type": "array"}, "has_more": {"type": "boolean"}},
        "required": ["object", "data", "has_more"],
    },
)
CANCEL = _operation("cancel_response", "Refused (400): no response runs in the background here", _RESPONSE)
STORED: dict[str, Any] = {
    "get": _operation("get_response", "A stored response", _RESPONSE),
    "delete": _operation(
        "delete_response",
        "Forget a stored response; the record of its turn stays",
        {"type": "object", "properties": {"deleted": {"const": True}}, "required": ["id", "object", "deleted"]},
    ),
}
PAGE: list[dict[str, Any]] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    {"name": "after", "in": "query", "schema": STRING},
]
RESPONSE_ID: dict[str, Any] = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^resp_[0-9a-f]{12}$"},
}
