"""Functions that stand for the tools which OpenAI defines and the client runs: their schemas, and what a client runs for a
call's arguments. Models write one call in several ways, and clients send back what they ran: two calls for which a client runs
the same count as one call. The dialect (`dialects/responses/client_tools.py`) knows these tools in requests and answers. Pure.

Schemas follow OpenAI's public description of each tool; the words are our own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
OPERATIONS = ("create_file", "update_file", "delete_file")
_LARGEST = 2**63
"""Of integers that are written as 9.0."""


@dataclass(frozen=True)
class ClientFunction:
    """One such function. schema: of its arguments; no other function has the same. run: arguments -> what the client runs for
    them; None: the tool does not take them."""

    schema: Json
    run: Callable[[Json], Json | None]


def runs_the_same(said: Json, given: Json, schema: Any) -> bool:
    """Whether a client runs the same for both arguments. schema: of the called function; False if it is no function of this
    module."""
    for function in (SHELL, LOCAL_SHELL, APPLY_PATCH):
        if function.schema == schema:
            found = function.run(given)
            return found is not None and found == function.run(said)
    return False


def _shell(given: Json) -> Json | None:
    commands = given.get("commands")
    commands = [commands] if isinstance(commands, str) else commands
    if not _are_texts(commands):
        return None
    return {"commands": commands} | _numbers(given, "timeout_ms", "max_output_length")


def _local_shell(given: Json) -> Json | None:
    command = given.get("command")
    command = ["bash", "-lc", command] if isinstance(command, str) else command
    if not _are_texts(command):
        return None
    env = given.get("env")
    holds = isinstance(env, dict) and all(isinstance(value, str) for value in env.values())
    action: Json = {"type": "exec", "command": command, "env": env if holds else {}} | _numbers(given, "timeout_ms")
    if isinstance(given.get("working_directory"), str):
        action["working_directory"] = given["working_directory"]
    return action


def _apply_patch(given: Json) -> Json | None:
    kind, path, diff = given.get("type"), given.get("path"), given.get("diff")
    if kind not in OPERATIONS or not isinstance(path, str) or not path:
        return None
    if kind == "delete_file":
        return {"type": kind, "path": path}
    return {"type": kind, "path": path, "diff": diff} if isinstance(diff, str) and diff else None


def _are_texts(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(one, str) for one in given)


def _numbers(given: Json, *names: str) -> Json:
    found = {name: _whole(given.get(name)) for name in names}
    return {name: n for name, n in found.items() if isinstance(n, int) and not isinstance(n, bool) and n > 0}


def _whole(value: Any) -> Any:
    """The integer that a float is; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST else value


def _text(description: str) -> Json:
    return {"type": "string", "description": description}


def _number(description: str) -> Json:
    return {"type": "integer", "description": description}


def _texts(description: str) -> Json:
    return {"type": "array", "items": {"type": "string"}, "minItems": 1, "description": description}


def _schema(required: list[str], properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": required}


SHELL = ClientFunction(
    _schema(["commands"], {
        "commands": _texts("The commands to run."),
        "timeout_ms": _number("Milliseconds after which a command is ended."),
        "max_output_length": _number("The most characters of output to be shown."),
    }),
    _shell,
)  # fmt: skip
LOCAL_SHELL = ClientFunction(
    _schema(["command"], {
        "command": _texts('The program and its arguments, such as ["bash", "-lc", "ls"].'),
        "working_directory": _text("Where to run it."),
        "env": {"type": "object", "additionalProperties": {"type": "string"}, "description": "Variables to set."},
        "timeout_ms": _number("Milliseconds after which it is ended."),
    }),
    _local_shell,
)  # fmt: skip
APPLY_PATCH = ClientFunction(
    _schema(["type", "path"], {
        "type": {"type": "string", "enum": list(OPERATIONS)},
        "path": _text("The file."),
        "diff": _text("For create_file and update_file."),
    }),
    _apply_patch,
)  # fmt: skip
