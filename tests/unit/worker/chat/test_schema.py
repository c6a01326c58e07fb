"""Schemas that a grammar must not be made of, and those that agents really send."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.errors import BadRequest
from steno_worker.engines.grammars import MOST_REPEATED, check_schema, check_tools

INTEGER = {"type": "integer"}


def choices(parts: int) -> list[dict[str, Any]]:
    return [{"anyOf": [{"properties": {f"p{n}": INTEGER}}, {"properties": {f"q{n}": INTEGER}}]} for n in range(parts)]


BOMBS: dict[str, Any] = {
    "at least": {"type": "array", "minItems": 10**9, "items": INTEGER},
    "at most": {"properties": {"a": {"type": "array", "maxItems": 1e300}}},
    "in definitions": {"$defs": {"a": {"minProperties": 10**400}}, "$ref": "#/$defs/a"},
    "a divisor": {"type": "integer", "multipleOf": 20_000_003},
    "a divisor with places": {"properties": {"a": {"type": "number", "multipleOf": 12345.67}}},
    "a large divisor": {"multipleOf": 1e300},
    "some divisors": {"properties": {name: {"type": "integer", "multipleOf": 4000} for name in "abc"}},
    "many small ones": {"anyOf": [{"type": "array", "maxItems": 500}] * 100},
    "all of many": {"allOf": choices(20)},
    "all of many, by reference": {
        "$defs": {"a": choices(1)[0]},
        "allOf": [{"$ref": "#/$defs/a"}] * 20,
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_by_their_field(name: str) -> None:
    with pytest.raises(BadRequest, match="response_format: the schema can't be enforced") as refused:
        check_schema(BOMBS[name], "response_format")
    assert refused.value.field == "response_format"
    with pytest.raises(BadRequest, match="tool_choice"):
        check_tools([{"function": {"name": "f", "parameters": BOMBS[name]}}], "tool_choice")


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {"type": "array", "maxItems": MOST_REPEATED},
        {"type": "string", "maxLength": 10**9},
        {"properties": {"multipleOf": {"type": "number", "multipleOf": 0.01}, "b": {"multipleOf": 1000}}},
        {"properties": {"minItems": {"type": "integer"}}, "required": ["minItems"]},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [INTEGER] * 500}}},
        {"allOf": choices(8)},
        {"anyOf": [INTEGER] * 5000},
        {"minItems": "many", "allOf": "all", "anyOf": 3},
    ],
)
def test_others_pass(schema: Any) -> None:
    check_schema(schema, "response_format")
    check_tools([{"function": {"name": "f"}}, {"function": {"name": "g", "parameters": schema}}], "tool_choice")
