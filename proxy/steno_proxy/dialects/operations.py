"""How the agents' operations in `/openapi.json` are written down, whatever their dialect: JSON Schemas in few words.

Written by hand beside the code that reads the bodies, since the hot path does not go through FastAPI's models. The bounds of
numbers are those that msgspec enforces (`bounds.py`), others those of the dialect's modules.
"""

from __future__ import annotations

from typing import Any

from steno_proxy.dialects import bounds

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
OBJECT: Schema = {"type": "object"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
IMAGE_TYPE: Schema = {"type": "string", "pattern": "^image/"}


def const(value: Any) -> Schema:
    return {"const": value}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    return any_of(schema, {"type": "null"})


def number(kind: Any) -> Schema:
    """One of the types of `bounds.py`, or null."""
    return nullable(bounds.schema(kind))


def array(items: Schema | None = None, **limits: int) -> Schema:
    """Args: items: None: anything. limits: `minItems`, `maxItems`."""
    return {"type": "array"} | ({} if items is None else {"items": items}) | limits


def obj(required: str = "", /, **properties: Schema) -> Schema:
    """An object. Args: required: names of members, with spaces between."""
    found: Schema = {"type": "object"}
    if properties:
        found["properties"] = properties
    if required:
        found["required"] = required.split()
    return found


def block(kind: str, required: str = "", /, **properties: Schema) -> Schema:
    """An object that says of what type it is."""
    return obj(f"type {required}", type=const(kind), **properties)


def json(schema: Schema) -> Schema:
    """Content of that type."""
    return {"application/json": {"schema": schema}}


EVENTS: Schema = {"text/event-stream": {}}


def operation(
    name: str, summary: str, content: Schema, *, error: Schema, body: Schema | None = None, answer: str | None = None
) -> Schema:
    """Args: content: of the answer, by its type. error: the schema of a refusal. answer: what it is, if not the summary."""
    asked = {"requestBody": {"required": True, "content": json(body)}} if body else {}
    refused = {"description": "Refused or failed; `retry-after` where trying again helps.", "content": json(error)}
    answers = {"200": {"description": answer or summary, "content": content}, "default": refused}
    return {"tags": ["generation"], "operationId": name, "summary": summary, **asked, "responses": answers}
