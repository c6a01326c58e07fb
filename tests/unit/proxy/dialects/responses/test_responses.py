"""Responses: what a client may send, what is refused by name, and how items become messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.chat import RECORDED, ResponseFormat
from steno.contracts.errors import BadRequest, NotFound, NoWorker
from steno_proxy.dialects.responses.dialect import ResponsesCount, ResponsesDialect, turn_of_response
from steno_proxy.dialects.responses.items import seal
from steno_proxy.dialects.responses.output import ResponsesRequest
from steno_proxy.dialects.responses.tools import ClientTool
from steno_proxy.sessions.messages.normalise import message_digest

RESPONSES = ResponsesDialect()
USER = {"role": "user", "content": "hi"}
TURN = "0123456789ab"
F: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


def parse(given_input: Any = "hi", **body: Any) -> ResponsesRequest:
    request = RESPONSES.parse(json.dumps({"input": given_input, **body}).encode())
    assert isinstance(request, ResponsesRequest)
    return request


def messages(*items: Any, **body: Any) -> list[dict[str, Any]]:
    return parse(list(items), **body).job.messages


def refused(given_input: Any = "hi", **body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(given_input, **body)
    return caught.value


def call(i: int = 0, turn: str = TURN, **more: Any) -> dict[str, Any]:
    ids = {"id": f"fc_{turn}_{i + 1}", "call_id": f"call_{turn}_{i}"}
    return {"type": "function_call", "name": "f", "arguments": "{}"} | ids | more


def output(i: int = 0, turn: str = TURN, text: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{turn}_{i}", "output": text}


def said(text: str, turn: str | None = TURN, i: int = 0) -> dict[str, Any]:
    item = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }
    return item | ({"id": f"msg_{turn}_{i}"} if turn else {})


# -- input ----------------------------------------------------------------------------------------------------------------


def test_a_string_is_a_users_message_after_the_instructions() -> None:
    assert parse("hi", instructions="be kind").job.messages == [{"role": "system", "content": "be kind"}, USER]


def test_developer_is_system_and_parts_are_text() -> None:
    parts = [{"type": "input_text", "text": "a"}]
    assert messages({"role": "developer", "content": parts}, USER) == [{"role": "system", "content": "a"}, USER]


def test_the_items_of_one_turn_are_one_message_again() -> None:
    items = [
        {"type": "reasoning", "id": f"rs_{TURN}_0", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        said("I look", i=1), call(0), call(1), output(0), output(1),
    ]  # fmt: skip
    echoed = messages(USER, *items)
    assert echoed[1] == {
        "role": "assistant", "content": "I look", "reasoning_content": "hm",
        "tool_calls": [
            {"id": f"call_{TURN}_{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in (0, 1)
        ],
    }  # fmt: skip
    assert echoed[2:] == [{"role": "tool", "content": "ok", "tool_call_id": f"call_{TURN}_{i}"} for i in (0, 1)]


def test_results_between_parallel_calls_do_not_split_their_turn() -> None:
    echoed = messages(USER, call(0), output(0), call(1), output(1))
    assert [message["role"] for message in echoed] == ["user", "assistant", "tool", "tool"]
    assert len(echoed[1]["tool_calls"]) == 2


def test_neighbouring_turns_stay_apart_by_their_ids() -> None:
    echoed = messages(USER, call(0), output(0), call(0, "ba9876543210"), output(0, "ba9876543210"))
    assert [message["role"] for message in echoed] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [m["content"] for m in messages(said("a"), said("b", "ba9876543210"))] == ["a", "b"]
    assert [m["content"] for m in messages(said("a"), said("b", i=1))] == ["ab"]


def test_without_ids_neighbours_belong_together_but_messages_do_not() -> None:
    bare = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "x"}
    result = {"type": "function_call_output", "call_id": "x", "output": "ok"}
    echoed = messages(said("a", None), bare, result, bare, result, said("b", None), said("c", None))
    assert [(m["role"], m["content"]) for m in echoed] == [
        ("assistant", "a"), ("tool", "ok"), ("assistant", ""), ("tool", "ok"), ("assistant", "b"), ("assistant", "c"),
    ]  # fmt: skip


def test_outputs_may_be_text_parts_or_anything_else_as_json() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    shown = [m["content"] for m in messages(output(0, text=parts), output(1, text={"a": 1}), output(2, text=None))]
    assert shown == [[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], '{"a":1}', ""]


def test_reasoning_is_restored_from_what_was_sealed() -> None:
    item = {"type": "reasoning", "id": f"rs_{TURN}_0", "summary": [], "encrypted_content": seal("I think ☕ \ud800")}
    assert messages(item, said("x", i=1))[0]["reasoning_content"] == "I think ☕ \ud800"
    tampered = item | {"encrypted_content": seal("I think")[:-6] + "AAAAA="}
    assert refused([tampered]).field == "input.0.encrypted_content"
    foreign = item | {"encrypted_content": "gAAAA", "summary": [{"type": "summary_text", "text": "short"}]}
    assert messages(foreign)[0]["reasoning_content"] == "short"


def test_reasoning_before_the_conversation_is_left_out_and_named() -> None:
    """CrewAI sends that of its last answer there."""
    thought = {"type": "reasoning", "id": f"rs_{TURN}_0", "summary": [{"type": "summary_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": f"call_{TURN}_0", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    request = parse([thought, USER, call, result], instructions="Be good.", tools=[F])
    assert [message["role"] for message in request.job.messages] == ["system", "user", "assistant", "tool"]
    assert request.dropped == ["reasoning"]
    kept = parse([USER, thought, call, result], tools=[F])
    assert kept.job.messages[1]["reasoning_content"] == "hm" and not kept.dropped


def test_unknown_items_and_tools_are_left_out_and_named() -> None:
    tools = [F, {"type": "web_search"}, {"type": "tool_search"}]
    request = parse([USER, {"type": "web_search_call", "id": "ws_1", "status": "completed"}], tools=tools)
    assert request.job.messages == [USER]
    assert [tool["function"]["name"] for tool in request.job.tools] == ["f"]
    assert request.dropped == ["web_search", "tool_search", "web_search_call"]


@pytest.mark.parametrize(("tools", "field"), [
    ([{"type": "web_search"}], "tools.0.type"),
    ([{"type": "namespace", "name": "n", "tools": [{"type": "file_search"}]}], "tools.0.tools.0.type"),
])  # fmt: skip
def test_a_request_whose_tools_all_are_left_out_is_refused(tools: list[Any], field: str) -> None:
    """The model would make up what was found."""
    for choice in (None, "auto", "required"):
        error = refused([USER], tools=tools, tool_choice=choice)
        assert error.field == field and "only the provider can run it" in error.message
    late = {"type": "additional_tools", "tools": [F]}
    assert [tool["function"]["name"] for tool in parse([late, USER], tools=tools).job.tools] == ["f"]
    counted = ResponsesCount().parse_count(json.dumps({"model": "m", "input": [USER], "tools": tools}).encode())
    assert (counted.model, counted.job.tools) == ("m", [])


@pytest.mark.parametrize(
    "inner", [{}, {"tools": None}, {"tools": 3}, {"tools": ["x", {"type": "namespace", "name": "m"}]}]
)
def test_a_namespace_in_a_namespace_is_left_out_whatever_is_in_it(inner: Any) -> None:
    nested = {"type": "namespace", "name": "o", "tools": [{"type": "namespace", "name": "n", **inner}, F]}
    request = parse([USER], tools=[nested])
    assert [tool["function"]["name"] for tool in request.job.tools] == ["o__f"]
    assert request.dropped == ["namespace"]
    [told] = request.echo["tools"]
    assert [one["type"] for one in told["tools"]] == ["namespace", "function"]


@pytest.mark.parametrize("part", [
    {"type": "reasoning_text", "text": "hm"},
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
])  # fmt: skip
def test_reasoning_in_an_assistants_message_is_its_reasoning(part: Any) -> None:
    content = [part, {"type": "output_text", "text": "so"}]
    item = {"type": "message", "role": "assistant", "id": f"msg_{TURN}_0", "content": content}
    assert messages(item, USER)[0] == {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    assert refused([{"role": "user", "content": content}]).field == "input.0.content.0.type"


def test_a_reference_stands_for_the_recorded_reply() -> None:
    items = [
        {"type": "item_reference", "id": f"rs_{TURN}_0"},
        {"type": "item_reference", "id": f"fc_{TURN}_1"},
        output(),
    ]
    echoed = messages(USER, *items)
    assert [message.get(RECORDED) for message in echoed] == [None, TURN, None]
    assert refused([{"type": "item_reference", "id": "msg_68af"}]).field == "input.0.id"


# -- tools ----------------------------------------------------------------------------------------------------------------

NAMESPACE = {"type": "namespace", "name": "crew", "description": "Agents.", "tools": [F, {**F, "name": "g"}]}
CUSTOM = {
    "type": "custom", "name": "apply_patch", "description": "Patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}  # fmt: skip


def test_namespaces_are_flattened_and_their_calls_come_back_so() -> None:
    request = parse([USER, call(namespace="crew")], tools=[F, NAMESPACE])
    names = [tool["function"]["name"] for tool in request.job.tools]
    assert names == ["f", "crew__f", "crew__g"]
    assert request.job.messages[1]["tool_calls"][0]["function"]["name"] == "crew__f"
    assert request.job.tools[1]["function"]["description"] == "[crew: Agents.]\n"
    assert request.places["crew__g"] == ClientTool("crew", "g")


def test_a_plain_tool_keeps_its_name_beside_a_namespace_that_would_take_it() -> None:
    request = parse(
        [USER, call(namespace="crew"), call(1, name="crew__f")], tools=[NAMESPACE, {**F, "name": "crew__f"}]
    )
    assert [tool["function"]["name"] for tool in request.job.tools] == ["crew__f_", "crew__g", "crew__f"]
    called = [each["function"]["name"] for each in request.job.messages[1]["tool_calls"]]
    assert called == ["crew__f_", "crew__f"]


def test_tools_among_the_items_are_tools_and_those_of_the_root_namespace_keep_their_names() -> None:
    """Codex, where it knows the model."""
    inner = [{**CUSTOM, "name": "exec"}, {**F, "name": "wait"}]
    functions = {"type": "namespace", "name": "functions", "description": "", "tools": inner}
    item = {"type": "additional_tools", "role": "developer", "tools": [functions, NAMESPACE]}
    call_ = {
        "type": "custom_tool_call",
        "id": f"ctc_{TURN}_0",
        "call_id": f"call_{TURN}_0",
        "name": "exec",
        "input": "x",
    }
    request = parse([item, USER, call_ | {"namespace": "functions"}], tools=[F])
    assert [tool["function"]["name"] for tool in request.job.tools] == ["f", "exec", "wait", "crew__f", "crew__g"]
    assert [message["role"] for message in request.job.messages] == ["user", "assistant"]
    assert request.job.messages[1]["tool_calls"][0]["function"]["name"] == "exec"
    assert request.places["exec"] == ClientTool("functions", "exec", True) and request.dropped == []
    assert parse([item, USER], tools=[{**F, "name": "wait"}]).places["wait_"] == ClientTool("functions", "wait")


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    item = {"type": "custom_tool_call", "id": f"ctc_{TURN}_0", "call_id": f"call_{TURN}_0", "name": "apply_patch"}
    request = parse(
        [USER, item | {"input": 'a "b"\n'}, {**output(), "type": "custom_tool_call_output"}], tools=[CUSTOM]
    )
    [tool] = request.job.tools
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert "start: x" in tool["function"]["description"]
    [echoed] = request.job.messages[1]["tool_calls"]
    assert json.loads(echoed["function"]["arguments"]) == {"input": 'a "b"\n'}
    raw = messages(item | {"id": f"ctcr_{TURN}_0", "input": "{broken"}, tools=[CUSTOM])
    assert raw[0]["tool_calls"][0]["function"]["arguments"] == "{broken"


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        (None, "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, "function:f"),
        ({"type": "function", "name": "g", "namespace": "crew"}, "function:crew__g"),
        ({"type": "custom", "name": "apply_patch"}, "function:apply_patch"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, "required"),
    ],
)
def test_tool_choice(given: Any, canonical: str) -> None:
    assert parse(tools=[F, NAMESPACE, CUSTOM], tool_choice=given).job.tool_choice == canonical


# -- the rest of a request -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": None}, "input"),
        ({"input": ["x"]}, "input.0"),
        ({"input": [{}]}, "input.0.type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": 3}]}, "input.0.content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": ""}]}]},
            "input.0.content.0.image_url",
        ),
        ({"input": [output(text=[{"type": "input_image"}])]}, "input.0.output.0.image_url"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input.0.name"),
        ({"input": [{"type": "additional_tools"}]}, "input.0.tools"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "custom"}]}]}, "input.0.tools.0.name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        ({"instructions": [{"role": "wizard"}]}, "instructions.0.role"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"name": "x"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [F, F]}, "tools.1.name"),
        ({"tools": [{**F, "parameters": 3}]}, "tools.0.parameters"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools.0.tools"),
        ({"tools": [{"type": "namespace", "name": "x" * 257, "tools": []}]}, "tools.0.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    assert (
        refused(**{"given_input": "hi", **{("given_input" if k == "input" else k): v for k, v in body.items()}}).field
        == field
    )


def test_format_effort_limits_and_logprobs() -> None:
    schema = {"type": "object"}
    request = parse(
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"}, max_output_tokens=9, temperature=0.5, top_logprobs=2,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"], parallel_tool_calls=False,
    )  # fmt: skip
    job = request.job
    assert job.response_format == ResponseFormat("json_schema", "n", schema, True)
    assert (job.template_kwargs, job.top_logprobs, job.parallel_tool_calls) == ({"reasoning_effort": "low"}, 2, False)
    assert (job.sampling.max_tokens, job.sampling.temperature) == (9, 0.5)
    assert request.asked == {"temperature": 0.5, "max_output_tokens": 9}
    assert (request.summary, request.sealed) == (True, True)
    assert parse(include=["message.output_text.logprobs"]).job.top_logprobs == 0


def test_what_is_stored_is_only_what_the_record_would_not_hold() -> None:
    assert parse().kept == {"stored": True}
    assert parse(store=False, metadata={"a": "b"}).kept == {}
    request = parse(instructions="x", previous_response_id=f"resp_{TURN}", metadata={"a": "b"}, tools=[NAMESPACE])
    assert (request.after, request.leading) == (TURN, 1)
    request.goes_on_from({}, [])
    assert request.kept == {
        "stored": True, "leading": 1, "after": True, "metadata": {"a": "b"},
        "places": {"crew__f": ["crew", "f", False], "crew__g": ["crew", "g", False]},
    }  # fmt: skip
    added = {"type": "additional_tools", "tools": [NAMESPACE]}
    assert parse([added, USER], tools=[F]).kept == {"stored": True, "places": request.kept["places"], "own_tools": 1}


def test_response_ids_name_turns() -> None:
    assert turn_of_response(f"resp_{TURN}") == TURN
    for wrong in ("resp_", f"resp_{TURN}0", f"resp_{TURN}\n", "x"):
        with pytest.raises(NotFound):
            turn_of_response(wrong)


def test_errors_have_openais_shape() -> None:
    assert json.loads(RESPONSES.error(BadRequest("no", field="a.b"))) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "a.b", "code": "invalid_request"}
    }
    assert json.loads(RESPONSES.error(NoWorker("none")))["error"]["type"] == "server_error"


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_items = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            "message reasoning function_call custom_tool_call function_call_output item_reference additional_tools "
            "function custom namespace".split()
        )
    },
    optional={
        name: _values | st.sampled_from(["user", "assistant", f"msg_{TURN}_0", f"call_{TURN}_0"])
        for name in (
            "role",
            "content",
            "id",
            "call_id",
            "name",
            "arguments",
            "output",
            "summary",
            "encrypted_content",
            "namespace",
            "tools",
        )
    },
)


@pytest.mark.parametrize("kind", [["message"], {"message": 1}, 1, True])
def test_a_type_that_is_no_string_is_refused_by_name(kind: Any) -> None:
    error = refused([{"role": "user", "content": "hi"}, {"type": kind}])
    assert error.field == "input.1.type" and "must be a string" in error.message


@given(
    st.dictionaries(
        st.sampled_from(
            ["input", "tools", "tool_choice", "text", "reasoning", "include", "instructions", "previous_response_id",
             "metadata", "top_logprobs", "temperature", "max_output_tokens", "store", "background"]
        ),
        _values | st.lists(_items, max_size=4),
    )
)  # fmt: skip
def test_any_json_is_either_taken_or_a_bad_request(body: dict[str, Any]) -> None:
    try:
        request = RESPONSES.parse(json.dumps({"input": "hi", **body}).encode())
    except BadRequest as error:
        assert error.message
    else:
        for message in request.job.messages:
            assert len(message_digest(message)) == 16
