"""Anthropic Messages, tools: those that a model is offered, of those that a request has in `tools` and in its messages.

    defer_loading: true    not offered until something names it; all are, where `tools` has the provider's own search, which
                           only the provider can run
    tool_reference         in a tool's result: what a search of the client's found is offered from then on
    tool_addition          in a system message: the tool that it names, or defines, is offered from then on
    tool_removal           in a system message: the tool that it names is no longer offered
    any type of its own    a tool that the provider runs is never offered, and named in `dropped`

Templates have all tools at the beginning of the prompt. So what is offered later makes another prompt of it: the turn is a root
(`tools_changed`), and its tools stay as they are from then on. A name that no tool has is passed over.
"""

from __future__ import annotations

from typing import Any

from steno.contracts.chat import Tool
from steno.contracts.errors import BadRequest
from steno_proxy.dialects.anthropic.tools import client_tool
from steno_proxy.dialects.base import check_wire
from steno_proxy.dialects.parts import SeenParts
from steno_proxy.dialects.refusals import must_be, nobody_runs

CHANGES = frozenset({"tool_addition", "tool_removal"})
_SEARCHES = "tool_search_tool_"


class OfferedTools:
    """The tools of one request. Blocks of its messages are told in their order; `tools` is asked after them."""

    def __init__(self, given: list[Any], seen: SeenParts) -> None:
        """Args: given: `tools`. Raises: BadRequest naming the field."""
        self._seen = seen
        self._given = given
        self._all: list[Tool] = []
        self._places: dict[str, int] = {}
        self._hidden: set[str] = set()
        for i, one in enumerate(given):
            tool = self._read(f"tools.{i}", one)
            if tool is not None:
                self._places[_name(tool)] = len(self._all)
                self._all.append(tool)
                if one.get("defer_loading") is True:
                    self._hidden.add(_name(tool))
        if any(_kind(one).startswith(_SEARCHES) for one in given):
            self._hidden.clear()

    @property
    def tools(self) -> list[Tool]:
        """In the order of `tools`; what messages define comes after those."""
        return [tool for tool in self._all if _name(tool) not in self._hidden] if self._hidden else self._all

    def check_runnable(self) -> None:
        """Raises: BadRequest: there are tools, and the client runs none of them."""
        if self._given and not self._all:
            raise nobody_runs("tools.0.type", self._given[0].get("type"))

    def found(self, path: str, reference: dict[str, Any]) -> str:
        """A `tool_reference` in a tool's result; returns the name in it. Raises: BadRequest naming the field."""
        name = _text(f"{path}.tool_name", reference.get("tool_name"))
        self._hidden.discard(name)
        return name

    def change(self, path: str, block: dict[str, Any]) -> None:
        """Apply a block that adds or removes a tool (its type is in CHANGES). Raises: BadRequest naming the field."""
        tool, adds = block.get("tool"), block["type"] == "tool_addition"
        path = f"{path}.tool"
        if not isinstance(tool, dict):
            raise must_be("an object", path, tool)
        kind = _kind(tool)
        if kind == "tool_definition" and adds:
            self._define(f"{path}.definition", tool.get("definition"))
        elif kind == "tool_reference":
            name = _text(f"{path}.name", tool.get("name"))
            if adds:
                self._hidden.discard(name)
            else:
                self._hidden.add(name)
        else:  # of an MCP server, which the provider asks
            self._seen.dropped.append(kind or block["type"])

    def _define(self, path: str, given: Any) -> None:
        tool = self._read(path, given)
        if tool is None:
            return
        name = _name(tool)
        self._hidden.discard(name)
        place = self._places.setdefault(name, len(self._all))
        self._all[place : place + 1] = [tool]

    def _read(self, path: str, given: Any) -> Tool | None:
        """A tool that the client runs; None for those that the provider runs itself."""
        if not isinstance(given, dict):
            raise must_be("an object", path, given)
        if given.get("type") not in (None, "custom"):
            if (tool := client_tool(path, given)) is not None:
                return tool
            self._seen.dropped.append(_kind(given) or "tool")
            return None
        description, schema = given.get("description"), given.get("input_schema")
        function: dict[str, Any] = {"name": _text(f"{path}.name", given.get("name"))}
        if description is not None:
            if not isinstance(description, str):
                raise must_be("a string", f"{path}.description", description)
            function["description"] = description
        if schema is not None:
            if not isinstance(schema, dict):
                raise must_be("an object", f"{path}.input_schema", schema)
            check_wire(f"{path}.input_schema", schema)
            function["parameters"] = schema
        if isinstance(strict := given.get("strict"), bool):
            function["strict"] = strict
        return {"type": "function", "function": function}


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def _kind(given: Any) -> str:
    """The type of what has one, else ""."""
    kind = given.get("type") if isinstance(given, dict) else None
    return kind if isinstance(kind, str) else ""


def _text(path: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{path} is required", field=path)
    return value
