"""What `/openapi.json` says about the Gemini routes. By hand, but for the bounds of numbers."""

from __future__ import annotations

from typing import Any

from steno_proxy.dialects import bounds
from steno_proxy.dialects.bounds import schema
from steno_proxy.dialects.operations import OBJECT, STRING, json, operation

_PART: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": STRING,
        "inlineData": {
            "type": "object",
            "properties": {"mimeType": {"type": "string", "pattern": "^image/"}, "data": STRING},
            "required": ["mimeType", "data"],
        },
        "fileData": {
            "type": "object",
            "properties": {"mimeType": {"type": "string", "pattern": "^image/"}, "fileUri": STRING},
            "required": ["fileUri"],
        },
        "thought": {"type": "boolean"},
        "thoughtSignature": STRING,
        "functionCall": {
            "type": "object",
            "properties": {"id": STRING, "name": {"type": "string", "minLength": 1}, "args": OBJECT},
            "required": ["name"],
        },
        "functionResponse": {
            "type": "object",
            "properties": {"id": STRING, "name": STRING, "response": OBJECT},
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
        "parts": {"type": "array", "items": {"type": "object", "properties": {"text": STRING}, "required": ["text"]}}
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
        "stopSequences": {"type": "array", "items": STRING, "maxItems": 16},
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
        "description": STRING,
        "parametersJsonSchema": OBJECT,
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
            "properties": {"code": {"type": "integer"}, "message": STRING, "status": STRING},
            "required": ["code", "message", "status"],
        }
    },
    "required": ["error"],
}
_ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"candidates": {"type": "array"}, "usageMetadata": OBJECT, "modelVersion": STRING},
    "required": ["candidates", "usageMetadata"],
}
_MODELS: dict[str, Any] = {"type": "object", "properties": {"models": {"type": "array"}}, "required": ["models"]}


GENERATE = operation(
    "gemini_generate_content", "Gemini", json(_ANSWER), error=_ERROR, body=_REQUEST, answer="The answer."
)
STREAM = operation(
    "gemini_stream_generate_content",
    "Gemini, streamed",
    # Usage comes with the last of them only.
    {"text/event-stream": {}, **json({"type": "array", "items": _ANSWER | {"required": ["candidates"]}})},
    error=_ERROR,
    body=_REQUEST,
    answer="Server-sent events with `alt=sse`, else a JSON array.",
)
COUNT = operation(
    "gemini_count_tokens",
    "How many tokens a prompt has; never recorded",
    json({"type": "object", "properties": {"totalTokens": {"type": "integer"}}, "required": ["totalTokens"]}),
    error=_ERROR,
    body={"type": "object", "properties": {"contents": _REQUEST["properties"]["contents"]}, "required": ["contents"]},
    answer="The count.",
)
MODELS = operation(
    "gemini_list_models", "What the workers serve", json(_MODELS), error=_ERROR, answer="Google's list of models."
)
