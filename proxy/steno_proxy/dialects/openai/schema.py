"""The OpenAPI operations of OpenAI's formats: what `/openapi.json` says about the generation routes.

Written by hand beside the code that reads the bodies, since the hot path does not go through FastAPI's models. The
bounds of numbers are those that msgspec enforces (`bounds.py`), others those of `common.py`, `chat.py` and `completions.py`.
"""

from __future__ import annotations

from typing import Any

from steno_proxy.dialects import bounds
from steno_proxy.dialects.operations import OBJECT, STRING, json, nullable, operation


def _number(kind: Any) -> dict[str, Any]:
    return nullable(bounds.schema(kind))


_BOOLEAN: dict[str, Any] = nullable({"type": "boolean"})

_SAMPLING: dict[str, Any] = {
    "model": nullable(STRING),
    "temperature": _number(bounds.Temperature),
    "top_p": _number(bounds.TopP),
    "top_k": _number(bounds.TopK),
    "min_p": _number(bounds.MinP),
    "presence_penalty": _number(bounds.Penalty),
    "frequency_penalty": _number(bounds.Penalty),
    "repetition_penalty": _number(bounds.RepetitionPenalty),
    "logit_bias": nullable(
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
    "stop": nullable({"anyOf": [STRING, {"type": "array", "items": STRING, "maxItems": 16}]}),
    "stop_token_ids": nullable({"type": "array", "items": bounds.schema(bounds.TokenId), "maxItems": 128}),
    "ignore_eos": _BOOLEAN,
    "allowed_token_ids": nullable(
        {
            "type": "array",
            "items": bounds.schema(bounds.TokenId),
            "minItems": 1,
            "maxItems": 1024,
        }
    ),
    "bad_words": nullable(
        {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 256}, "maxItems": 64}
    ),
    "include_stop_str_in_output": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "return_token_ids": _BOOLEAN,
    "structured_outputs": nullable(
        {
            "description": "One of them. `json`: a schema.",
            "type": "object",
            "properties": {
                "json": {"anyOf": [OBJECT, STRING]},
                "regex": STRING,
                "choice": {"type": "array", "items": STRING, "minItems": 1},
                "grammar": STRING,
                "json_object": {"type": "boolean"},
            },
            "minProperties": 1,
        }
    ),
    "n": _number(bounds.Choices),
    "stream": _BOOLEAN,
    "stream_options": nullable(
        {"type": "object", "properties": {"include_usage": _BOOLEAN, "continuous_usage_stats": _BOOLEAN}}
    ),
    "user": nullable(STRING),
}

_CONTENT: dict[str, Any] = nullable(
    {
        "anyOf": [
            STRING,
            {
                "type": "array",
                "items": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {"type": {"const": "text"}, "text": STRING},
                            "required": ["type", "text"],
                        },
                        {
                            "description": "From users and tools, where the model takes images.",
                            "type": "object",
                            "properties": {
                                "type": {"const": "image_url"},
                                "image_url": {
                                    "type": "object",
                                    "properties": {"url": STRING, "detail": nullable(STRING)},
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
        "id": STRING,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1}, "arguments": STRING},
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
        "name": nullable(STRING),
        "reasoning_content": nullable(STRING),
        "reasoning": nullable(STRING),
        "tool_calls": nullable({"type": "array", "items": _CALL}),
        "tool_call_id": nullable(STRING),
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
                "description": nullable(STRING),
                "parameters": nullable(OBJECT),
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
        "tools": nullable({"type": "array", "items": _TOOL}),
        "tool_choice": nullable({"anyOf": [{"enum": ["auto", "none", "required"]}, OBJECT]}),
        "parallel_tool_calls": _BOOLEAN,
        "response_format": nullable(
            {
                "type": "object",
                "properties": {
                    "type": {"enum": ["text", "json_object", "json_schema"]},
                    "json_schema": nullable(
                        {"type": "object", "properties": {"name": nullable(STRING), "schema": OBJECT}}
                    ),
                },
                "required": ["type"],
            }
        ),
        "logprobs": _BOOLEAN,
        "top_logprobs": _number(bounds.TopLogprobs),
        "chat_template_kwargs": nullable(OBJECT),
        "reasoning_effort": nullable(STRING),
        "add_generation_prompt": _BOOLEAN,
        "continue_final_message": _BOOLEAN,
        "include_reasoning": _BOOLEAN,
    },
    "required": ["messages"],
}
_PROMPT: dict[str, Any] = {
    "anyOf": [
        STRING,
        {"type": "array", "minItems": 1, "items": bounds.schema(bounds.TokenId)},
        {"type": "array", "minItems": 1, "maxItems": 1, "items": STRING},
    ]
}
_COMPLETIONS_BODY: dict[str, Any] = {
    "type": "object",
    "properties": _SAMPLING
    | {
        "prompt": _PROMPT,
        "logprobs": _number(bounds.TopLogprobs),
        "echo": nullable({"const": False}),
        "suffix": nullable({"const": ""}),
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
                "message": STRING,
                "type": STRING,
                "param": nullable(STRING),
                "code": nullable(STRING),
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def _completion(name: str, summary: str, body: dict[str, Any], answer: str) -> dict[str, Any]:
    shape = {"type": "object", "properties": {"object": {"const": answer}, "choices": {"type": "array"}}}
    content = json(shape) | {"text/event-stream": {}}
    said = "The completion; with `stream`, server-sent events."
    return operation(name, summary, content, error=ERROR, body=body, answer=said)


CHAT = _completion("create_chat_completion", "OpenAI Chat Completions", _CHAT_BODY, "chat.completion")
COMPLETIONS = _completion("create_completion", "OpenAI Completions", _COMPLETIONS_BODY, "text_completion")
MODELS = operation(
    "list_models",
    "What the workers serve",
    json({"type": "object", "required": ["object", "data"]}),
    error=ERROR,
    answer="OpenAI's list of models.",
)
MODEL = operation(
    "retrieve_model",
    "The model that a turn gets which asks for this name; any name is served",
    json({"type": "object", "required": ["id", "object"]}),
    error=ERROR,
    answer="OpenAI's model, with what Anthropic's SDK reads.",
)


def _of_tokens(name: str, summary: str, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    content = json({"type": "object", "properties": answer, "required": list(answer)})
    return operation(name, summary, content, error=ERROR, body=body, answer="As vLLM answers.")


_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_IDS: dict[str, Any] = {"type": "array", "items": _COUNT}
TOKENIZE = _of_tokens(
    "tokenize",
    "vLLM's: the token ids of a text, or of a conversation as the model's template has it; nothing is recorded",
    {
        "type": "object",
        "properties": {
            "model": nullable(STRING),
            "prompt": STRING,
            "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
            "tools": nullable({"type": "array", "items": _TOOL}),
            "add_special_tokens": nullable({"type": "boolean"}),
            "add_generation_prompt": nullable({"type": "boolean"}),
            "continue_final_message": nullable({"type": "boolean"}),
            "chat_template_kwargs": nullable({"type": "object"}),
            "return_token_strs": nullable({"type": "boolean"}),
        },
    },
    {
        "count": _COUNT,
        "max_model_len": _COUNT,
        "tokens": _IDS,
        "token_strs": nullable({"type": "array", "items": STRING}),
    },
)
DETOKENIZE = _of_tokens(
    "detokenize",
    "vLLM's: the text of token ids, special tokens included; nothing is recorded",
    {
        "type": "object",
        "properties": {"model": nullable(STRING), "tokens": _IDS},
        "required": ["tokens"],
    },
    {"prompt": STRING},
)
