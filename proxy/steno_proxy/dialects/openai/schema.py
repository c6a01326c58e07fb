"""The OpenAPI operations of OpenAI's formats: what `/openapi.json` says about the generation routes.

Written by hand beside the code that reads the bodies, since the hot path does not go through FastAPI's models. The
bounds of numbers are those that msgspec enforces (`bounds.py`), others those of `common.py`, `chat.py` and `completions.py`.
"""

from __future__ import annotations

from typing import Any

from steno_proxy.dialects import bounds


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _number(kind: Any) -> dict[str, Any]:
    return _nullable(bounds.schema(kind))


_STRING: dict[str, Any] = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object"}
_BOOLEAN: dict[str, Any] = _nullable({"type": "boolean"})

_SAMPLING: dict[str, Any] = {
    "model": _nullable(_STRING),
    "temperature": _number(bounds.Temperature),
    "top_p": _number(bounds.TopP),
    "top_k": _number(bounds.TopK),
    "min_p": _number(bounds.MinP),
    "presence_penalty": _number(bounds.Penalty),
    "frequency_penalty": _number(bounds.Penalty),
    "repetition_penalty": _number(bounds.RepetitionPenalty),
    "logit_bias": _nullable(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": bounds.schema(bounds.Bias),
        }
    ),
    "min_tokens": _number(bounds.MinTokens),
    "max_tokens": _number(bounds.Limit),
    "max_completion_tokens": _number(bounds.Limit),
    "seed": _number(bounds.Seed),
    "stop": _nullable({"anyOf": [_STRING, {"type": "array", "items": _STRING, "maxItems": 16}]}),
    "stop_token_ids": _nullable({"type": "array", "items": bounds.schema(bounds.TokenId), "maxItems": 128}),
    "ignore_eos": _BOOLEAN,
    "allowed_token_ids": _nullable(
        {
            "type": "array",
            "items": bounds.schema(bounds.TokenId),
            "minItems": 1,
            "maxItems": 1024,
        }
    ),
    "bad_words": _nullable(
        {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 256}, "maxItems": 64}
    ),
    "include_stop_str_in_output": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "return_token_ids": _BOOLEAN,
    "structured_outputs": _nullable(
        {
            "description": "One of them. `json`: a schema.",
            "type": "object",
            "properties": {
                "json": {"anyOf": [_OBJECT, _STRING]},
                "regex": _STRING,
                "choice": {"type": "array", "items": _STRING, "minItems": 1},
                "grammar": _STRING,
                "json_object": {"type": "boolean"},
            },
            "minProperties": 1,
        }
    ),
    "n": _number(bounds.Choices),
    "stream": _BOOLEAN,
    "stream_options": _nullable(
        {"type": "object", "properties": {"include_usage": _BOOLEAN, "continuous_usage_stats": _BOOLEAN}}
    ),
    "user": _nullable(_STRING),
}

_CONTENT: dict[str, Any] = _nullable(
    {
        "anyOf": [
            _STRING,
            {
                "type": "array",
                "items": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {"type": {"const": "text"}, "text": _STRING},
                            "required": ["type", "text"],
                        },
                        {
                            "description": "From users and tools, where the model takes images.",
                            "type": "object",
                            "properties": {
                                "type": {"const": "image_url"},
                                "image_url": {
                                    "type": "object",
                                    "properties": {"url": _STRING, "detail": _nullable(_STRING)},
                                    "required": ["url"],
                                },
                            },
                            "required": ["type", "image_url"],
                        },
                    ]
                },
            },
        ]
    }
)
_CALL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": _STRING,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1}, "arguments": _STRING},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": _CONTENT,
        "name": _nullable(_STRING),
        "reasoning_content": _nullable(_STRING),
        "reasoning": _nullable(_STRING),
        "tool_calls": _nullable({"type": "array", "items": _CALL}),
        "tool_call_id": _nullable(_STRING),
    },
    "required": ["role"],
}
_TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "description": _nullable(_STRING),
                "parameters": _nullable(_OBJECT),
                "strict": _BOOLEAN,
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_CHAT_BODY: dict[str, Any] = {
    "type": "object",
    "properties": _SAMPLING
    | {
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
        "tools": _nullable({"type": "array", "items": _TOOL}),
        "tool_choice": _nullable({"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]}),
        "parallel_tool_calls": _BOOLEAN,
        "response_format": _nullable(
            {
                "type": "object",
                "properties": {
                    "type": {"enum": ["text", "json_object", "json_schema"]},
                    "json_schema": _nullable(
                        {"type": "object", "properties": {"name": _nullable(_STRING), "schema": _OBJECT}}
                    ),
                },
                "required": ["type"],
            }
        ),
        "logprobs": _BOOLEAN,
        "top_logprobs": _number(bounds.TopLogprobs),
        "chat_template_kwargs": _nullable(_OBJECT),
        "reasoning_effort": _nullable(_STRING),
        "add_generation_prompt": _BOOLEAN,
        "continue_final_message": _BOOLEAN,
        "include_reasoning": _BOOLEAN,
    },
    "required": ["messages"],
}
_PROMPT: dict[str, Any] = {
    "anyOf": [
        _STRING,
        {"type": "array", "minItems": 1, "items": bounds.schema(bounds.TokenId)},
        {"type": "array", "minItems": 1, "maxItems": 1, "items": _STRING},
    ]
}
_COMPLETIONS_BODY: dict[str, Any] = {
    "type": "object",
    "properties": _SAMPLING
    | {
        "prompt": _PROMPT,
        "logprobs": _number(bounds.TopLogprobs),
        "echo": _nullable({"const": False}),
        "suffix": _nullable({"const": ""}),
        "best_of": _number(bounds.Choices),
    },
    "required": ["prompt"],
}

ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _STRING,
                "type": _STRING,
                "param": _nullable(_STRING),
                "code": _nullable(_STRING),
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def _operation(name: str, summary: str, body: dict[str, Any], answer: str) -> dict[str, Any]:
    shape = {"type": "object", "properties": {"object": {"const": answer}, "choices": {"type": "array"}}}
    return {
        "tags": ["generation"],
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": "The completion; with `stream`, server-sent events.",
                "content": {"application/json": {"schema": shape}, "text/event-stream": {}},
            },
            "default": {
                "description": "Refused or failed; `retry-after` where trying again helps.",
                "content": {"application/json": {"schema": ERROR}},
            },
        },
    }


CHAT = _operation("create_chat_completion", "OpenAI Chat Completions", _CHAT_BODY, "chat.completion")
COMPLETIONS = _operation("create_completion", "OpenAI Completions", _COMPLETIONS_BODY, "text_completion")
MODELS: dict[str, Any] = {
    "tags": ["generation"],
    "operationId": "list_models",
    "summary": "What the workers serve",
    "responses": {
        "200": {
            "description": "OpenAI's list of models.",
            "content": {"application/json": {"schema": {"type": "object", "required": ["object", "data"]}}},
        },
        "default": {"description": "Refused.", "content": {"application/json": {"schema": ERROR}}},
    },
}

MODEL: dict[str, Any] = {
    "tags": ["generation"],
    "operationId": "retrieve_model",
    "summary": "The model that a turn gets which asks for this name; any name is served",
    "responses": {
        "200": {
            "description": "OpenAI's model, with what Anthropic's SDK reads.",
            "content": {"application/json": {"schema": {"type": "object", "required": ["id", "object"]}}},
        },
        "default": {"description": "Refused.", "content": {"application/json": {"schema": ERROR}}},
    },
}


def _of_tokens(name: str, summary: str, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": ["generation"],
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": "As vLLM answers.",
                "content": {
                    "application/json": {"schema": {"type": "object", "properties": answer, "required": list(answer)}}
                },
            },
            "default": {
                "description": "Refused or failed; `retry-after` where trying again helps.",
                "content": {"application/json": {"schema": ERROR}},
            },
        },
    }


_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_IDS: dict[str, Any] = {"type": "array", "items": _COUNT}
TOKENIZE = _of_tokens(
    "tokenize",
    "vLLM's: the token ids of a text, or of a conversation as the model's template has it; nothing is recorded",
    {
        "type": "object",
        "properties": {
            "model": _nullable(_STRING),
            "prompt": _STRING,
            "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
            "tools": _nullable({"type": "array", "items": _TOOL}),
            "add_special_tokens": _nullable({"type": "boolean"}),
            "add_generation_prompt": _nullable({"type": "boolean"}),
            "continue_final_message": _nullable({"type": "boolean"}),
            "chat_template_kwargs": _nullable({"type": "object"}),
            "return_token_strs": _nullable({"type": "boolean"}),
        },
    },
    {
        "count": _COUNT,
        "max_model_len": _COUNT,
        "tokens": _IDS,
        "token_strs": _nullable({"type": "array", "items": _STRING}),
    },
)
DETOKENIZE = _of_tokens(
    "detokenize",
    "vLLM's: the text of token ids, special tokens included; nothing is recorded",
    {
        "type": "object",
        "properties": {"model": _nullable(_STRING), "tokens": _IDS},
        "required": ["tokens"],
    },
    {"prompt": _STRING},
)
