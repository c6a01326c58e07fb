"""Google's schemas (OpenAPI 3.0, types in upper case, counts as strings) as JSON Schema, which templates and grammars know.

    {"type": "OBJECT", "properties": {"n": {"type": "INTEGER", "nullable": true}}}
    {"type": "object", "properties": {"n": {"type": ["integer", "null"]}}}

Keys that are none of a schema's own go through as they are: fields added later are mostly JSON Schema's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from steno_proxy.dialects.gemini.fields import snake
from steno_proxy.dialects.refusals import must_be

_CAMEL: dict[str, str] = {
    snake(name): name
    for name in (
        "additionalProperties", "anyOf", "maxItems", "maxLength", "maxProperties", "minItems", "minLength",
        "minProperties", "prefixItems", "propertyOrdering",
    )
}  # fmt: skip
_RENAMED = {"defs": "$defs", "ref": "$ref"}
_COUNTS = frozenset({"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"})
_LEFT_OUT = frozenset({"nullable", "propertyOrdering", "example"})
_UNSPECIFIED = "TYPE_UNSPECIFIED"
_SHOWN_CHARS = 80
"""How many characters of each name the path in an error shows."""


class _Where(NamedTuple):
    """Where a schema stands: its own name, and the place that contains it. The path is built only for an error: the client
    chooses the names, of any length, and each of a million schemas inside one would copy its name."""

    name: str
    inside: _Where | None

    def __str__(self) -> str:
        names, at = [], self
        while True:
            names.append(at.name[:_SHOWN_CHARS])
            if at.inside is None:
                return ".".join(reversed(names))
            at = at.inside


def json_schema(given: Any, path: str) -> dict[str, Any]:
    """The JSON Schema for a schema of Google's. Raises: BadRequest naming the part that is not valid."""
    return _schema(given, _Where(path, None))


def _schema(given: Any, at: _Where) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise must_be("a schema", str(at), given)
    schema: dict[str, Any] = {}
    key: str
    for key, value in given.items():
        name = _CAMEL.get(key, key)
        if value is None or name in _LEFT_OUT:
            continue
        schema[_RENAMED.get(name, name)] = _value(name, value, _Where(name, at))
    if schema.get("type") is None:
        schema.pop("type", None)
    if given.get("nullable") is True:
        _allow_null(schema)
    return schema


def _value(name: str, value: Any, at: _Where) -> Any:
    if name == "type":
        return _type(value, at)
    if name in ("properties", "defs", "$defs"):
        if not isinstance(value, dict):
            raise must_be("an object", str(at), value)
        return {key: _schema(inner, _Where(key, at)) for key, inner in value.items()}
    if name in ("anyOf", "prefixItems", "oneOf", "allOf"):
        if not isinstance(value, list):
            raise must_be("a list", str(at), value)
        return [_schema(inner, _Where(str(i), at)) for i, inner in enumerate(value)]
    if name == "items" or (name == "additionalProperties" and not isinstance(value, bool)):
        return _schema(value, at)
    if name == "ref" and isinstance(value, str):
        return value.replace("#/defs/", "#/$defs/", 1)
    if name in _COUNTS and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return value


def _type(value: Any, at: _Where) -> Any:
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        raise must_be("a type's name", str(at), value)
    lower = [name.lower() for name in names if name != _UNSPECIFIED]
    if isinstance(value, list):
        return lower
    return lower[0] if lower else None


def _allow_null(schema: dict[str, Any]) -> None:
    kind = schema.get("type")
    if isinstance(kind, str) and kind != "null":
        schema["type"] = [kind, "null"]
    elif isinstance(kind, list) and "null" not in kind:
        schema["type"] = [*kind, "null"]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    if kind is None and isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
