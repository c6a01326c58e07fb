"""Tools of the Responses format as a model knows them (functions), and back: the names that its client expects.

A model has one list of functions. A function inside a namespace is called `<namespace>__<name>` there, a custom (free
text) tool is a function with the one argument `input`. What a model calls is given back with its namespace, and as a
custom call with plain text. Tools that only OpenAI's own servers can run (`web_search`, `tool_search`, …) are dropped
and named in `dropped`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from proxy.contracts.canonical import Tool
from proxy.contracts.errors import BadRequest
from proxy.dialects.base import check_wire

FREE_TEXT = "input"
"""The argument of a custom tool's function."""
ROOT_NAMESPACE = "functions"
"""What OpenAI's own models call the namespace of tools that have none; what is in it keeps its name."""
_PARAMETERS = {
    "type": "object",
    "properties": {FREE_TEXT: {"type": "string", "description": "All of the tool's input, as plain text."}},
    "required": [FREE_TEXT],
    "additionalProperties": False,
}


class Place(NamedTuple):
    """What a client calls a function of the model's. namespace: "" for none."""

    namespace: str
    name: str
    custom: bool = False


@dataclass(slots=True)
class Tools:
    """The tools of one request.

    functions: canonical, in the client's order. places: of those whose name or kind differs for the client.
    dropped: types of the tools that can't be offered, one each.
    """

    functions: list[Tool] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def place(self, function: str) -> Place:
        """What the client calls this function; one that there is not is called as the model called it."""
        return self.places.get(function) or Place("", function)

    def function(self, place: Place) -> str:
        """The model's name for what a client calls so, also when the tool is no longer offered."""
        joined = joined_name(place)
        for name in (joined, *(name for name in self.places if name.startswith(joined))):
            known = self.places.get(name)
            if known is not None and known[:2] == place[:2]:
                return name
        return joined

    def names(self) -> set[str]:
        return {tool["function"]["name"] for tool in self.functions}


def joined_name(place: Place) -> str:
    if place.namespace in ("", ROOT_NAMESPACE):
        return place.name
    return place.namespace + ("" if place.namespace.endswith("__") else "__") + place.name


def read_tools(given: list[Any], items: Any = None) -> Tools:
    """The tools of a request: its own, then those of `additional_tools` among its items (Codex sends all of its there).

    Raises: BadRequest naming the field: a tool of a known type that is not well-formed, a name that stands for two.
    """
    found = [(f"tools.{i}", tool) for i, tool in enumerate(given)]
    for k, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            if not isinstance(item.get("tools"), list):
                raise BadRequest(f"input.{k}.tools is required", field=f"input.{k}.tools")
            found += [(f"input.{k}.tools.{i}", tool) for i, tool in enumerate(item["tools"])]
    tools = Tools()
    taken: set[str] = {tool["name"] for _, tool in found if _plain(tool)}
    for path, tool in found:
        _read(path, tool, "", tools, taken, "")
    return tools


def _plain(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") in ("function", "custom") and isinstance(tool.get("name"), str)


def _read(path: str, tool: Any, namespace: str, tools: Tools, taken: set[str], about: str) -> None:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise BadRequest(f"{path}.type is required", field=f"{path}.type")
    kind = tool["type"]
    if kind == "namespace" and not namespace:
        _read_namespace(path, tool, tools, taken)
        return
    if kind not in ("function", "custom"):
        tools.dropped.append(kind)
        return
    place = Place(namespace, _text(path, tool, "name"), kind == "custom")
    name = joined_name(place)
    if namespace:
        while name in taken or name in tools.names():  # a plain tool has this name already
            name += "_"
    elif name in tools.names():
        raise BadRequest(f"{path}.name: two tools are called {name[:80]!r}", field=f"{path}.name")
    taken.add(name)
    if place != (("", name, False)):
        tools.places[name] = place
    function: dict[str, Any] = {"name": name}
    description = about + (_text(path, tool, "description", required=False) or "")
    if kind == "custom":
        description += _grammar(tool.get("format"))
        function["parameters"] = _PARAMETERS
    elif tool.get("parameters") is not None:
        if not isinstance(tool["parameters"], dict):
            raise BadRequest(f"{path}.parameters: expected an object", field=f"{path}.parameters")
        check_wire(f"{path}.parameters", tool["parameters"])
        function["parameters"] = tool["parameters"]
    if description or isinstance(tool.get("description"), str):
        function = {"name": name, "description": description} | function
    if isinstance(tool.get("strict"), bool) and kind == "function":
        function["strict"] = tool["strict"]
    tools.functions.append({"type": "function", "function": function})


def _read_namespace(path: str, tool: dict[str, Any], tools: Tools, taken: set[str]) -> None:
    """Its description is said once, before that of its first tool: templates know no namespaces."""
    namespace = _text(path, tool, "name")
    inner = tool.get("tools")
    if not isinstance(inner, list):
        raise BadRequest(f"{path}.tools is required", field=f"{path}.tools")
    about = _text(path, tool, "description", required=False)
    for j, one in enumerate(inner):
        before = len(tools.functions)
        _read(f"{path}.tools.{j}", one, namespace, tools, taken, f"[{namespace}: {about}]\n" if about else "")
        if len(tools.functions) > before:
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
        problem = "is required" if not value else "expected a string"
        raise BadRequest(f"{path}.{key}: {problem}", field=f"{path}.{key}")
    return value


def read_choice(given: Any, tools: Tools) -> tuple[str, list[Tool]]:
    """The canonical tool choice, and the functions left to choose from.

    Raises: BadRequest: a choice that can't be honoured.
    """
    if given is None:
        return "auto", tools.functions
    if isinstance(given, str):
        if given not in ("auto", "none", "required"):
            raise BadRequest(f"tool_choice: {given[:40]!r} is none of auto, none, required", field="tool_choice")
        if given == "required" and not tools.functions:
            raise BadRequest("tool_choice is required, but there are no tools", field="tool_choice")
        return given, tools.functions
    if not isinstance(given, dict):
        raise BadRequest("tool_choice must be a string or an object", field="tool_choice")
    kind = given.get("type")
    if kind == "allowed_tools":
        return _allowed(given, tools)
    if kind not in ("function", "custom"):
        raise BadRequest("tool_choice.type must be function, custom or allowed_tools", field="tool_choice.type")
    name = _named(given, tools)
    if name not in tools.names():
        raise BadRequest(f"tool_choice names {name[:80]!r}, which is no tool", field="tool_choice.name")
    return f"function:{name}", tools.functions


def _allowed(given: dict[str, Any], tools: Tools) -> tuple[str, list[Tool]]:
    mode, listed = given.get("mode", "auto"), given.get("tools")
    if mode not in ("auto", "required"):
        raise BadRequest("tool_choice.mode must be auto or required", field="tool_choice.mode")
    if not isinstance(listed, list):
        raise BadRequest("tool_choice.tools is required", field="tool_choice.tools")
    names = {_named(tool, tools) for tool in listed if isinstance(tool, dict)}
    allowed = [tool for tool in tools.functions if tool["function"]["name"] in names]
    if not allowed:
        raise BadRequest("tool_choice.tools allows no tool that there is", field="tool_choice.tools")
    return mode, allowed


def _named(given: dict[str, Any], tools: Tools) -> str:
    name, namespace = given.get("name"), given.get("namespace")
    return tools.function(Place(namespace if isinstance(namespace, str) else "", name if isinstance(name, str) else ""))


# -- free text -------------------------------------------------------------------------------------------------------------

_OPENING = f'{{"{FREE_TEXT}":"'
_OPENS = re.compile(rf'\s*\{{\s*"{FREE_TEXT}"\s*:\s*"')
_CLOSED = re.compile(r'((?:[^"\\]|\\.)*)"', re.DOTALL)
_UNFINISHED = re.compile(r"(?:\\u[dD][89abAB][0-9a-fA-F]{2})?\\(?:u[0-9a-fA-F]{0,3})?$|\\u[dD][89abAB][0-9a-fA-F]{2}$")


class FreeText:
    """Reads the text out of `{"input": "…"}` while the arguments are still being sampled.

    Arguments of another shape are their own text (`raw`), since a client must see whatever the model said.
    """

    __slots__ = ("_held", "_open", "raw", "text")

    def __init__(self) -> None:
        self.raw: bool | None = None  # None: can't be told yet
        self.text = ""
        self._held = ""
        self._open = True

    def feed(self, arguments: str) -> str:
        """The next piece of the arguments; returns what of the text can be said now."""
        self._held += arguments
        if self.raw is None:
            bare = re.sub(r"\s", "", self._held[:64])
            if bare.startswith(_OPENING):
                found = _OPENS.match(self._held)
                self.raw = found is None
                self._held = self._held[found.end() :] if found else self._held
            elif not _OPENING.startswith(bare):
                self.raw = True
        return self._said()

    def end(self) -> str:
        """No more arguments; returns what was held back."""
        if self.raw is None:
            self.raw = True
        said = self._said()
        if not self.raw and self._open:
            self._held = ""  # half an escape
        return said

    def _said(self) -> str:
        if self.raw is None or not self._open:
            return ""
        if self.raw:
            said, self._held = self._held, ""
        else:
            closed = _CLOSED.match(self._held)
            if closed:
                said, self._open = _unescaped(closed[1]), False
            else:
                # An escape cut in two waits for its other half; so does half a surrogate pair.
                unfinished = _trailing(self._held)
                said = _unescaped(self._held[: len(self._held) - unfinished])
                self._held = self._held[len(self._held) - unfinished :] if unfinished else ""
        self.text += said
        return said


def _trailing(text: str) -> int:
    """How many characters at the end are an escape that is not whole."""
    backslashes = len(text) - len(text.rstrip("\\"))
    if backslashes % 2 == 0 and backslashes:
        return 0
    found = _UNFINISHED.search(text)
    if found is None:
        return 0
    before = text[: found.start()]
    if (len(before) - len(before.rstrip("\\"))) % 2:  # the backslash found is itself escaped
        return 0
    return len(text) - found.start()


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:  # an escape that is none: the model's own words
        return text


def free_text(arguments: str) -> tuple[str, bool]:
    """Text and `raw` of whole arguments."""
    reader = FreeText()
    reader.feed(arguments)
    reader.end()
    return reader.text, bool(reader.raw)
