"""What `/openapi.json` says about the Gemini routes. By hand, but for the bounds of numbers."""

from __future__ import annotations

from typing import Any

from steno_proxy.dialects import bounds
from steno_proxy.dialects.bounds import schema

_STRING: dict[str, Any] = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object"}
_PART: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": _STRING,
        "inlineData": {
            "type": "object",
            "properties": {"mimeType": {"type": "string", "pattern": "^image/"}, "data": _STRING},
            "required": ["mimeType", "data"],
        },
        "fileData": {
            "type": "object",
            "properties": {"mimeType": {"type": "string", "pattern": "^image/"}, "fileUri": _STRING},
            "required": ["fileUri"],
        },
        "thought": {"type": "boolean"},
        "thoughtSignature": _STRING,
        "functionCall": {
            "type": "object",
            "properties": {"id": _STRING, "name": {"type": "string", "minLength": 1}, "args": _OBJECT},
            "required": ["name"],
        },
        "functionResponse": {
            "type": "object",
            "properties": {"id": _STRING, "name": _STRING, "response": _OBJECT},
        },
    },
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
}
_CONTENT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "model"]},
        "parts": {"type": "array", "minItems": 1, "items": _PART},
    },
    "required": ["role", "parts"],
}
_TEXTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "parts": {"type": "array", "items": {"type": "object", "properties": {"text": _STRING}, "required": ["text"]}}
    },
    "required": ["parts"],
}


_CONFIG: dict[str, Any] = {
    "type": "object",
    "properties": {
        "temperature": schema(bounds.Temperature),
        "topP": schema(bounds.TopP),
        "topK": schema(bounds.PlainTopK),
        "maxOutputTokens": schema(bounds.Limit),
        "stopSequences": {"type": "array", "items": _STRING, "maxItems": 16},
        "candidateCount": schema(bounds.Choices),
        "seed": schema(bounds.Seed),
        "presencePenalty": schema(bounds.Penalty),
        "frequencyPenalty": schema(bounds.Penalty),
        "responseMimeType": {"enum": ["text/plain", "application/json"]},
        "responseLogprobs": {"type": "boolean"},
        "thinkingConfig": {
            "type": "object",
            "properties": {
                "includeThoughts": {"type": "boolean"},
                "thinkingBudget": schema(bounds.ThinkingBudget),
            },
        },
    },
}
_FUNCTION: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "description": _STRING,
        "parametersJsonSchema": _OBJECT,
    },
    "required": ["name"],
}
_REQUEST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "contents": {"type": "array", "minItems": 1, "items": _CONTENT},
        "systemInstruction": _TEXTS,
        "tools": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"functionDeclarations": {"type": "array", "items": _FUNCTION}},
            },
        },
        "generationConfig": _CONFIG,
    },
    "required": ["contents"],
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"code": {"type": "integer"}, "message": _STRING, "status": _STRING},
            "required": ["code", "message", "status"],
        }
    },
    "required": ["error"],
}
_ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"candidates": {"type": "array"}, "usageMetadata": _OBJECT, "modelVersion": _STRING},
    "required": ["candidates", "usageMetadata"],
}
_MODELS: dict[str, Any] = {"type": "object", "properties": {"models": {"type": "array"}}, "required": ["models"]}


def _operation(
    name: str, summary: str, body: dict[str, Any] | None, description: str, content: dict[str, Any]
) -> dict[str, Any]:
    asked = {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}} if body else {}
    return {
        "tags": ["generation"],
        "operationId": name,
        "summary": summary,
        **asked,
        "responses": {
            "200": {"description": description, "content": content},
            "default": {
                "description": "Refused or failed; `retry-after` where trying again helps.",
                "content": {"application/json": {"schema": _ERROR}},
            },
        },
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


GENERATE = _operation("gemini_generate_content", "Gemini", _REQUEST, "The answer.", _json(_ANSWER))
STREAM = _operation(
    "gemini_stream_generate_content",
    "Gemini, streamed",
    _REQUEST,
    "Server-sent events with `alt=sse`, else a JSON array.",
    # Usage comes with the last of them only.
    {"text/event-stream": {}, **_json({"type": "array", "items": _ANSWER | {"required": ["candidates"]}})},
)
COUNT = _operation(
    "gemini_count_tokens",
    "How many tokens a prompt has; never recorded",
    {"type": "object", "properties": {"contents": _REQUEST["properties"]["contents"]}, "required": ["contents"]},
    "The count.",
    _json({"type": "object", "properties": {"totalTokens": {"type": "integer"}}, "required": ["totalTokens"]}),
)
MODELS = _operation("gemini_list_models", "What the workers serve", None, "Google's list of models.", _json(_MODELS))
