"""Tools of the Responses format that OpenAI defines and a request's client runs: `local_shell`, `apply_patch` and `shell` where
its environment is local. A request names them without a schema, since OpenAI's models were taught them; any other model has to be
told what they take, and calls them as functions. Their calls are items of their own, with what was called as an object in it, so
the function's arguments become that object and come back from it.

Where arguments are not what the tool takes, the call is told as a `function_call` with the arguments as sampled: its client must
not run what nobody said. Where only their spelling differs (one command that is no list, an option of the wrong type), the item
holds what can be run, and the arguments as sampled beside it under ARGUMENTS, which the Agents SDK sends back. Of clients that do
not, `sessions` tells such a call by what is run of it, as `steno/contracts/client_functions.py` says, which has the schemas.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from steno.contracts.chat import Tool
from steno.contracts.client_functions import APPLY_PATCH, LOCAL_SHELL, SHELL, ClientFunction
from steno.contracts.errors import BadRequest
from steno_proxy.dialects.refusals import COMPUTERS, must_be, not_by_screenshots

Json = dict[str, Any]
ARGUMENTS = "arguments"
_COMPUTER_CALLS = frozenset({"computer_call", "computer_call_output"})
_RESULTS = ("stdout", "stderr", "outcome")
"""Of one command's output."""
_LOCAL = {"type": "local"}


@dataclass(frozen=True)
class ClientKind:
    """One such tool. name: its type, and the function's name. prefix: of its items' ids. member: the field of an item that holds
    what was called. function: what a model is offered; it makes the member. plain: values of a member that arguments may omit."""

    name: str
    prefix: str
    member: str
    description: str
    function: ClientFunction
    plain: Json

    @property
    def call(self) -> str:
        return f"{self.name}_call"

    def tool(self, name: str) -> Tool:
        """The function. Args: name: the function's; another one than `self.name` if another tool has that name."""
        function = {"name": name, "description": self.description, "parameters": dict(self.function.schema)}
        return {"type": "function", "function": function}

    def item(self, turn_id: str, index: int, call_id: str, arguments: str, status: str) -> Json | None:
        """The item of a call; None: its arguments are not what the tool takes."""
        given = _object(arguments)
        made = self.function.run(given) if given is not None else None
        if made is None:
            return None
        item: Json = {
            "id": f"{self.prefix}_{turn_id}_{index}",
            "type": self.call,
            "call_id": call_id,
            self.member: made,
        }
        if self.name == "shell":
            item["environment"] = _LOCAL
        if self._said(made) != given:
            item[ARGUMENTS] = arguments
        return item | {"status": "in_progress" if self.name == "apply_patch" and status == "incomplete" else status}

    def arguments(self, path: str, item: Json) -> str:
        """The arguments of a call that a history contains. Raises: BadRequest naming the field."""
        sampled, made = item.get(ARGUMENTS), item.get(self.member)
        if isinstance(sampled, str):
            return sampled
        if not isinstance(made, dict):
            raise must_be("an object", f"{path}.{self.member}", made)
        return json.dumps(self._said(made), ensure_ascii=False, separators=(",", ":"))

    def _said(self, made: Json) -> Json:
        return {k: v for k, v in made.items() if v is not None and (k not in self.plain or self.plain[k] != v)}


KINDS = {
    kind.name: kind
    for kind in (
        ClientKind(
            "shell", "sh", "action",
            "Run shell commands, each by itself and in their order, and get what each wrote and how it ended.",
            SHELL, {},
        ),
        ClientKind(
            "local_shell", "lsh", "action",
            "Run one command, and get what it wrote.",
            LOCAL_SHELL, {"type": "exec", "env": {}},
        ),
        ClientKind(
            "apply_patch", "apc", "operation",
            "Create, change or delete one file. In the diff of a new file each line begins with +. A diff of a change has a part "
            "for each place: a line @@, and after it, if that helps to find the place, a space and a line of the file above it; "
            "then lines of the file around the change as they are, each after a space, lines to remove after -, and new ones "
            "after +. No line numbers, no headers of files.",
            APPLY_PATCH, {},
        ),
    )
}  # fmt: skip
CALLS = {kind.call: kind for kind in KINDS.values()}
OUTPUTS = frozenset(f"{kind.call}_output" for kind in KINDS.values())


def kind_of(path: str, tool: Json) -> ClientKind | None:
    """None: the provider runs it, or it is none of these. Raises: BadRequest: the client runs it, and it can't be offered."""
    name = tool["type"]
    if name in COMPUTERS:
        raise not_by_screenshots(path, name)
    return None if is_hosted(tool) else KINDS.get(name)


def is_hosted(given: Json) -> bool:
    """Whether a shell, or a call of it, is in one of the provider's containers."""
    where = given.get("environment")
    return isinstance(where, dict) and str(where.get("type", "")).startswith("container")


def check_item(path: str, kind: str) -> None:
    """Raises: BadRequest: the item is of a tool that can't be offered. Leaving it out would change the history."""
    if kind in _COMPUTER_CALLS:
        raise BadRequest(f"{path}.type: got {kind!r}: computer tools are not supported", field=f"{path}.type")


def is_content(output: Any) -> bool:
    """Whether an output is a list of content parts, as a function's output may be, and not a list of command outputs."""
    return isinstance(output, list) and any(
        isinstance(one, dict) and "type" in one and not any(name in one for name in _RESULTS) for one in output
    )


def output_text(path: str, item: Json, output: Any) -> str:
    """What the client says of a call. Args: output: as in the item, or the text of it. Raises: BadRequest naming the field."""
    at = f"{path}.output"
    if isinstance(output, list):
        return "\n".join(_told(f"{at}.{i}", one) for i, one in enumerate(output))
    if not isinstance(output, str | None):
        raise must_be("a string or a list of outputs", at, output)
    text = output or ""
    if item.get("status") == "failed" and "error" not in text[:64].lower():
        text = f"Error: {text}"
    return text or ("Done." if item["type"] == "apply_patch_call_output" else "")


def _told(path: str, one: Any) -> str:
    if not isinstance(one, dict) or not any(name in one for name in _RESULTS):
        raise must_be("an object with stdout, stderr or outcome", path, one)
    told = [text for name in ("stdout", "stderr") if isinstance(text := one.get(name), str) and text]
    ended = one.get("outcome")
    if isinstance(ended, dict) and ended.get("type") == "timeout":
        told.append("(timed out)")
    elif isinstance(ended, dict) and ended.get("exit_code"):
        told.append(f"(exit code {ended['exit_code']})")
    return "\n".join(told)


def _object(arguments: str) -> Json | None:
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
