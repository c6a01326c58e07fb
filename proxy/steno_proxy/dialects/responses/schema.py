"""The OpenAPI operations of the Responses format, by hand like those in `dialects/openai/schema.py`. The bounds of numbers
are those that msgspec enforces (`bounds.py`).
"""

from __future__ import annotations

from typing import Any

from steno_proxy.dialects import bounds
from steno_proxy.dialects.openai.schema import ERROR

_STRING: dict[str, Any] = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object"}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _number(kind: Any) -> dict[str, Any]:
    return _nullable(bounds.schema(kind))


_BOOLEAN: dict[str, Any] = _nullable({"type": "boolean"})
_TEXTS: dict[str, Any] = {
    "type": "array",
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": _STRING},
                "required": ["type", "text"],
            },
            {
                "description": "From users and tools, where the model takes images.",
                "type": "object",
                "properties": {
                    "type": {"const": "input_image"},
                    "image_url": _STRING,
                    "detail": _nullable(_STRING),
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
        "properties": {"type": {"const": kind}, "id": _STRING} | properties,
        "required": ["type", *required.split()],
    }


_ROLE: dict[str, Any] = {"enum": ["user", "system", "developer", "assistant"]}
_CONTENT: dict[str, Any] = {"anyOf": [_STRING, _TEXTS]}
_ITEMS: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _item("message", "role content", role=_ROLE, content=_CONTENT),
            _item("function_call", "call_id name arguments", call_id=_NAME, name=_NAME, arguments=_STRING),
            _item("function_call_output", "call_id output", call_id=_NAME, output=_CONTENT),
            _item("custom_tool_call", "call_id name input", call_id=_NAME, name=_NAME, input=_STRING),
            _item("custom_tool_call_output", "call_id output", call_id=_NAME, output=_CONTENT),
            _item("reasoning", "summary", summary={"type": "array", "items": _OBJECT}),
        ]
    },
}
_FUNCTION = _item(
    "function", "name", name=_NAME, description=_nullable(_STRING), parameters=_nullable(_OBJECT), strict=_BOOLEAN
)
_CUSTOM = _item("custom", "name", name=_NAME, description=_nullable(_STRING), format=_OBJECT)
_INNER: dict[str, Any] = {"type": "array", "items": {"anyOf": [_FUNCTION, _CUSTOM]}}
_BODY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "model": _nullable(_STRING),
        "input": {"anyOf": [{"type": "string"}, _ITEMS]},
        "instructions": _nullable(_STRING),
        "previous_response_id": _nullable({"type": "string", "pattern": "^resp_[0-9a-f]{12}$"}),
        "store": _BOOLEAN,
        "stream": _BOOLEAN,
        "include": _nullable({"type": "array", "items": _STRING}),
        "tools": _nullable(
            {
                "type": "array",
                "items": {"anyOf": [_FUNCTION, _CUSTOM, _item("namespace", "name tools", name=_NAME, tools=_INNER)]},
            }
        ),
        "tool_choice": _nullable({"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]}),
        "parallel_tool_calls": _BOOLEAN,
        "text": _nullable(
            {
                "type": "object",
                "properties": {
                    "format": _nullable(
                        {
                            "type": "object",
                            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "schema": _OBJECT},
                            "required": ["type"],
                        }
                    )
                },
            }
        ),
        "reasoning": _nullable(
            {"type": "object", "properties": {"effort": _nullable(_STRING), "summary": _nullable(_STRING)}}
        ),
        "max_output_tokens": _number(bounds.Limit),
        "max_tool_calls": _number(bounds.Limit),
        "temperature": _number(bounds.Temperature),
        "top_p": _number(bounds.TopP),
        "top_logprobs": _number(bounds.TopLogprobs),
        "metadata": _nullable(_OBJECT),
        "prompt_cache_key": _nullable(_STRING),
        "safety_identifier": _nullable(_STRING),
        "user": _nullable(_STRING),
    },
    "required": ["input"],
}
_RESPONSE: dict[str, Any] = {
    "type": "object",
    "properties": {"id": _STRING, "object": {"const": "response"}, "output": {"type": "array"}},
    "required": ["id", "object", "status", "output"],
}
_REFUSED: dict[str, Any] = {
    "description": "Refused or failed; `retry-after` where trying again helps.",
    "content": {"application/json": {"schema": ERROR}},
}


def _operation(name: str, summary: str, answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": ["generation"],
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": {"application/json": {"schema": answer}}},
            "default": _REFUSED,
        },
    }


RESPONSES: dict[str, Any] = {
    "tags": ["generation"],
    "operationId": "create_response",
    "summary": "OpenAI Responses",
    "requestBody": {"required": True, "content": {"application/json": {"schema": _BODY}}},
    "responses": {
        "200": {
            "description": "The response; with `stream`, server-sent events.",
            "content": {"application/json": {"schema": _RESPONSE}, "text/event-stream": {}},
        },
        "default": _REFUSED,
    },
}
COUNT: dict[str, Any] = {
    "tags": ["generation"],
    "operationId": "count_response_tokens",
    "summary": "How many tokens a request's prompt has; nothing is recorded",
    "requestBody": RESPONSES["requestBody"],
    "responses": {
        "200": {
            "description": "The count.",
            "content": {"application/json": {"schema": {"type": "object", "required": ["object", "input_tokens"]}}},
        },
        "default": _REFUSED,
    },
}
COMPACT: dict[str, Any] = _operation(
    "compact_response",
    "A conversation made short by the model, to go on from; a turn on record",
    {
        "type": "object",
        "properties": {"object": {"const": "response.compaction"}, "output": {"type": "array"}},
        "required": ["id", "object", "output", "usage"],
    },
) | {"requestBody": RESPONSES["requestBody"]}
INPUT_ITEMS: dict[str, Any] = _operation(
    "list_response_input_items",
    "What a stored response was an answer to",
    {
        "type": "object",
        "properties": {"object": {"const": "list"}, "data": {"type": "array"}, "has_more": {"type": "boolean"}},
        "required": ["object", "data", "has_more"],
    },
)
CANCEL: dict[str, Any] = _operation(
    "cancel_response", "Refused (400): no response runs in the background here", _RESPONSE
)
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
    {"name": "after", "in": "query", "schema": _STRING},
]
RESPONSE_ID: dict[str, Any] = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^resp_[0-9a-f]{12}$"},
}
