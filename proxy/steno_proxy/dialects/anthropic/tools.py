"""Tools that Anthropic defines and a request's client runs: `bash_*`, `text_editor_*`, `memory_*` and `computer_*`. A request
names them without a schema, since the provider's models were taught them; any other model has to be told what they take.

Schemas follow the provider's public description of each, the words are our own. What the provider runs itself (`web_search_*`,
`code_execution_*`) is not here: there is nobody to run it.
"""

from __future__ import annotations

import re
from typing import Any

from steno.contracts.chat import Tool
from steno.contracts.errors import BadRequest
from steno_proxy.dialects.bounds import integral
from steno_proxy.dialects.refusals import must_be

_VERSIONED = re.compile(r"(bash|text_editor|memory|computer)_([0-9]{8})")
_UNDO_UNTIL = "20250124"
"""The last text editor with `undo_edit`."""
_ZOOM_FROM = "20251124"
_TEXT: dict[str, Any] = {"type": "string"}
_LINES: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "For view of a file: first and last line to show, from 1; -1 as the last is the end of the file.",
}


def client_tool(path: str, given: dict[str, Any]) -> Tool | None:
    """The function that a model is offered for a tool which Anthropic defines; None: it is none that a client runs.

    Raises: BadRequest naming the field.
    """
    kind = given.get("type")
    found = _VERSIONED.fullmatch(kind) if isinstance(kind, str) else None
    if found is None:
        return None
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{path}.name is required", field=f"{path}.name")
    family, version = found.groups()
    if family == "bash":
        description, properties, required = _BASH
    elif family == "text_editor":
        description, properties, required = _editor(version, given.get("max_characters"))
    elif family == "memory":
        description, properties, required = _MEMORY
    else:
        description, properties, required = _computer(path, version, given)
    schema = {"type": "object", "properties": properties, "required": required}
    function: dict[str, Any] = {"name": name, "description": description, "parameters": schema}
    if isinstance(strict := given.get("strict"), bool):
        function["strict"] = strict
    return {"type": "function", "function": function}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _described(text: str, kind: str = "string") -> dict[str, Any]:
    return {"type": kind, "description": text}


_BASH = (
    "Run a command in a bash shell that stays open: its working directory, variables and background jobs are there for the next "
    "command. Give `command`, or `restart` to begin with a new shell.",
    {
        "command": _described("The command to run. Needed unless restart is true."),
        "restart": _described("True: end the shell and begin a new one.", "boolean"),
    },
    list[str](),
)
_FILE_FIELDS: dict[str, Any] = {
    "file_text": _described("For create: all of the file's text."),
    "insert_line": _described(
        "For insert: the line after which the text goes; 0 is the beginning of the file.", "integer"
    ),
    "view_range": _LINES,
}
_REPLACED: dict[str, Any] = {
    "old_str": _described("For str_replace: the text to replace. It must stand in the file exactly once.")
}
_MEMORY = (
    "Files that you keep between conversations, under /memories. `view` shows a folder or a file, `create` writes a file, "
    "`str_replace` and `insert` change one, `delete` removes a file or a folder, `rename` moves it. Look there before you begin, "
    "and write down what will be needed later.",
    {
        "command": _one_of("view", "create", "str_replace", "insert", "delete", "rename"),
        "path": _described("A path under /memories. Needed by all but rename."),
        **_FILE_FIELDS,
        **_REPLACED,
        "new_str": _described("For str_replace: what comes in its place."),
        "insert_text": _described("For insert: the text."),
        "old_path": _described("For rename: the path as it is."),
        "new_path": _described("For rename: the path as it shall be."),
    },
    ["command"],
)


def _editor(version: str, most: Any) -> tuple[str, dict[str, Any], list[str]]:
    most = integral(most)
    commands = ["view", "create", "str_replace", "insert"]
    undo = version <= _UNDO_UNTIL
    description = (
        "View, create and change text files. `view` shows a file with line numbers, or lists a folder; `create` writes a whole "
        "file; `str_replace` replaces a text that stands in the file exactly once; `insert` puts text after a line"
    )
    if undo:
        commands.append("undo_edit")
        description += "; `undo_edit` takes the last change of a file back"
    description += "."
    if isinstance(most, int) and not isinstance(most, bool):
        description += f" A file is shown up to {most} characters."
    # The provider's own newer editors take the text of an insert as `insert_text`, the older ones as `new_str`.
    new = {"new_str": _described("For str_replace: what comes in its place; nothing if left out.")}
    if version > _UNDO_UNTIL:
        new["insert_text"] = _described("For insert: the text.")
    else:
        new["new_str"] = _described("For str_replace: what comes in its place. For insert: the text.")
    properties = {
        "command": _one_of(*commands),
        "path": _described("Absolute path of the file or folder."),
        **_FILE_FIELDS,
        **_REPLACED,
        **new,
    }
    return description, properties, ["command", "path"]


_MOUSE = ("left_click", "right_click", "middle_click", "double_click", "triple_click", "left_click_drag", "mouse_move")
_FIRST_ACTIONS = frozenset(
    {"key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click", "screenshot",
     "cursor_position"}
)  # fmt: skip
_ACTIONS = (
    "key", "type", *_MOUSE, "screenshot", "cursor_position", "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait",
)  # fmt: skip


def _computer(path: str, version: str, given: dict[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    sizes = []
    for name in ("display_width_px", "display_height_px"):
        value = integral(given.get(name))
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**31 - 1:
            raise must_be("a number of pixels", f"{path}.{name}", value)
        sizes.append(value)
    first = version == "20241022"
    actions = [action for action in _ACTIONS if not first or action in _FIRST_ACTIONS]
    point = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    properties: dict[str, Any] = {
        "action": _one_of(*actions),
        "coordinate": point
        | {"description": "For clicks, mouse_move, scroll and the end of left_click_drag: x, y in pixels."},
        "text": _described("For type: the text. For key and hold_key: the key, or keys joined by +, such as ctrl+s."),
    }
    if not first:
        properties |= {
            "start_coordinate": point | {"description": "For left_click_drag: where it begins."},
            "scroll_direction": _one_of("up", "down", "left", "right"),
            "scroll_amount": _described("For scroll: how many clicks of the wheel.", "integer"),
            "duration": _described("For hold_key and wait: seconds.", "number"),
        }
    if version >= _ZOOM_FROM and given.get("enable_zoom") is True:
        properties["action"]["enum"].append("zoom")
        region = point | {"minItems": 4, "maxItems": 4, "description": "For zoom: x, y of two opposite corners."}
        properties["region"] = region
    description = (
        f"A screen of {sizes[0]} x {sizes[1]} pixels, with a mouse and a keyboard. (0, 0) is its upper left corner. Take a "
        "`screenshot` to see what is there, before the first click and after each that may have changed it."
    )
    return description, properties, ["action"]
