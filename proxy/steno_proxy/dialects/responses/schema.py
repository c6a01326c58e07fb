"""What `/openapi.json` says about the routes of the Responses format (`operations.py` says how)."""

from __future__ import annotations

from typing import Any

from steno_proxy.dialects import bounds
from steno_proxy.dialects.openai.schema import ERROR
from steno_proxy.dialects.operations import (
    BOOLEAN,
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
_RESPONSE_ID: Schema = {"type": "string", "pattern": "^resp_[0-9a-f]{12}$"}
_TEXT = obj("type text", type=one_of("input_text", "output_text"), text=STRING)
_IMAGE = {"description": "From users and tools, where the model takes images."} | block(
    "input_image", "image_url", image_url=STRING, detail=nullable(STRING)
)
_CONTENT = any_of(STRING, array(any_of(_TEXT, _IMAGE)))


def _item(kind: str, required: str, **properties: Schema) -> Schema:
    return block(kind, required, id=STRING, **properties)


_ROLE = one_of("user", "system", "developer", "assistant")
_ITEMS = any_of(
    _item("message", "role content", role=_ROLE, content=_CONTENT),
    _item("function_call", "call_id name arguments", call_id=NAME, name=NAME, arguments=STRING),
    _item("function_call_output", "call_id output", call_id=NAME, output=_CONTENT),
    _item("custom_tool_call", "call_id name input", call_id=NAME, name=NAME, input=STRING),
    _item("custom_tool_call_output", "call_id output", call_id=NAME, output=_CONTENT),
    _item("reasoning", "summary", summary=array(OBJECT)),
)
_FUNCTION = _item(
    "function", "name", name=NAME, description=nullable(STRING), parameters=nullable(OBJECT), strict=_SWITCH
)
_CUSTOM = _item("custom", "name", name=NAME, description=nullable(STRING), format=OBJECT)
_NAMESPACE = _item("namespace", "name tools", name=NAME, tools=array(any_of(_FUNCTION, _CUSTOM)))
_FORMAT = obj("type", type=one_of("text", "json_object", "json_schema"), schema=OBJECT)
_BODY = obj(
    "input",
    model=nullable(STRING),
    input=any_of(STRING, array(_ITEMS, minItems=1)),
    instructions=nullable(STRING),
    previous_response_id=nullable(_RESPONSE_ID),
    store=_SWITCH,
    stream=_SWITCH,
    include=nullable(array(STRING)),
    tools=nullable(array(any_of(_FUNCTION, _CUSTOM, _NAMESPACE))),
    tool_choice=nullable(any_of(one_of("auto", "none", "required"), OBJECT)),
    parallel_tool_calls=_SWITCH,
    text=nullable(obj(format=nullable(_FORMAT))),
    reasoning=nullable(obj(effort=nullable(STRING), summary=nullable(STRING))),
    max_output_tokens=number(bounds.Limit),
    max_tool_calls=number(bounds.Limit),
    temperature=number(bounds.Temperature),
    top_p=number(bounds.TopP),
    top_logprobs=number(bounds.TopLogprobs),
    metadata=nullable(OBJECT),
    prompt_cache_key=nullable(STRING),
    safety_identifier=nullable(STRING),
    user=nullable(STRING),
)
_RESPONSE = obj("id object status output", id=STRING, object=const("response"), output=array())
_COMPACTED = obj("id object output usage", object=const("response.compaction"), output=array())
_LISTED = obj("object data has_more", object=const("list"), data=array(), has_more=BOOLEAN)


def _operation(
    name: str, summary: str, answer: Schema, body: Schema | None = None, said: str | None = None, **others: Any
) -> Schema:
    return operation(name, summary, json(answer) | others, error=ERROR, body=body, answer=said)


RESPONSES = _operation(
    "create_response",
    "OpenAI Responses",
    _RESPONSE,
    _BODY,
    "The response; with `stream`, server-sent events.",
    **EVENTS,
)
COUNT = _operation(
    "count_response_tokens",
    "How many tokens a request's prompt has; nothing is recorded",
    obj("object input_tokens"),
    _BODY,
    "The count.",
)
COMPACT = _operation(
    "compact_response", "A conversation made short by the model, to go on from; a turn on record", _COMPACTED, _BODY
)
INPUT_ITEMS = _operation("list_response_input_items", "What a stored response was an answer to", _LISTED)
CANCEL = _operation("cancel_response", "Refused (400): no response runs in the background here", _RESPONSE)
STORED: dict[str, Schema] = {
    "get": _operation("get_response", "A stored response", _RESPONSE),
    "delete": _operation(
        "delete_response",
        "Forget a stored response; the record of its turn stays",
        obj("id object deleted", deleted=const(True)),
    ),
}
PAGE: list[Schema] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}},
    {"name": "order", "in": "query", "schema": one_of("asc", "desc") | {"default": "desc"}},
    {"name": "after", "in": "query", "schema": STRING},
]
RESPONSE_ID: Schema = {"name": "response_id", "in": "path", "required": True, "schema": _RESPONSE_ID}
