"""Which JSON schemas may become a grammar. Agents write them (I8), and a grammar compiler expands every repetition: a billion
items become a billion rules, in native code that nothing interrupts, in the process that serves all requests. It also recurses
into nested and referenced schemas: a chain of a thousand references crashes that process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
from typing import Any

from steno.contracts.chat import ResponseFormat, Tool
from steno.contracts.errors import BadRequest

GRAMMARS = ("structured_outputs.regex", "structured_outputs.choice", "structured_outputs.grammar")
"""Of `ModelCard.fields`: what a worker with grammars honours."""
MOST_CHARS = 65_536
"""Most characters of a pattern, a grammar, all choices together, or all patterns of a schema together."""
COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
MOST_REPEATED = 10_000
"""Largest sum of these counts (and `multipleOf`) in one schema, or of the repetitions in a pattern or grammar. llguidance takes
0.3 s and 24 MB for an array of so many items."""
MOST_REPEATED_IN_SCHEMA = 5_000
"""Largest sum of the repetitions in a pattern of a schema. With several patterns, the sum of their squares is compared with the
square of this. xgrammar takes 1.5 s for so many."""
_REPEATED = re.compile(r"[{~]\s*(\d{1,9})\d*(?:\s*(?:,|\.\.)\s*(\d{1,9})\d*)?")
"""`{n}`, `{n,m}` of patterns and EBNF, `~n`, `~n..m` of Lark."""
MOST_COMBINED = 1024
"""Most combinations of the alternatives in an `allOf`. llguidance takes some seconds for so many."""
MOST_LEVELS = 500
"""Most nested lists and dicts on one path through a schema, `$ref`s followed. llguidance crashes the process at 2,500 in a thread
with a stack of 8 MB, xgrammar later. Where a process's stack has no limit, threads have 2 MB: both compile 500 there."""
MOST_PARTS = 500
"""Most rules and groups in a grammar, which may form one chain. llguidance crashes the process at 2,600, with 8 MB of stack."""
MOST_OPEN = 100
"""Most nested groups in a pattern. xgrammar takes 12 s for 12,000, and 30,000 crash the process."""
MOST_KEY_PATTERNS = 128
"""Most `patternProperties` in one schema, all together. llguidance takes 0.1 s for so many, 16 s for 400."""
_DEFINITIONS = ("$defs", "definitions")
_DEFINITION = re.compile(r"#(/(\$defs|definitions)/[^/~%]+)?")
"""A `$ref` that means the same to all who compile it."""


def check_schema(schema: Any, field: str) -> None:
    """Refuse a schema that is too expensive to compile. Combinations are overestimated, as if each part of an `allOf` had the
    most alternatives in the schema: a part may be a reference.

    Args: field: of the request that it came in, for the error.
    Raises: BadRequest: too many repetitions, combinations or levels.
    """
    _check_schemas([schema], field)


def _check_schemas(schemas: Sequence[Any], field: str) -> None:
    repeated = parts = key_patterns = 0
    alternatives = 1
    patterns: list[str] = []
    todo = list(schemas)
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            todo += node.values()
            for name in COUNTS:
                if isinstance(node.get(name), int | float):
                    repeated += min(max(0, node[name]), MOST_REPEATED + 1)
            if isinstance(node.get("multipleOf"), int | float):
                repeated += min(_states(node["multipleOf"]), MOST_REPEATED + 1)
            for name in ("anyOf", "oneOf"):
                if isinstance(node.get(name), list):
                    alternatives = max(alternatives, len(node[name]))
            if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
                parts += len(node["allOf"])
            if isinstance(node.get("pattern"), str):
                patterns.append(node["pattern"])
            if isinstance(node.get("patternProperties"), dict):
                patterns += node["patternProperties"]
                key_patterns += len(node["patternProperties"])
    if repeated > MOST_REPEATED:
        raise BadRequest(
            f"{field}: the schema can't be enforced: the sum of its {', '.join(COUNTS)}, multipleOf is above {MOST_REPEATED}",
            field=field,
        )
    if alternatives > 1 and parts > 1 and alternatives ** min(parts, 64) > MOST_COMBINED:
        raise BadRequest(
            f"{field}: the schema can't be enforced: its `allOf` combines more than {MOST_COMBINED} alternatives",
            field=field,
        )
    if key_patterns > MOST_KEY_PATTERNS:
        raise BadRequest(
            f"{field}: the schema can't be enforced: got {key_patterns} patternProperties, at most {MOST_KEY_PATTERNS} are "
            "allowed",
            field=field,
        )
    _check_patterns(patterns, field, f"{field}: the schema can't be enforced: its patterns:", MOST_REPEATED_IN_SCHEMA)
    if (levels := _longest_way(schemas)) > MOST_LEVELS:
        raise BadRequest(
            f"{field}: the schema can't be enforced: with its `$ref`s followed it has up to {levels} levels, at most "
            f"{MOST_LEVELS} are allowed",
            field=field,
        )


def _longest_way(schemas: Sequence[Any]) -> int:
    """At most how many levels the longest path through one of these schemas has, if it visits nothing twice.

    Definitions in a cycle, or that lead to one, count as one path through all of them. A `$ref` to anything but a definition of
    the root may lead anywhere, also into another tool's schema: each such `$ref` counts as the longest path once more.
    """
    longest = 0
    elsewhere: set[str | int] = set()
    for schema in schemas:
        parts: dict[str, Any] = {"#": schema}
        for key in _DEFINITIONS:
            if isinstance(schema, dict) and isinstance(schema.get(key), dict):
                parts |= {f"#/{key}/{name}": definition for name, definition in schema[key].items()}
                parts["#"] = {other: value for other, value in parts["#"].items() if other != key}
        levels: dict[str, int] = {}
        references: dict[str, set[str]] = {}
        for name, part in parts.items():
            levels[name], found = _levels_and_references(part, is_root=name == "#")
            references[name] = {to for to in found if isinstance(to, str) and to in parts and _DEFINITION.fullmatch(to)}
            elsewhere |= found - references[name]
        ways: dict[str, int] = {}
        sorter = TopologicalSorter(references)
        with suppress(CycleError):
            sorter.prepare()
        while ready := sorter.get_ready():
            for name in ready:
                ways[name] = levels[name] + max((ways[to] for to in references[name]), default=0)
            sorter.done(*ready)
        circles = sum(count for name, count in levels.items() if name not in ways)
        longest = max(longest, circles + max(ways.values(), default=0))
    return longest * (1 + len(elsewhere))


def _levels_and_references(part: Any, *, is_root: bool) -> tuple[int, set[str | int]]:
    """How deep a part of a schema is, and its `$ref`s; those below an `$id` of its own are numbers: they mean something else."""
    deepest = 0
    references: set[str | int] = set()
    todo = [(part, 1, False)]
    while todo:
        node, level, is_apart = todo.pop()
        if not isinstance(node, dict | list):
            continue
        deepest = max(deepest, level)
        if isinstance(node, dict):
            is_apart |= (level > 1 or not is_root) and any(isinstance(node.get(key), str) for key in ("$id", "id"))
            if isinstance(node.get("$ref"), str):
                references.add(id(node) if is_apart else node["$ref"])
        todo += [(child, level + 1, is_apart) for child in (node.values() if isinstance(node, dict) else node)]
    return deepest, references


def _check_patterns(patterns: Sequence[str], field: str, said: str, most_repeated: int) -> None:
    """Args: said: how the error begins."""
    if (size := sum(map(len, patterns))) > MOST_CHARS:
        raise BadRequest(f"{said} got {size} characters, at most {MOST_CHARS} are allowed", field=field)
    if sum(_repetitions(pattern) ** 2 for pattern in patterns) > most_repeated**2:
        several = " (for several patterns: the root of the sum of their squares)" if len(patterns) > 1 else ""
        raise BadRequest(f"{said} the sum of its repetitions is above {most_repeated}{several}", field=field)
    if (most := max(map(_open_groups, patterns), default=0)) > MOST_OPEN:
        raise BadRequest(f"{said} got {most} groups in each other, at most {MOST_OPEN} are allowed", field=field)


def _repetitions(text: str) -> int:
    return sum(int(count) for pair in _REPEATED.findall(text) for count in pair if count)


def _open_groups(pattern: str) -> int:
    """The most at one time."""
    most = now = 0
    in_class = False
    for token in re.findall(r"\\.|[][()]", pattern, re.DOTALL):
        if in_class or token == "[":
            in_class = token != "]"
        elif token == "(":
            now += 1
            most = max(most, now)
        elif token == ")":
            now = max(0, now - 1)
    return most


def _states(divisor: float) -> int:
    """Of an automaton that divides by it: 7 of 7, and of 0.7 or 0.07."""
    exact = Decimal(str(divisor))
    if not exact.is_finite():
        return 0
    _, digits, exponent = exact.as_tuple()
    assert isinstance(exponent, int)
    return int("".join(map(str, digits)) + "0" * min(max(0, exponent), 10))


def field_of_format(asked: ResponseFormat) -> str:
    """Which field of the request to blame for it."""
    return (
        "response_format"
        if asked.type in ("text", "json_object", "json_schema")
        else f"structured_outputs.{asked.type}"
    )


def check_format(asked: ResponseFormat) -> None:
    """The same of a whole format: schema, pattern, choices or grammar. Raises: BadRequest."""
    check_schema(asked.schema, "response_format")
    field = field_of_format(asked)
    _check_patterns([asked.regex], field, f"{field}:", MOST_REPEATED)
    size = len(asked.grammar) + sum(map(len, asked.choice))
    if size > MOST_CHARS:
        raise BadRequest(f"{field}: got {size} characters, at most {MOST_CHARS} are allowed", field=field)
    if asked.grammar and "%json" in asked.grammar:
        raise BadRequest(f"{field}: %json is not supported: send the schema as structured_outputs.json", field=field)
    if _repetitions(asked.grammar) > MOST_REPEATED:
        raise BadRequest(f"{field}: the sum of its repetitions is above {MOST_REPEATED}", field=field)
    parts = sum(map(asked.grammar.count, ":([")) - asked.grammar.count("::=")
    if parts > MOST_PARTS:
        raise BadRequest(
            f"{field}: got {parts} rules and groups (':', '(' and '['), at most {MOST_PARTS} are allowed", field=field
        )


def check_tools(tools: Sequence[Tool], field: str) -> None:
    """The same for the parameters of these tools, all together. Raises: BadRequest."""
    _check_schemas([tool["function"].get("parameters") for tool in tools], field)
