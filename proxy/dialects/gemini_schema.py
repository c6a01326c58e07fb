"""Google's schemas (OpenAPI 3.0, types in upper case, counts as strings) as JSON Schema, which templates and grammars know.

    {"type": "OBJECT", "properties": {"n": {"type": "INTEGER", "nullable": true}}}
    {"type": "object", "properties": {"n": {"type": ["integer", "null"]}}}

Keys that are none of a schema's own go through as they are: fields added later are mostly JSON Schema's.
"""

from __future__ import annotations

from typing import Any

from proxy.contracts.errors import BadRequest
from proxy.dialects.gemini_fields import snake

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


def json_schema(given: Any, path: str) -> dict[str, Any]:
    """Raises: BadRequest naming what of the schema is no schema."""
    if not isinstance(given, dict):
        raise BadRequest(f"{path}: expected a schema", field=path)
    schema: dict[str, Any] = {}
    key: str
    for key, value in given.items():
        name = _CAMEL.get(key, key)
        if value is None or name in _LEFT_OUT:
            continue
        schema[_RENAMED.get(name, name)] = _value(name, value, f"{path}.{name}")
    if schema.get("type") is None:
        schema.pop("type", None)
    if given.get("nullable") is True:
        _allow_null(schema)
    return schema


def _value(name: str, value: Any, path: str) -> Any:
    if name == "type":
        return _type(value, path)
    if name in ("properties", "defs", "$defs"):
        if not isinstance(value, dict):
            raise BadRequest(f"{path}: expected an object", field=path)
        return {key: json_schema(inner, f"{path}.{key}") for key, inner in value.items()}
    if name in ("anyOf", "prefixItems", "oneOf", "allOf"):
        if not isinstance(value, list):
            raise BadRequest(f"{path}: expected a list", field=path)
        return [json_schema(inner, f"{path}.{i}") for i, inner in enumerate(value)]
    if name == "items" or (name == "additionalProperties" and not isinstance(value, bool)):
        return json_schema(value, path)
    if name == "ref" and isinstance(value, str):
        return value.replace("#/defs/", "#/$defs/", 1)
    if name in _COUNTS and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return value


def _type(value: Any, path: str) -> Any:
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        raise BadRequest(f"{path}: expected a type's name", field=path)
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
