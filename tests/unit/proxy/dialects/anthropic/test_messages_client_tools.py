"""Tools that Anthropic defines and the client runs are offered to the model with a schema; what the provider runs is left out."""

from __future__ import annotations

import json
from typing import Any

import anthropic.types as sdk
import anthropic.types.beta as beta
import jsonschema
import pytest
import typing_extensions as typing
from anthropic.types.beta import beta_memory_tool_20250818_command as memory

from steno.contracts.errors import BadRequest
from steno_proxy.dialects.anthropic.dialect import MessagesDialect

SCREEN = {"display_width_px": 1024, "display_height_px": 768}


def offered(*tools: dict[str, Any], **fields: Any) -> Any:
    messages = [{"role": "user", "content": "go"}]
    return MessagesDialect().parse(
        json.dumps({"max_tokens": 9, "messages": messages, "tools": tools} | fields).encode()
    )


def of_the_sdk() -> list[dict[str, Any]]:
    """One of each tool that the SDK knows with a fixed name, and no schema of its own."""
    found = {}
    for module in (sdk, beta):
        for one in vars(module).values():
            hints = typing.get_type_hints(one) if typing.is_typeddict(one) and "Tool" in one.__name__ else {}
            kind, name = typing.get_args(hints.get("type")), typing.get_args(hints.get("name"))
            if kind and name and "input_schema" not in hints:
                found[kind[0]] = {"type": kind[0], "name": name[0]} | (SCREEN if "display_width_px" in hints else {})
    return list(found.values())


def test_every_tool_of_the_sdk_is_offered_or_named_as_left_out() -> None:
    tools = of_the_sdk()
    assert len(tools) > 15
    request = offered(*tools)
    run_by_the_client = [
        tool for tool in tools if tool["type"].startswith(("bash_2", "text_editor_2", "memory_2", "computer_2"))
    ]
    names = {tool["type"].rpartition("_")[0] for tool in run_by_the_client}
    assert names == {"bash", "text_editor", "memory", "computer"}
    assert [tool["function"]["name"] for tool in request.job.tools] == [tool["name"] for tool in run_by_the_client]
    left = [tool["type"] for tool in tools if tool not in run_by_the_client]
    assert request.dropped == left and any(kind.startswith("web_search_") for kind in left)
    for tool in request.job.tools:
        assert len(tool["function"]["description"]) > 50
        jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])


CALLS = {
    "bash_20250124": [{"command": "ls"}, {"restart": True}],
    "text_editor_20250728": [
        {"command": "view", "path": "/a", "view_range": [1, -1]},
        {"command": "create", "path": "/a", "file_text": "x"},
        {"command": "str_replace", "path": "/a", "old_str": "x", "new_str": "y"},
        {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"},
    ],
    "text_editor_20250124": [
        {"command": "insert", "path": "/a", "insert_line": 0, "new_str": "x"}, {"command": "undo_edit", "path": "/a"},
    ],
    "computer_20250124": [
        {"action": "screenshot"}, {"action": "left_click", "coordinate": [1, 2]}, {"action": "key", "text": "ctrl+s"},
        {"action": "scroll", "coordinate": [1, 2], "scroll_direction": "down", "scroll_amount": 3},
        {"action": "wait", "duration": 1},
    ],
    "computer_20251124": [{"action": "zoom", "region": [0, 0, 9, 9]}],
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_what_their_clients_understand_can_be_said(kind: str) -> None:
    tool = {"type": kind, "name": "t", "enable_zoom": True, "max_characters": 100} | (
        SCREEN if "computer" in kind else {}
    )
    [function] = [tool["function"] for tool in offered(tool).job.tools]
    for call in CALLS[kind]:
        jsonschema.validate(call, function["parameters"])
        assert call.keys() <= function["parameters"]["properties"].keys()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"command": 1, "action": 1}, function["parameters"])


def test_the_memory_tools_commands_are_those_of_the_sdk() -> None:
    [tool] = offered({"type": "memory_20250818", "name": "memory"}).job.tools
    said = tool["function"]["parameters"]["properties"]
    commands = typing.get_args(typing.get_args(memory.BetaMemoryTool20250818Command)[0])
    fields = {name for command in commands for name in command.model_fields}
    assert said.keys() == fields
    assert set(said["command"]["enum"]) == {
        typing.get_args(one.model_fields["command"].annotation)[0] for one in commands
    }


def test_one_can_be_chosen_and_a_bad_one_is_refused_by_its_field() -> None:
    bash = {"type": "bash_20250124", "name": "bash", "strict": True}
    chosen = offered(bash, tool_choice={"type": "tool", "name": "bash"}).job
    assert chosen.tool_choice == "function:bash" and chosen.tools[0]["function"]["strict"] is True
    for tool, field in (
        ({"type": "bash_20250124"}, "tools.0.name"),
        ({"type": "computer_20250124", "name": "computer"}, "tools.0.display_width_px"),
        (
            {"type": "computer_20250124", "name": "computer"} | SCREEN | {"display_height_px": "x"},
            "tools.0.display_height_px",
        ),
    ):
        with pytest.raises(BadRequest) as refused:
            offered(tool)
        assert refused.value.field == field
