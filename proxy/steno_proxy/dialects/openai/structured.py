"""Structured output: OpenAI's `response_format`, vLLM's `structured_outputs`, and `guided_*` of older clients.

A request has one such wish: beside a `response_format` that asks for something it is refused. Whether a grammar can be made of
it is the worker's to say.
"""

from __future__ import annotations

from typing import Any

import msgspec

from steno.contracts.chat import ResponseFormat
from steno.contracts.errors import BadRequest
from steno_proxy.dialects.base import check_wire
from steno_proxy.dialects.openai.vllm_fields import Refusable
from steno_proxy.dialects.refusals import must_be

NAMED = "structured_outputs"


class StructuredOutputs(msgspec.Struct):
    """vLLM's `StructuredOutputsParams`. `json`: a schema, as an object or as text."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class JsonSchemaBody(msgspec.Struct):
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormatBody(msgspec.Struct):
    """OpenAI's `response_format`."""

    type: str
    json_schema: JsonSchemaBody | None = None


class StructuredBody(Refusable):
    """Fields of a body. None: not given."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def response_format_of(given: ResponseFormatBody | None) -> ResponseFormat:
    """Raises: BadRequest naming the member that is wrong or lacking."""
    if given is None or given.type == "text":
        return ResponseFormat()
    if given.type == "json_object":
        return ResponseFormat(type="json_object")
    if given.type != "json_schema":
        raise must_be("one of text, json_object, json_schema", "response_format.type", given.type)
    asked = given.json_schema
    if asked is None or asked.schema is None:
        raise BadRequest("response_format.json_schema.schema is required", field="response_format.json_schema.schema")
    check_wire("response_format.json_schema.schema", asked.schema)
    return ResponseFormat("json_schema", asked.name or "", asked.schema, bool(asked.strict))


def format_of(body: StructuredBody, asked: ResponseFormat, field: str) -> ResponseFormat:
    """What the reply must be.

    Args: asked: what the dialect's own field asks for, `field` by name.
    Raises: BadRequest: two wishes in one request, or one that can't be honoured, by its field.
    """
    wishes = {
        f"guided_{kind}": (kind, value)
        for kind in ("json", "regex", "choice", "grammar")
        if (value := getattr(body, f"guided_{kind}")) is not None
    }
    if body.structured_outputs is not None:
        wishes |= _members(body.structured_outputs)
    if not wishes:
        return asked
    name = next(iter(wishes))
    if asked.type != "text" or len(wishes) > 1:
        others = ", ".join([*wishes, *([field] if asked.type != "text" else [])])
        raise BadRequest(f"{others}: only one of them may be given", field=name)
    return _format(name, *wishes[name])


def _members(given: StructuredOutputs) -> dict[str, tuple[str, Any]]:
    for name in ("structural_tag", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(given, name) not in (None, False):
            raise BadRequest(f"{NAMED}.{name} is not supported", field=f"{NAMED}.{name}")
    kinds = [kind for kind in ("json", "regex", "choice", "grammar") if getattr(given, kind) is not None]
    kinds += ["json_object"] if given.json_object else []
    if not kinds:
        raise BadRequest(f"{NAMED} needs one of json, regex, choice, grammar, json_object", field=NAMED)
    return {f"{NAMED}.{kind}": (kind, getattr(given, kind)) for kind in kinds}


def _format(name: str, kind: str, value: Any) -> ResponseFormat:
    if kind == "json_object":
        return ResponseFormat("json_object")
    if kind == "json":
        schema = _schema(name, value)
        check_wire(name, schema)
        return ResponseFormat("json_schema", schema=schema)
    texts = value if kind == "choice" else [value]
    if not texts or not all(texts):
        raise BadRequest(f"{name} must not be empty", field=name)
    if kind == "regex":
        return ResponseFormat("regex", regex=value)
    return ResponseFormat("choice", choice=value) if kind == "choice" else ResponseFormat("grammar", grammar=value)


def _schema(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRequest(f"{name} is not valid JSON: {error}", field=name) from None
    if not isinstance(value, dict):
        raise must_be("a JSON schema: an object, or the text of one", name, value)
    return value
