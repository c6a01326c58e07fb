"""What `/openapi.json` says about the routes of the Messages format (`operations.py` says how). Bounds that are no number's are
those of `jobs.py`.
"""

from __future__ import annotations

from steno_proxy.dialects import bounds
from steno_proxy.dialects.operations import (
    BOOLEAN,
    EVENTS,
    IMAGE_TYPE,
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

_TEXT = block("text", "text", text=STRING)
_SOURCE = any_of(
    block("base64", "media_type data", media_type=IMAGE_TYPE, data=STRING), block("url", "url", url=STRING)
)
_IMAGE = block("image", "source", source=_SOURCE)
_TOOL_RESULT = block(
    "tool_result",
    "tool_use_id",
    tool_use_id=NAME,
    content=nullable(any_of(STRING, array(any_of(_TEXT, _IMAGE)))),
    is_error=nullable(BOOLEAN),
)
_THINKING = block("thinking", "thinking signature", thinking=STRING, signature=STRING)
_TOOL_USE = block("tool_use", "id name input", id=STRING, name=NAME, input=OBJECT)


def _message(role: str, *blocks: Schema) -> Schema:
    return obj("role content", role=const(role), content=any_of(STRING, array(any_of(*blocks))))


_MESSAGE = any_of(
    _message("user", _TEXT, _IMAGE, _TOOL_RESULT),
    _message("assistant", _TEXT, _THINKING, _TOOL_USE),
    _message("system", _TEXT),
)
_TOOL = obj(
    "name input_schema",
    type=const("custom"),
    name=NAME,
    description=nullable(STRING),
    input_schema=OBJECT,
    strict=nullable(BOOLEAN),
)
_CHOICE = obj("type", type=one_of("auto", "any", "tool", "none"), name=STRING, disable_parallel_tool_use=BOOLEAN)
_PROMPT: Schema = {
    "model": STRING,
    "messages": array(_MESSAGE, minItems=1),
    "system": nullable(any_of(STRING, array(_TEXT))),
    "tools": nullable(array(_TOOL)),
    "tool_choice": nullable(_CHOICE),
    "thinking": nullable(obj("type", type=one_of("enabled", "disabled", "adaptive"))),
}
_BODY = obj(
    "model messages max_tokens",
    **_PROMPT,
    max_tokens=bounds.schema(bounds.Limit),
    temperature=number(bounds.Temperature),
    top_p=number(bounds.TopP),
    top_k=number(bounds.TopK),
    stop_sequences=nullable(array(STRING, maxItems=64)),
    stream=nullable(BOOLEAN),
    metadata=nullable(OBJECT),
    output_config=nullable(OBJECT),
)

ERROR = obj(
    "type error", type=const("error"), error=obj("type message", type=STRING, message=STRING), request_id=STRING
)


def _answer(**fields: Schema) -> Schema:
    return json(obj(" ".join(fields), **fields))


_SAID = "The answer; with `stream`, server-sent events."
MESSAGES = operation(
    "create_message",
    "Anthropic Messages",
    _answer(type=const("message"), content=array(), usage=OBJECT) | EVENTS,
    error=ERROR,
    body=_BODY,
    answer=_SAID,
)
COUNT_TOKENS = operation(
    "count_message_tokens",
    "Tokens of a prompt in the Messages format; nothing is generated or recorded",
    _answer(input_tokens={"type": "integer"}),
    error=ERROR,
    body=obj("model messages", **_PROMPT),
    answer=_SAID,
)
