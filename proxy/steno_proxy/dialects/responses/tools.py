"""Tools of the Responses format as a model knows them (functions), and back: the names that its client expects.

A model has one list of functions. A function inside a namespace is called `<namespace>__<name>` there, a custom (free
text) tool is a function with the one argument `input`. What a model calls is given back with its namespace, and as a
custom call with plain text. Tools that OpenAI defines and the client runs are functions too (`client_tools.py`). Tools that only
OpenAI's own servers can run (`web_search`, `tool_search`, …) are dropped and named in `dropped`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from steno.contracts.chat import Tool
from steno.contracts.errors import BadRequest
from steno_proxy.dialects.base import check_wire
from steno_proxy.dialects.refusals import must_be
from steno_proxy.dialects.responses.client_tools import KINDS, kind_of
from steno_proxy.dialects.responses.text import FREE_TEXT

ROOT_NAMESPACE = "functions"
"""What OpenAI's own models call the namespace of tools that have none; what is in it keeps its name."""
_MOST_NAMESAKES = 8
"""Tools of one name in different namespaces; more are refused."""
MAX_NAMESPACE_CHARS = 256
"""Of a namespace's name, which stands before that of each tool in it. OpenAI allows 64 of a name."""
MAX_TAKEN_OVER_BYTES = 2**20
"""Of the tools that a conversation brings along, as JSON: each request that goes on from it may add some more."""
_PARAMETERS = {
    "type": "object",
    "properties": {FREE_TEXT: {"type": "string", "description": "All of the tool's input, as plain text."}},
    "required": [FREE_TEXT],
    "additionalProperties": False,
}


FUNCTION_DEFAULTS: dict[str, Any] = {"description": None, "parameters": None, "strict": False}
"""What a response says of a function where its request said nothing; `strict` is what was in effect."""


class ClientTool(NamedTuple):
    """What a client calls a function of the model's. namespace: "" for none. kind: of a tool that OpenAI defines, its type."""

    namespace: str
    name: str
    custom: bool = False
    kind: str = ""

    def is_same(self, other: ClientTool) -> bool:
        return (self.namespace, self.name, self.kind) == (other.namespace, other.name, other.kind)


@dataclass(slots=True)
class Tools:
    """The tools of one request.

    functions: canonical, in the client's order: first its own, then those among the items of its conversation. own: how many of
    them are its own. places: of those whose name or kind differs for the client.
    dropped: types of the tools that can't be offered, one each. first_dropped: where the first of them stands.
    """

    functions: list[Tool] = field(default_factory=list)
    own: int = 0
    places: dict[str, ClientTool] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    first_dropped: str = ""

    def place(self, function: str) -> ClientTool:
        """What the client calls this function. An unknown function keeps the name that the model used."""
        return self.places.get(function) or ClientTool("", function)

    def function(self, place: ClientTool) -> str:
        """The model's name for a tool that the client calls by `place`, also when the tool is no longer offered."""
        joined = name = joined_name(place)
        if not self.places:
            return joined
        for _ in range(_MOST_NAMESAKES + 1):
            known = self.places.get(name)
            if known is not None and known.is_same(place):
                return name
            name += "_"
        return joined

    def names(self) -> set[str]:
        return {_name_of(tool) for tool in self.functions}

    def carry(self, offered: list[Tool]) -> dict[str, Any]:
        """What a request that goes on from this one's answer needs to know of its tools.

        Args: offered: those of `functions` that the model was offered, which are on record.
        """
        carried = stored_places(self.places)
        if len(self.functions) > self.own:
            names = {_name_of(tool) for tool in offered}
            carried["own_tools"] = sum(_name_of(tool) in names for tool in self.functions[: self.own])
            if left := [tool for tool in self.functions[self.own :] if _name_of(tool) not in names]:
                carried["tools_not_offered"] = left
        return carried

    def take_over(self, carried: Mapping[str, Any], offered: list[Tool]) -> None:
        """Add the tools that the items of the conversation so far brought, between this request's own tools and those among its
        items. A tool of this request replaces an earlier one of the same name.

        Args: carried: `carry` of the request before, empty if an older release recorded it. offered: the tools of that turn.
        Raises: BadRequest: they are more than MAX_TAKEN_OVER_BYTES.
        """
        before = offered[carried.get("own_tools", len(offered)) :] + carried.get("tools_not_offered", [])
        if before and (size := len(msgspec.json.encode(before))) > MAX_TAKEN_OVER_BYTES:
            message = f"the tools among the items of that conversation are {size} bytes, at most {MAX_TAKEN_OVER_BYTES}"
            raise BadRequest(f"previous_response_id: {message}", field="previous_response_id")
        names, places = self.names(), places_on_record(carried)
        before = [tool for tool in before if _name_of(tool) not in names]
        self.functions[self.own : self.own] = before
        self.places |= {name: places[name] for name in map(_name_of, before) if name in places}


def _name_of(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name


def stored_places(places: Mapping[str, ClientTool]) -> dict[str, Any]:
    """As they are kept on record. Kinds have a key of their own, which proxies of earlier releases do not read: those tell such
    tools as functions, by the model's names."""
    plain = {name: list(place[:3]) for name, place in places.items() if not place.kind}
    kinds = {name: place.kind for name, place in places.items() if place.kind}
    return {key: found for key, found in (("places", plain), ("kinds", kinds)) if found}


def places_on_record(kept: Mapping[str, Any]) -> dict[str, ClientTool]:
    """The places that `stored_places` has kept. A kind that a later release brought is a function."""
    places = {name: ClientTool(*place) for name, place in kept.get("places", {}).items()}
    kinds = {name: kind for name, kind in kept.get("kinds", {}).items() if kind in KINDS}
    return places | {name: ClientTool("", kind, kind=kind) for name, kind in kinds.items()}


def tools_in_response(given: list[Any]) -> list[Any]:
    """The tools of a request as its response repeats them: functions with all that their format says of them."""
    told = []
    for tool in given:
        if not isinstance(tool, dict):  # of what is left out anything may be in it
            continue
        if tool.get("type") == "function":
            tool = FUNCTION_DEFAULTS | tool
        elif tool.get("type") == "namespace":
            inner = tool.get("tools")
            tool = tool | {"tools": tools_in_response(inner if isinstance(inner, list) else [])}
        told.append(tool)
    return told


def joined_name(place: ClientTool) -> str:
    if place.namespace in ("", ROOT_NAMESPACE):
        return place.name
    return place.namespace + ("" if place.namespace.endswith("__") else "__") + place.name


def read_tools(given: list[Any], items: Any = None) -> Tools:
    """The tools of a request: its own, then those of `additional_tools` among its items (Codex sends all of its there).

    Raises: BadRequest naming the field: a tool of a known type that is not well-formed, a name that stands for two.
    """
    own = [(f"tools.{i}", tool) for i, tool in enumerate(given)]
    added: list[tuple[str, Any]] = []
    for k, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            if not isinstance(item.get("tools"), list):
                raise BadRequest(f"input.{k}.tools is required", field=f"input.{k}.tools")
            added += [(f"input.{k}.tools.{i}", tool) for i, tool in enumerate(item["tools"])]
    reader = _ToolsReader({tool["name"] for _, tool in (*own, *added) if _plain(tool)})
    for path, tool in own:
        reader.take(path, tool, "", "")
    reader.tools.own = len(reader.tools.functions)
    for path, tool in added:
        reader.take(path, tool, "", "")
    return reader.tools


def _plain(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") in ("function", "custom") and isinstance(tool.get("name"), str)


class _ToolsReader:
    """plain: names of the tools outside namespaces, which keep theirs."""

    def __init__(self, plain: set[str]) -> None:
        self.tools = Tools()
        self._plain = plain
        self._names: set[str] = set()

    def take(self, path: str, tool: Any, namespace: str, about: str) -> None:
        """about: what is said before its description."""
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise BadRequest(f"{path}.type is required", field=f"{path}.type")
        kind = tool["type"]
        if kind == "namespace" and not namespace:
            self._namespace(path, tool)
            return
        if not namespace and (client_kind := kind_of(path, tool)) is not None:
            place = ClientTool("", kind, kind=kind)
            name = self._name(path, place)
            self.tools.places[name] = place
            self.tools.functions.append(client_kind.tool(name))
            return
        if kind not in ("function", "custom"):
            self.tools.first_dropped = self.tools.first_dropped or path
            self.tools.dropped.append(kind)
            return
        place = ClientTool(namespace, _text(path, tool, "name"), kind == "custom")
        name = self._name(path, place)
        if place != ClientTool("", name):
            self.tools.places[name] = place
        function: dict[str, Any] = {"name": name}
        description = about + _text(path, tool, "description", required=False)
        if kind == "custom":
            description += _grammar(tool.get("format"))
        if description or isinstance(tool.get("description"), str):
            function["description"] = description
        parameters = _PARAMETERS if kind == "custom" else tool.get("parameters")
        if parameters is not None:
            if not isinstance(parameters, dict):
                raise must_be("an object", f"{path}.parameters", parameters)
            check_wire(f"{path}.parameters", parameters)
            function["parameters"] = parameters
        if isinstance(tool.get("strict"), bool) and kind == "function":
            function["strict"] = tool["strict"]
        self.tools.functions.append({"type": "function", "function": function})

    def _name(self, path: str, place: ClientTool) -> str:
        name = joined_name(place)
        if place.namespace or place.kind:
            for _ in range(_MOST_NAMESAKES):
                if name not in self._plain and name not in self._names:
                    break
                name += "_"
        if name in self._names:
            raise BadRequest(f"{path}.name: another tool is named {name[:80]!r} already", field=f"{path}.name")
        self._names.add(name)
        return name

    def _namespace(self, path: str, tool: dict[str, Any]) -> None:
        """Its description is said once, before that of its first tool: templates know no namespaces."""
        namespace = _text(path, tool, "name")
        if len(namespace) > MAX_NAMESPACE_CHARS:
            message = f"got {len(namespace)} characters, a namespace has at most {MAX_NAMESPACE_CHARS}"
            raise BadRequest(f"{path}.name: {message}", field=f"{path}.name")
        inner = tool.get("tools")
        if not isinstance(inner, list):
            raise BadRequest(f"{path}.tools is required", field=f"{path}.tools")
        about = _text(path, tool, "description", required=False)
        about = f"[{namespace}: {about}]\n" if about else ""
        for j, one in enumerate(inner):
            before = len(self.tools.functions)
            self.take(f"{path}.tools.{j}", one, namespace, about)
            if len(self.tools.functions) > before:
                about = ""


def _grammar(given: Any) -> str:
    """A grammar can't be enforced here (I1), so the model is told of it."""
    if not isinstance(given, dict) or not isinstance(given.get("definition"), str):
        return ""
    return f"\nThe input follows this grammar ({given.get('syntax') or 'lark'}):\n{given['definition']}"


def _text(path: str, tool: dict[str, Any], key: str, *, required: bool = True) -> str:
    value = tool.get(key)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or (required and not value):
        problem = " is required" if not value else ": expected a string"
        raise BadRequest(f"{path}.{key}{problem}", field=f"{path}.{key}")
    return value


def read_choice(given: Any, tools: Tools) -> tuple[str, list[Tool]]:
    """The canonical tool choice, and the functions left to choose from.

    Raises: BadRequest: a choice that can't be honoured.
    """
    if given is None:
        return "auto", tools.functions
    if isinstance(given, str):
        if given not in ("auto", "none", "required"):
            raise BadRequest(
                f"tool_choice: got {given[:40]!r}, must be one of auto, none, required", field="tool_choice"
            )
        if given == "required" and not tools.functions:
            raise BadRequest("tool_choice: got 'required', but the request has no tools", field="tool_choice")
        return given, tools.functions
    if not isinstance(given, dict):
        raise must_be("a string or an object", "tool_choice", given)
    kind = given.get("type")
    if kind == "allowed_tools":
        return _allowed(given, tools)
    if kind not in ("function", "custom", *KINDS):
        raise must_be(
            "one of function, custom, shell, local_shell, apply_patch, allowed_tools", "tool_choice.type", kind
        )
    name = _named(given, tools)
    if name not in tools.names():
        raise BadRequest(f"tool_choice.name: no tool is named {name[:80]!r}", field="tool_choice.name")
    return f"function:{name}", tools.functions


def _allowed(given: dict[str, Any], tools: Tools) -> tuple[str, list[Tool]]:
    mode, listed = given.get("mode", "auto"), given.get("tools")
    if mode not in ("auto", "required"):
        raise must_be("auto or required", "tool_choice.mode", mode)
    if not isinstance(listed, list):
        raise BadRequest("tool_choice.tools is required", field="tool_choice.tools")
    names = {_named(tool, tools) for tool in listed if isinstance(tool, dict)}
    allowed = [tool for tool in tools.functions if tool["function"]["name"] in names]
    if not allowed:
        raise BadRequest("tool_choice.tools: none of these names is in `tools`", field="tool_choice.tools")
    return mode, allowed


def _named(given: dict[str, Any], tools: Tools) -> str:
    kind = given.get("type")
    if isinstance(kind, str) and kind in KINDS:
        return tools.function(ClientTool("", kind, kind=kind))
    name, namespace = given.get("name"), given.get("namespace")
    return tools.function(
        ClientTool(namespace if isinstance(namespace, str) else "", name if isinstance(name, str) else "")
    )
