"""Schemas that a grammar must not be made of, and those that agents really send."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from steno.contracts.chat import ResponseFormat
from steno.contracts.errors import BadRequest
from steno_worker.engines.grammars import (
    MOST_LEVELS,
    MOST_PARTS,
    MOST_REPEATED,
    check_format,
    check_schema,
    check_tools,
)

INTEGER = {"type": "integer"}


def choices(parts: int) -> list[dict[str, Any]]:
    return [{"anyOf": [{"properties": {f"p{n}": INTEGER}}, {"properties": {f"q{n}": INTEGER}}]} for n in range(parts)]


def chain(length: int, link: str, *, where: str = "#/$defs/d") -> dict[str, Any]:
    """Definitions, each of which is what `link` makes of a reference to the next. The last one is an integer."""
    links = {f"d{n}": json.loads(link.replace("NEXT", f'{{"$ref": "{where}{n + 1}"}}')) for n in range(length)}
    return {"$defs": {**links, f"d{length}": INTEGER}, "$ref": f"{where}0"}


OBJECT = '{"type": "object", "properties": {"a": NEXT}, "required": ["a"], "additionalProperties": false}'
LINKS = {"bare": (1, "NEXT"), "array": (2, '{"type": "array", "items": NEXT}'), "object": (3, OBJECT),
         "tuple": (3, '{"type": "array", "prefixItems": [NEXT], "minItems": 1}'), "any": (3, '{"anyOf": [NEXT]}')}  # fmt: skip
"""Levels of a link, and the link."""


def circle(length: int) -> dict[str, Any]:
    """Each definition may have each of the others in it: what a syntax tree's schema looks like."""
    kinds = {f"d{n}": json.loads(OBJECT.replace("NEXT", '{"$ref": "#/$defs/any"}')) for n in range(length)}
    every = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in kinds]}
    return {"$defs": {**kinds, "any": every}, "$ref": "#/$defs/any"}


def inside(name: str, deep: dict[str, Any]) -> dict[str, Any]:
    """A chain whose references begin at an `$id` of its own, beside definitions of the same names that lead nowhere."""
    decoys = dict.fromkeys(deep["$defs"], INTEGER)
    return {"$defs": {"own": {"$id": "https://own", **deep}, **decoys}, "$ref": "https://own"}


def deep_pattern(depth: int) -> str:
    return "(" * depth + "a" + ")" * depth


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
    **{f"a chain: {name}": chain(MOST_LEVELS // levels + 1, link) for name, (levels, link) in LINKS.items()},
    "a chain, escaped": chain(200, OBJECT, where="#/%24defs/d"),
    "a chain by other names": chain(200, OBJECT, where="#d"),
    "a chain below an id": inside("own", chain(200, OBJECT)),
    "a circle of many": circle(200),
    "a deep pattern behind closed groups": {"pattern": ")" * 90 + deep_pattern(101)},
    "a deep pattern": {"properties": {"a": {"pattern": deep_pattern(101)}}},
    "a deep pattern behind a class": {"pattern": r"[)]" + r"\)([)])" * 3 + r"(\)[)]" * 101 + ")" * 101},
    "a deep key pattern": {"patternProperties": {deep_pattern(101): INTEGER}},
    "a deep name pattern": {"propertyNames": {"pattern": deep_pattern(101)}},
    "a long pattern": {"pattern": "a" * 70_000},
    "patterns that repeat": {"properties": {name: {"pattern": "^a{4000}$"} for name in "abc"}},
    "a pattern that repeats": {"pattern": "^a{2501,2500}$"},
    "many key patterns": {"patternProperties": {f"^a{n}b*$": INTEGER for n in range(129)}},
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
        *(chain(MOST_LEVELS // levels - 6, link) for levels, link in LINKS.values()),
        circle(80),
        {"properties": {"a": {"items": {"$ref": "#"}}, "b": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}},
        {"properties": {"a": INTEGER, **{f"p{n}": {"$ref": "#/properties/a"} for n in range(500)}}},
        {"$defs": {f"d{n}": INTEGER for n in range(2000)}, "anyOf": [{"$ref": f"#/$defs/d{n}"} for n in range(2000)]},
        {"$ref": 3, "$defs": [], "definitions": {"a": None}, "pattern": 3, "patternProperties": ["a"], "id": 3},
        {"properties": {"a": {"pattern": "(a)" * 500 + deep_pattern(100)}, "b": {"pattern": "^[a-z]{1,2048}$"}}},
        {"properties": {f"p{n}": {"pattern": "^[a-z]{1,256}$"} for n in range(300)}},
        {"patternProperties": {f"^a{n}b*$": INTEGER for n in range(128)}},
    ],
)
def test_others_pass(schema: Any) -> None:
    check_schema(schema, "response_format")
    check_tools([{"function": {"name": "f"}}, {"function": {"name": "g", "parameters": schema}}], "tool_choice")


def test_a_chain_through_many_tools_is_refused() -> None:
    """Where tools become one grammar, their definitions do too."""
    tools: list[Any] = []
    for n in range(400):
        definition = json.loads(OBJECT.replace("NEXT", f'{{"$ref": "#/$defs/d{n + 1}"}}'))
        tools.append(
            {"function": {"name": f"f{n}", "parameters": {"$defs": {f"d{n}": definition}, "$ref": f"#/$defs/d{n}"}}}
        )
    check_tools(tools[:20], "tools")
    with pytest.raises(BadRequest, match=r"^tools: .* up to \d+ levels, at most 500"):
        check_tools(tools, "tools")


def lark_chain(length: int) -> str:
    rules = "".join(f'r{n}: "b" ("c" r{n + 1} | "d")?\n' for n in range(length))
    return f'start: r0\n{rules}r{length}: "a"\n'


@pytest.mark.parametrize(
    "asked",
    [
        ResponseFormat("regex", regex=deep_pattern(101)),
        ResponseFormat("grammar", grammar=lark_chain(MOST_PARTS // 2)),
        ResponseFormat("grammar", grammar="root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(MOST_PARTS))),
        ResponseFormat("grammar", grammar="start: " + '["a" ' * 500 + "]" * 500),
    ],
)
def test_patterns_and_grammars_that_are_too_deep_are_refused(asked: ResponseFormat) -> None:
    with pytest.raises(BadRequest, match="are allowed") as refused:
        check_format(asked)
    assert refused.value.field == f"structured_outputs.{asked.type}"


COMPILE = """
import json, sys, threading
import llguidance

table = llguidance.LLTokenizer("byte")

def compile_all():
    for grammar in json.load(sys.stdin):
        matcher = llguidance.LLMatcher(table, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()[:200]
        matcher.compute_bitmask()

threading.stack_size(2 << 20)
thread = threading.Thread(target=compile_all)
thread.start()
thread.join()
print("alive")
"""


def test_the_deepest_that_pass_fit_into_a_quarter_of_a_threads_stack() -> None:
    """In a process of its own, since one that compiles too deep a grammar dies."""
    schemas = [chain(MOST_LEVELS // levels - 6, link) for levels, link in LINKS.values()]
    grammars = [
        lark_chain(MOST_PARTS // 2 - 2),
        "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(490)) + 'r490: "a"',
    ]
    for schema in schemas:
        check_schema(schema, "response_format")
    for grammar in grammars:
        check_format(ResponseFormat("grammar", grammar=grammar))
    said = json.dumps([*(f"start: %json {json.dumps(schema)}" for schema in schemas), *grammars])
    done = subprocess.run([sys.executable, "-c", COMPILE], input=said, capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n" and not done.stderr
