"""Which JSON schemas may become a grammar. Agents write them (I8), and whoever compiles one repeats what it says to repeat: a
thousand million items are a thousand million rules, in native code that nothing interrupts, in the process that serves everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.contracts.canonical import Tool
from proxy.contracts.errors import BadRequest

COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
MOST_REPEATED = 10_000
"""Of these counts in one schema, all together. llguidance takes 0.3 s and 24 MB for an array of so many."""
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
            for name in ("anyOf", "oneOf"):
                if isinstance(node.get(name), list):
                    alternatives = max(alternatives, len(node[name]))
            if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
                parts += len(node["allOf"])
    if repeated > MOST_REPEATED:
        raise BadRequest(
            f"{field}: the schema can't be enforced: {', '.join(COUNTS)} are more than {MOST_REPEATED} together",
            field=field,
        )
    if alternatives > 1 and parts > 1 and alternatives ** min(parts, 64) > MOST_COMBINED:
        raise BadRequest(
            f"{field}: the schema can't be enforced: its `allOf` combines more than {MOST_COMBINED} alternatives",
            field=field,
        )


def check_tools(tools: Sequence[Tool], field: str) -> None:
    """The same for the parameters of these tools, all together. Raises: BadRequest."""
    check_schema([tool["function"].get("parameters") for tool in tools], field)
