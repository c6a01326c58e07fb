"""OpenAI Chat Completions, tools: those that a model is offered, and how it is to choose among them.

Tools that a provider runs are left out and named in `SeenParts.dropped`; a request that has no others is refused. Tools of free
text (`custom`) are refused: chat's calls of them have a shape of their own. So are those that the client runs by screenshots. A
system message may bring tools (Kimi): they come after the request's own, as what is offered stands at the beginning of a prompt.
"""

from __future__ import annotations

from typing import Any

import msgspec

from steno.contracts.chat import Tool
from steno.contracts.errors import BadRequest
from steno_proxy.dialects.base import check_wire, dotted
from steno_proxy.dialects.parts import SeenParts
from steno_proxy.dialects.refusals import COMPUTERS, must_be, nobody_runs, not_by_screenshots


class _ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct):
    type: str = "function"
    function: _ToolFunction | None = None


def are_tools(given: Any) -> bool:
    """Whether a message's `tools` are tools. No provider but Kimi's knows the field, so in another shape it is an unknown one."""
    return isinstance(given, list) and all(
        isinstance(one, dict) and ("type" in one or "function" in one) for one in given
    )


class ChatTools:
    """The tools of one request. Args: given: its `tools`. Raises: BadRequest naming the field."""

    def __init__(self, given: list[ToolBody], seen: SeenParts) -> None:
        self._seen = seen
        self._first_dropped = ("", "")
        self.offered: list[Tool] = []
        for i, one in enumerate(given):
            tool = self._read(f"tools.{i}", one)
            if tool is not None:
                self.offered.append(tool)
        self._places = {tool["function"]["name"]: place for place, tool in enumerate(self.offered)}

    def add(self, path: str, given: Any) -> None:
        """Those of a message (`are_tools`); one of a name that is known takes its place. Raises: BadRequest naming the field."""
        try:
            tools = msgspec.convert(given, list[ToolBody])
        except msgspec.ValidationError as error:
            said, _, where = str(error).partition(" - at `")
            at = ".".join(part for part in (path, dotted(where.rstrip("`"))) if part)
            raise BadRequest(f"{at}: {said[:1].lower()}{said[1:]}", field=at) from None
        for i, one in enumerate(tools):
            tool = self._read(f"{path}.{i}", one)
            if tool is not None:
                place = self._places.setdefault(tool["function"]["name"], len(self.offered))
                self.offered[place : place + 1] = [tool]

    def check_runnable(self) -> None:
        """Raises: BadRequest: there are tools, and the client runs none of them."""
        if self._first_dropped[0] and not self.offered:
            raise nobody_runs(*self._first_dropped)

    def _read(self, path: str, given: ToolBody) -> Tool | None:
        """None: the provider runs it."""
        if given.type == "custom":
            raise BadRequest(
                f"{path}.type: got 'custom': chat takes functions only. Send a function with one text, or use /v1/responses,"
                " which takes custom tools",
                field=f"{path}.type",
            )
        if given.type in COMPUTERS:
            raise not_by_screenshots(path, given.type)
        if given.type != "function":
            self._first_dropped = self._first_dropped if self._first_dropped[0] else (f"{path}.type", given.type)
            self._seen.dropped.append(given.type)
            return None
        if given.function is None or not given.function.name:
            raise BadRequest(f"{path}.function.name is required", field=f"{path}.function.name")
        function: dict[str, Any] = {"name": given.function.name}
        if given.function.description is not None:
            function["description"] = given.function.description
        if given.function.parameters is not None:
            check_wire(f"{path}.function.parameters", given.function.parameters)
            function["parameters"] = given.function.parameters
        if given.function.strict is not None:
            function["strict"] = given.function.strict
        return {"type": "function", "function": function}


def tool_choice_of(given: str | dict[str, Any] | None, tools: list[Tool]) -> tuple[str, list[Tool]]:
    """The canonical choice, and the tools left to choose from."""
    if given is None:
        return "auto", tools
    if isinstance(given, str):
        if given not in ("auto", "none", "required"):
            raise BadRequest(
                f"tool_choice: got {given[:40]!r}, must be one of auto, none, required", field="tool_choice"
            )
        if given == "required" and not tools:
            raise BadRequest("tool_choice: got 'required', but the request has no tools", field="tool_choice")
        return given, tools
    kind = given.get("type")
    if kind == "function":
        name = _name_of(given, "tool_choice")
        if not any(tool["function"]["name"] == name for tool in tools):
            raise BadRequest(
                f"tool_choice.function.name: no tool is named {name[:80]!r}", field="tool_choice.function.name"
            )
        return f"function:{name}", tools
    if kind == "allowed_tools":
        return _allowed(given.get("allowed_tools"), tools)
    raise must_be("function or allowed_tools", "tool_choice.type", kind)


def _allowed(given: Any, tools: list[Tool]) -> tuple[str, list[Tool]]:
    path = "tool_choice.allowed_tools"
    if not isinstance(given, dict) or not isinstance(given.get("tools"), list):
        raise BadRequest(f"{path}.tools is required", field=f"{path}.tools")
    mode = given.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise must_be("auto or required", f"{path}.mode", mode)
    names = {_name_of(tool, f"{path}.tools.{i}") for i, tool in enumerate(given["tools"])}
    allowed = [tool for tool in tools if tool["function"]["name"] in names]
    if not allowed:
        raise BadRequest(f"{path}.tools: none of these names is in `tools`", field=f"{path}.tools")
    return mode, allowed


def _name_of(given: Any, path: str) -> str:
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{path}.function.name is required", field=f"{path}.function.name")
    return name
