"""What `/openapi.json` says about the routes of OpenAI's formats (`operations.py` says how). Bounds that are no number's are
those of `common.py`, `chat.py` and `completions.py`.
"""

from __future__ import annotations

from steno_proxy.dialects import bounds
from steno_proxy.dialects.operations import (
    BOOLEAN,
    COUNT,
    EVENTS,
    NAME,
    OBJECT,
    STRING,
    Schema,
    any_of,
    array,
    block,
    const,
    json,
    nullable,
    number,
    obj,
    one_of,
    operation,
)

_SWITCH = nullable(BOOLEAN)
_TOKEN_ID = bounds.schema(bounds.TokenId)
_STRUCTURED = {"description": "One of them. `json`: a schema.", "minProperties": 1} | obj(
    json=any_of(OBJECT, STRING), regex=STRING, choice=array(STRING, minItems=1), grammar=STRING, json_object=BOOLEAN
)
_SAMPLING: Schema = {
    "model": nullable(STRING),
    "temperature": number(bounds.Temperature),
    "top_p": number(bounds.TopP),
    "top_k": number(bounds.TopK),
    "min_p": number(bounds.MinP),
    "presence_penalty": number(bounds.Penalty),
    "frequency_penalty": number(bounds.Penalty),
    "repetition_penalty": number(bounds.RepetitionPenalty),
    "logit_bias": nullable(
        OBJECT
        | {"propertyNames": {"pattern": "^[0-9]{1,9}$"}, "additionalProperties": bounds.schema(bounds.Bias)}
        | {"maxProperties": 1024}
    ),
    "min_tokens": number(bounds.MinTokens),
    "max_tokens": number(bounds.Limit),
    "max_completion_tokens": number(bounds.Limit),
    "seed": number(bounds.Seed),
    "stop": nullable(any_of(STRING, array(STRING, maxItems=16))),
    "stop_token_ids": nullable(array(_TOKEN_ID, maxItems=128)),
    "ignore_eos": _SWITCH,
    "allowed_token_ids": nullable(array(_TOKEN_ID, minItems=1, maxItems=1024)),
    "bad_words": nullable(array(NAME | {"maxLength": 256}, maxItems=64)),
    "include_stop_str_in_output": _SWITCH,
    "skip_special_tokens": _SWITCH,
    "return_token_ids": _SWITCH,
    "structured_outputs": nullable(_STRUCTURED),
    "n": number(bounds.Choices),
    "stream": _SWITCH,
    "stream_options": nullable(obj(include_usage=_SWITCH, continuous_usage_stats=_SWITCH)),
    "user": nullable(STRING),
}

_IMAGE = {"description": "From users and tools, where the model takes images."} | block(
    "image_url", "image_url", image_url=obj("url", url=STRING, detail=nullable(STRING))
)
_FUNCTION_CALLED = obj("name arguments", name=NAME, arguments=STRING)
_MESSAGE = obj(
    "role",
    role=one_of("system", "developer", "user", "assistant", "tool"),
    content=nullable(any_of(STRING, array(any_of(block("text", "text", text=STRING), _IMAGE)))),
    name=nullable(STRING),
    refusal=nullable(STRING),
    reasoning_content=nullable(STRING),
    reasoning=nullable(STRING),
    tool_calls=nullable(array(obj("id type function", id=STRING, type=const("function"), function=_FUNCTION_CALLED))),
    tool_call_id=nullable(STRING),
)
_FUNCTION = obj("name", name=NAME, description=nullable(STRING), parameters=nullable(OBJECT), strict=_SWITCH)
_TOOLS = nullable(array(block("function", "function", function=_FUNCTION)))
_FORMAT = obj(
    "type",
    type=one_of("text", "json_object", "json_schema"),
    json_schema=nullable(obj(name=nullable(STRING), schema=OBJECT)),
)
_CHAT_BODY = obj(
    "messages",
    **_SAMPLING,
    messages=array(_MESSAGE, minItems=1),
    tools=_TOOLS,
    tool_choice=nullable(any_of(one_of("auto", "none", "required"), OBJECT)),
    parallel_tool_calls=_SWITCH,
    response_format=nullable(_FORMAT),
    logprobs=_SWITCH,
    top_logprobs=number(bounds.TopLogprobs),
    chat_template_kwargs=nullable(OBJECT),
    reasoning_effort=nullable(STRING),
    add_generation_prompt=_SWITCH,
    continue_final_message=_SWITCH,
    include_reasoning=_SWITCH,
)
_COMPLETIONS_BODY = obj(
    "prompt",
    **_SAMPLING,
    prompt=any_of(STRING, array(_TOKEN_ID, minItems=1), array(STRING, minItems=1, maxItems=1)),
    logprobs=number(bounds.TopLogprobs),
    echo=nullable(const(False)),
    suffix=nullable(const("")),
    best_of=number(bounds.Choices),
)

_ERROR_FIELDS = obj(
    "message type param code", message=STRING, type=STRING, param=nullable(STRING), code=nullable(STRING)
)
ERROR = obj("error", error=_ERROR_FIELDS)


def _completion(name: str, summary: str, body: Schema, answer: str) -> Schema:
    content = json(obj(object=const(answer), choices=array())) | EVENTS
    said = "The completion; with `stream`, server-sent events."
    return operation(name, summary, content, error=ERROR, body=body, answer=said)


CHAT = _completion("create_chat_completion", "OpenAI Chat Completions", _CHAT_BODY, "chat.completion")
COMPLETIONS = _completion("create_completion", "OpenAI Completions", _COMPLETIONS_BODY, "text_completion")
MODELS = operation(
    "list_models", "What the workers serve", json(obj("object data")), error=ERROR, answer="OpenAI's list of models."
)
MODEL = operation(
    "retrieve_model",
    "The model that a turn gets which asks for this name; any name is served",
    json(obj("id object")),
    error=ERROR,
    answer="OpenAI's model, with what Anthropic's SDK reads.",
)


def _of_tokens(name: str, summary: str, body: Schema, **answer: Schema) -> Schema:
    content = json(obj(" ".join(answer), **answer))
    return operation(name, summary, content, error=ERROR, body=body, answer="As vLLM answers.")


TOKENIZE = _of_tokens(
    "tokenize",
    "vLLM's: the token ids of a text, or of a conversation as the model's template has it; nothing is recorded",
    obj(
        model=nullable(STRING),
        prompt=STRING,
        messages=array(_MESSAGE, minItems=1),
        tools=_TOOLS,
        add_special_tokens=_SWITCH,
        add_generation_prompt=_SWITCH,
        continue_final_message=_SWITCH,
        chat_template_kwargs=nullable(OBJECT),
        return_token_strs=_SWITCH,
    ),
    count=COUNT,
    max_model_len=COUNT,
    tokens=array(COUNT),
    token_strs=nullable(array(STRING)),
)
DETOKENIZE = _of_tokens(
    "detokenize",
    "vLLM's: the text of token ids, special tokens included; nothing is recorded",
    obj("tokens", model=nullable(STRING), tokens=array(COUNT)),
    prompt=STRING,
)
