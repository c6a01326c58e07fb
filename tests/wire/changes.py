"""What one version of an agent sends that another does not: fields by path, types of items, headers, tools, requests.

A path names fields, `[]` for any place in a list, and the type or role of what is in it where it says so:
`messages[].assistant.content[].tool_use.id`. Values don't count, but for headers, tools and the few that switch something.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from tests.wire.fixture import Exchange, Recording

SWITCHES = frozenset(
    {"stream", "store", "tool_choice", "parallel_tool_calls", "include", "thinking", "reasoning", "temperature"}
)
"""Top-level fields whose values are shown."""
_OPAQUE = frozenset({"parameters", "input_schema", "parametersJsonSchema", "input", "args", "properties"})
"""Schemas and arguments: in these the names of fields are the tool's or the model's."""
_ITEMS = re.compile(r"message|reasoning|item_reference|.*_call|.*_call_output|compaction.*")
"""Types of items that are no tools, where both stand in one list."""


def facts(recording: Recording) -> dict[str, set[str]]:
    """Heading -> what was seen."""
    found: dict[str, set[str]] = {
        name: set() for name in ("requests", "headers", "fields", "values", "tools", "events", "dropped", "forks")
    }
    for exchange in recording.exchanges:
        at = f"{exchange.method} {exchange.path}"
        found["requests"].add(at)
        found["headers"] |= {f"{name}: {value}" if value else name for name, value in exchange.headers.items()}
        found["events"] |= {f"{at}: {event}" for event in exchange.events}
        found["dropped"] |= set(exchange.dropped)
        if exchange.body is not None:
            _of_body(exchange, found)
        if exchange.answer is not None and exchange.answer.fork_reason:
            found["forks"].add(f"{exchange.trial}: {exchange.answer.fork_reason}")
    return found


def _of_body(exchange: Exchange, found: dict[str, set[str]]) -> None:
    body = exchange.body or {}
    found["fields"] |= set(_paths(body, ""))
    found["values"] |= {f"{name} = {body[name]}" for name in SWITCHES if name in body}
    items = [item for name in ("input", "tools") if isinstance(body.get(name), list) for item in body[name]]
    found["tools"] |= {name for tool in items for name in _tools(tool)}


def _tools(tool: dict[str, Any]) -> Iterator[str]:
    """Each tool in this one by its name and a digest of its definition, description and all."""
    declared = tool.get("functionDeclarations") or tool.get("tools")
    if declared:
        prefix = f"{tool['name']}." if "name" in tool else ""
        yield from (prefix + name for each in declared for name in _tools(each))
    elif "role" not in tool and not _ITEMS.fullmatch(str(tool.get("type"))):
        name = tool.get("name") or tool.get("function", {}).get("name") or tool.get("type") or sorted(tool)
        definition = {key: value for key, value in tool.items() if key != "cache_control"}
        yield f"{name} {sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:8]}"


def _paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _paths(each, path + "[]")
    elif isinstance(value, dict):
        kinds = [value[key] for key in ("role", "type") if path and isinstance(value.get(key), str)]
        here = ".".join([path, *kinds]) if path else ""
        for name, each in value.items():
            at = f"{here}.{name}" if here else name
            # A list of requests' items is `input` too.
            yield from [at] if name in _OPAQUE and not isinstance(each, list) else _paths(each, at)
    else:
        yield f"{path}: {'null' if value is None else type(value).__name__}"


def changes(before: Recording, after: Recording) -> list[str]:
    """Lines for a person: `+ heading: what` and `- heading: what`."""
    old, new = facts(before), facts(after)
    lines = []
    for heading in new:
        lines += [f"+ {heading}: {what}" for what in sorted(new[heading] - old[heading])]
        lines += [f"- {heading}: {what}" for what in sorted(old[heading] - new[heading])]
    for trial in sorted({exchange.trial for exchange in (*before.exchanges, *after.exchanges)}):
        counts = [sum(each.trial == trial for each in one.exchanges) for one in (before, after)]
        if counts[0] != counts[1]:
            lines.append(f"~ {trial}: {counts[0]} requests became {counts[1]}")
    return lines
