"""Which JSON schemas may become a grammar. Agents write them (I8), and whoever compiles one repeats what it says to repeat: a
thousand million items are a thousand million rules, in native code that nothing interrupts, in the process that serves everybody.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from steno.contracts.chat import ResponseFormat, Tool
from steno.contracts.errors import BadRequest

GRAMMARS = ("structured_outputs.regex", "structured_outputs.choice", "structured_outputs.grammar")
"""Of `ModelCard.fields`: what a worker with grammars honours."""
MOST_CHARS = 65_536
"""Of a pattern, a grammar, or all choices together."""
COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
MOST_REPEATED = 10_000
"""Of these counts in one schema, all together. llguidance takes 0.3 s and 24 MB for an array of so many."""
_REPEATED = re.compile(r"[{~]\s*(\d{1,9})\d*(?:\s*(?:,|\.\.)\s*(\d{1,9})\d*)?")
"""`{n}`, `{n,m}` of patterns and EBNF, `~n`, `~n..m` of Lark."""
MOST_COMBINED = 1024
"""Of alternatives that an `allOf` multiplies with each other. llguidance takes some seconds for so many."""


def check_schema(schema: Any, field: str) -> None:
    """One pass. Combinations are counted at their most, as if each part of an `allOf` had the most alternatives in the schema:
    a part may be a reference.

    Args: field: of the request that it came in, for the error.
    Raises: BadRequest: too many repetitions, or combinations.
    """
    repeated = parts = 0
    alternatives = 1
    todo = [schema]
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
    text = asked.regex or asked.grammar
    size = len(text) + sum(map(len, asked.choice))
    field = field_of_format(asked)
    if size > MOST_CHARS:
        raise BadRequest(f"{field}: got {size} characters, at most {MOST_CHARS} are allowed", field=field)
    if asked.grammar and "%json" in asked.grammar:
        raise BadRequest(f"{field}: %json is not supported: send the schema as structured_outputs.json", field=field)
    if sum(int(count) for pair in _REPEATED.findall(text) for count in pair if count) > MOST_REPEATED:
        raise BadRequest(f"{field}: the sum of its repetitions is above {MOST_REPEATED}", field=field)


def check_tools(tools: Sequence[Tool], field: str) -> None:
    """The same for the parameters of these tools, all together. Raises: BadRequest."""
    check_schema([tool["function"].get("parameters") for tool in tools], field)
