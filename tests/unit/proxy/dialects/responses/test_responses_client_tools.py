"""Tools that OpenAI defines and the client runs: offered as functions, and their calls are items of their own, there and back."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai.types.responses import (
    Response,
    ResponseApplyPatchToolCall,
    ResponseFunctionShellToolCall,
    ResponseFunctionToolCall,
    ResponseOutputItem,
)
from openai.types.responses.response_output_item import LocalShellCall
from pydantic import TypeAdapter

from steno.contracts.chat import ToolCallPiece
from steno.contracts.records import Timings, Turn
from steno_proxy.dialects.base import Piece
from steno_proxy.dialects.responses.client_tools import KINDS
from steno_proxy.dialects.responses.stored import input_items, stored_body
from steno_proxy.dialects.responses.tools import ClientTool
from steno_proxy.sessions.messages.echoes import Echo, EchoedAs, echo_of
from steno_proxy.sessions.messages.normalise import message_digest
from tests.unit.proxy.dialects.responses.test_responses import TURN, USER, F, messages, parse, refused
from tests.unit.proxy.dialects.responses.test_responses_events import EVENT, HEADER, RESPONSES, choice, stream

TOOLS: list[Any] = [
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "local_shell"},
    {"type": "apply_patch"},
]
TYPES = {
    "shell": ResponseFunctionShellToolCall,
    "local_shell": LocalShellCall,
    "apply_patch": ResponseApplyPatchToolCall,
}
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
MADE = [
    ("shell", '{"commands": ["ls", "pwd"]}', {"commands": ["ls", "pwd"]}),
    ("shell", '{"commands":["ls"],"timeout_ms":9.0,"max_output_length":5}', {
        "commands": ["ls"], "timeout_ms": 9, "max_output_length": 5}),
    ("shell", '{"commands":"ls","timeout_ms":"soon"}', {"commands": ["ls"]}),
    ("local_shell", '{"command":["ls"]}', {"type": "exec", "command": ["ls"], "env": {}}),
    ("local_shell", '{"command":"ls | wc","working_directory":"/a","env":{"A":"b"}}', {
        "type": "exec", "command": ["bash", "-lc", "ls | wc"], "env": {"A": "b"}, "working_directory": "/a"}),
    ("apply_patch", '{"type":"update_file","path":"a","diff":"@@\\n-a\\n+b"}', {
        "type": "update_file", "path": "a", "diff": "@@\n-a\n+b"}),
    ("apply_patch", '{"type":"delete_file","path":"a","diff":""}', {"type": "delete_file", "path": "a"}),
]  # fmt: skip
SPELLED = [
    ("local_shell", '{"command":"ls"}'), ("local_shell", '{"command":["ls"],"env":{}}'),
    ("local_shell", '{"command":["ls"],"env":{"A":1}}'), ("local_shell", '{"command":["ls"],"timeout_ms":0}'),
    ("local_shell", '{"command":["ls"],"timeout_ms":"1000"}'), ("shell", '{"commands":"ls","timeout_ms":5}'),
    ("shell", '{"commands":["ls"],"why":"to see"}'), ("apply_patch", '{"type":"delete_file","path":"a","diff":""}'),
]  # fmt: skip
"""Arguments that an item says in other words."""
UNFIT = [
    ("shell", "ls"), ("shell", '{"commands": []}'), ("shell", '{"commands": [1]}'), ("shell", '{"commands": ["l'),
    ("local_shell", "[]"), ("local_shell", '{"cmd": "ls"}'), ("apply_patch", '{"type":"move","path":"a"}'),
    ("apply_patch", '{"type":"create_file","path":"a"}'), ("apply_patch", '{"type":"delete_file","path":""}'),
]  # fmt: skip


def reply(name: str, arguments: str) -> dict[str, Any]:
    call = {"id": f"call_{TURN}_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def told(name: str, arguments: str, reason: str = "tool_calls", tools: list[Any] = TOOLS) -> dict[str, Any]:
    """The item of a call, the same streamed and in one piece."""
    request, done = parse(tools=tools), choice(reply(name, arguments), reason)
    whole = json.loads(RESPONSES.answer(request, HEADER, [done]))
    Response.model_validate(whole)
    cut = len(arguments) // 2
    pieces = [
        Piece(tool_calls=[ToolCallPiece(0, arguments[:cut], f"call_{TURN}_0", name)]),
        Piece(tool_calls=[ToolCallPiece(0, arguments[cut:])]),
    ]
    found, _ = stream(request, pieces, done)
    for event in found:
        EVENT.validate_python(event)
    [item] = whole["output"]
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == [item]
    assert sum(event["type"] == "response.output_item.added" for event in found) == 1
    return dict(item)


def test_they_are_offered_with_a_schema_and_hosted_ones_are_left_out() -> None:
    hosted = {"type": "shell", "environment": {"type": "container_auto"}}
    request = parse(tools=[*TOOLS, {"type": "web_search"}])
    assert [tool["function"]["name"] for tool in request.job.tools] == ["shell", "local_shell", "apply_patch"]
    assert request.dropped == ["web_search"]
    for tool in request.job.tools:
        jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])
    for name, arguments, _ in MADE:
        if "soon" not in arguments and '":"ls' not in arguments:
            jsonschema.validate(json.loads(arguments), KINDS[name].tool(name)["function"]["parameters"])
    assert parse(tools=[F, hosted]).dropped == ["shell"] and refused(tools=[hosted]).field == "tools.0.type"
    assert refused(tools=[F, {"type": "computer_use_preview"}]).field == "tools.1.type"


def test_they_can_be_chosen_by_their_type_and_keep_apart_from_functions_of_their_name() -> None:
    assert parse(tools=TOOLS, tool_choice={"type": "apply_patch"}).job.tool_choice == "function:apply_patch"
    allowed = {"type": "allowed_tools", "tools": [{"type": "shell"}]}
    assert [tool["function"]["name"] for tool in parse(tools=TOOLS, tool_choice=allowed).job.tools] == ["shell"]
    own = F | {"name": "shell"}
    calls = [
        {"type": "function_call", "call_id": "a", "name": "shell", "arguments": "{}"},
        {"type": "shell_call", "call_id": "b", "action": {"commands": ["ls"]}},
    ]
    request = parse([USER, *calls], tools=[{"type": "shell"}, own])
    assert [tool["function"]["name"] for tool in request.job.tools] == ["shell_", "shell"]
    assert [call["function"]["name"] for call in request.job.messages[1]["tool_calls"]] == ["shell", "shell_"]


@pytest.mark.parametrize(("name", "arguments", "made"), MADE)
def test_a_call_is_an_item_of_its_own_and_stands_for_what_was_sampled(name: str, arguments: str, made: Any) -> None:
    item = told(name, arguments)
    assert item[KINDS[name].member] == made and item["status"] == "completed"
    assert isinstance(ITEM.validate_python(item), TYPES[name])
    echoed = TypeAdapter(TYPES[name]).validate_python(item).model_dump(exclude_unset=True)
    [message] = messages(echoed, tools=TOOLS)
    assert message_digest(message) == message_digest(reply(name, arguments))
    assert message["tool_calls"][0]["id"] == f"call_{TURN}_0"


@pytest.mark.parametrize(("name", "arguments"), SPELLED)
def test_a_call_of_which_only_the_item_comes_back_is_that_call(name: str, arguments: str) -> None:
    """Codex's local_shell has no field for what was sampled, and says null of what it has not."""
    item, sampled, member = told(name, arguments), reply(name, arguments), KINDS[name].member
    offered = parse(tools=TOOLS).job.tools
    del item["arguments"]
    item[member] |= {key: None for key in ("timeout_ms", "working_directory", "user") if key not in item[member]}

    def echo(given: dict[str, Any], tools: Any = offered) -> Echo | None:
        return echo_of(messages(given, tools=TOOLS)[0], sampled, TURN, partial=False, tools=tools)

    found = echo(item)
    assert found is not None and (found.how, found.reply) == (EchoedAs.CALL_IDS, sampled)
    other = {"command": ["pwd"], "commands": ["pwd"], "path": "b"}
    assert echo(item | {member: {key: other.get(key, value) for key, value in item[member].items()}}) is None
    assert name == "apply_patch" or echo(item | {member: item[member] | {"timeout_ms": 7}}) is None
    own = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]
    assert echo(item, own) is None, "a function of the client's that has its name"


@pytest.mark.parametrize(("name", "arguments"), UNFIT)
def test_arguments_that_the_tool_does_not_take_are_told_as_sampled(name: str, arguments: str) -> None:
    item = told(name, arguments, "length")
    ResponseFunctionToolCall.model_validate(item)
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", name, arguments)
    assert messages(item, tools=TOOLS)[0]["tool_calls"][0]["function"] == {"name": name, "arguments": arguments}


def test_such_a_call_is_not_told_as_one_of_the_clients_own_function() -> None:
    tools = [{"type": "shell"}, F | {"name": "shell"}]
    assert told("shell_", '{"commands":["ls"]}', tools=tools)["type"] == "shell_call"
    item = told("shell_", "ls", tools=tools)
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "shell_", "ls")
    assert messages(item, tools=tools)[0]["tool_calls"] == reply("shell_", "ls")["tool_calls"]
    assert told("shell", "{}", tools=tools)["name"] == "shell"


@pytest.mark.parametrize(("item", "text"), [
    ({"type": "shell_call_output", "output": [
        {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
        {"stdout": "", "stderr": "no", "outcome": {"type": "exit", "exit_code": 2}},
        {"stdout": "b", "stderr": "", "outcome": {"type": "timeout"}}]}, "a\n\nno\n(exit code 2)\nb\n(timed out)"),
    ({"type": "shell_call_output", "output": "a"}, "a"),
    ({"type": "local_shell_call_output", "output": "a"}, "a"),
    ({"type": "apply_patch_call_output", "status": "completed"}, "Done."),
    ({"type": "apply_patch_call_output", "status": "failed", "output": "no such file"}, "Error: no such file"),
    ({"type": "shell_call_output", "output": [{"type": "input_text", "text": "a"}]}, "a"),
    ({"type": "shell_call_output", "output": [{"type": "chunk", "stdout": "a"}]}, "a"),
    ({"type": "shell_call_output", "output": []}, ""),
    ({"type": "apply_patch_call_output", "status": "failed", "output": [{"type": "output_text", "text": "no"}]},
     "Error: no"),
])  # fmt: skip
def test_outputs_are_messages_of_their_tools(item: dict[str, Any], text: str) -> None:
    assert messages(item | {"call_id": "c"}) == [{"role": "tool", "content": text, "tool_call_id": "c"}]


def test_outputs_may_be_texts_and_images() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "https://a/b.png"}]
    for name in KINDS:
        request = parse([USER, {"type": f"{name}_call_output", "call_id": "c", "output": parts}])
        plain = parse([USER, {"type": "function_call_output", "call_id": "c", "output": parts}])
        assert request.job == plain.job and request.images == plain.images == ["input.1.output.1.image_url"]


def test_what_the_provider_ran_is_left_out_with_its_output() -> None:
    call = {"type": "shell_call", "call_id": "c", "action": {}, "environment": {"type": "container_reference"}}
    request = parse([USER, call, {"type": "shell_call_output", "call_id": "c", "output": []}])
    assert request.job.messages == [USER] and request.dropped == ["shell_call", "shell_call_output"]


@pytest.mark.parametrize(("item", "field"), [
    ({"type": "shell_call", "action": {"commands": []}}, "input.1.call_id"),
    ({"type": "shell_call", "call_id": "c"}, "input.1.action"),
    ({"type": "apply_patch_call", "call_id": "c", "operation": "x"}, "input.1.operation"),
    ({"type": "shell_call_output", "call_id": "c", "output": 3}, "input.1.output"),
    ({"type": "shell_call_output", "call_id": "c", "output": ["a"]}, "input.1.output.0"),
    ({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}, {"text": "b"}]}, "input.1.output.1"),
    ({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}, {"type": "input_text", "text": "b"}]},
     "input.1.output.0.type"),
    ({"type": "apply_patch_call_output", "call_id": "c", "output": [{"type": "file"}]}, "input.1.output.0.type"),
    ({"type": "computer_call", "call_id": "c"}, "input.1.type"),
])  # fmt: skip
def test_items_that_can_not_be_read_are_refused_by_name(item: dict[str, Any], field: str) -> None:
    assert refused([USER, item]).field == field


def stored(request: Any, said: dict[str, Any], **kept: Any) -> dict[str, Any]:
    turn = Turn(turn_id=TURN, tools=request.job.tools, reply=said, timings=Timings(queued=1.0))
    body = json.loads(stored_body(turn, request.kept | kept, []))
    Response.model_validate(body)
    return dict(body)


def test_a_stored_response_and_its_items_know_them_again() -> None:
    request, said = parse(tools=[*TOOLS, F, F | {"name": "shell"}]), reply("shell_", '{"commands":["ls"]}')
    body = stored(request, said)
    assert [tool["type"] for tool in body["tools"]] == ["shell", "local_shell", "apply_patch", "function", "function"]
    assert body["output"][0]["type"] == "shell_call"
    places = {name: ClientTool(*place) for name, place in request.kept.get("places", {}).items()}
    listed = input_items(TURN, [said], places)
    assert [(item["type"], item["name"]) for item in listed] == [("function_call", "shell_")]


def test_releases_before_and_after_can_tell_a_stored_response_of_them() -> None:
    """An earlier one makes a place of three fields."""
    request, said = parse(tools=[*TOOLS, {"type": "custom", "name": "c"}]), reply("shell", '{"commands":["ls"]}')
    assert request.kept["places"] == {"c": ["", "c", True]}
    assert request.kept["kinds"] == {"shell": "shell", "local_shell": "local_shell", "apply_patch": "apply_patch"}
    assert parse(tools=[{"type": "custom", "name": "c"}]).kept == {"stored": True, "places": {"c": ["", "c", True]}}
    [item] = stored(request, said, kinds={"shell": "of a later release"})["output"]
    assert (item["type"], item["name"]) == ("function_call", "shell")
