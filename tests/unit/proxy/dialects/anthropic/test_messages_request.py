"""Anthropic Messages, requests: what blocks become, what is refused by name, and that echoes of our turns are recognised."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.chat import EMPTY_TEXT, CanonicalRequest
from steno.contracts.errors import BadRequest
from steno_proxy.dialects.anthropic.dialect import MessagesCount, MessagesDialect, blocks
from steno_proxy.sessions.messages.call_ids import echoed_ids
from steno_proxy.sessions.messages.normalise import message_digest

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def parse(**body: Any) -> CanonicalRequest:
    return MessagesDialect().parse(json.dumps({"model": "m", "max_tokens": 9, "messages": [USER], **body}).encode())


def messages(*given: Any, **body: Any) -> list[dict[str, Any]]:
    return parse(messages=list(given), **body).job.messages


def refused(**body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    return caught.value


# -- messages -------------------------------------------------------------------------------------------------------------


def test_system_is_the_first_message_without_the_billing_header() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=5f0c;"}
    system = [header, {"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral"}}]
    assert messages(USER, system=system)[0] == {"role": "system", "content": "You are."}
    assert messages(USER, system="You are.")[0] == {"role": "system", "content": "You are."}
    assert messages(USER, system=[header]) == messages(USER, system="") == messages(USER) == [USER]
    several = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages(USER, system=several)[0] == {"role": "system", "content": several}


def test_what_follows_the_billing_header_in_one_text_stays() -> None:
    """Gateways join system blocks."""
    header = "x-anthropic-billing-header: cc_version=2; cch=5f0c;"
    for system in (f"{header}\nYou are.\nRules:", f"\n{header}\n X-Anthropic-Billing-Header: 1\nYou are.\nRules:"):
        for shape in (system, [{"type": "text", "text": system}]):
            assert messages(USER, system=shape)[0] == {"role": "system", "content": "You are.\nRules:"}
    assert messages(USER, system=f"{header}\n\n ") == [USER]
    assert messages(USER, system=f"You are. {header}")[0]["content"] == f"You are. {header}"


def test_a_system_message_in_the_middle_stays_there() -> None:
    found = messages(USER, {"role": "system", "content": [{"type": "text", "text": "note"}]}, system="s")
    assert [message["role"] for message in found] == ["system", "user", "system"]
    assert found[2]["content"] == "note"


def test_tool_results_are_messages_of_their_own_in_their_order() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_0123456789ab_0", "content": "one"},
        {"type": "tool_result", "tool_use_id": "toolu_0123456789ab_1", "content": [{"type": "text", "text": "two"}]},
        {"type": "text", "text": "and"},
        {"type": "text", "text": "more", "cache_control": {"type": "ephemeral"}},
    ]
    assert messages({"role": "user", "content": results}) == [
        {"role": "tool", "tool_call_id": "toolu_0123456789ab_0", "content": "one"},
        {"role": "tool", "tool_call_id": "toolu_0123456789ab_1", "content": "two"},
        {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "more"}]},
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [("no such file", "Error: no such file"), ("Error: gone", "Error: gone"), (None, "Error: "),
     ([{"type": "text", "text": "<tool_use_error>x"}], "<tool_use_error>x")],
)  # fmt: skip
def test_a_failed_tool_says_so_in_its_text(content: Any, text: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
    assert messages({"role": "user", "content": [block]})[0]["content"] == text


def test_an_assistant_message_is_one_message() -> None:
    content = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Now."},
        {"type": "tool_use", "id": "toolu_0123456789ab_0", "name": "f", "input": {"a": 1}},
    ]
    found = messages(USER, {"role": "assistant", "content": content}, USER)[1]
    assert found == {
        "role": "assistant",
        "content": "Now.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "toolu_0123456789ab_0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
        ],
    }


def test_what_litellm_sends_for_an_empty_text_is_no_text_of_a_reply() -> None:
    """Seen in LiteLLM 1.106.2, streamed: what it puts together of calls alone has the content ""."""
    empty = {"type": "text", "text": EMPTY_TEXT, "cache_control": {"type": "ephemeral"}}
    called = {"type": "tool_use", "id": "toolu_0123456789ab_0", "name": "f", "input": {}}
    found = messages(USER, {"role": "assistant", "content": [empty, called]}, USER)[1]
    assert (found["content"], len(found["tool_calls"])) == ("", 1)
    assert message_digest(found) == message_digest(
        {"role": "assistant", "content": " ", "tool_calls": found["tool_calls"]}
    )
    # A model that says these words is recognised, too.
    [_, found, asked] = messages(
        USER, {"role": "assistant", "content": EMPTY_TEXT}, {"role": "user", "content": EMPTY_TEXT}
    )
    assert message_digest(found) == message_digest({"role": "assistant", "content": EMPTY_TEXT})
    assert asked["content"] == EMPTY_TEXT  # which its agent has said
    quoted = f"It says {EMPTY_TEXT}"
    assert messages(USER, {"role": "assistant", "content": quoted}, USER)[1]["content"] == quoted


def test_integers_beyond_64_bits_stay_what_they_are() -> None:
    content = [{"type": "tool_use", "id": "t", "name": "f", "input": {"n": 2**70}}]
    call = messages(USER, {"role": "assistant", "content": content}, USER)[1]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"n": 2**70}


def test_documents_of_text_are_read() -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}, "title": "t"}
    nested = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "b"}]}}
    found = messages({"role": "user", "content": [plain, nested]})[0]["content"]
    assert [part["text"] for part in found] == ["a", "b"]


def test_search_results_are_read_with_where_they_are_from() -> None:
    found = {
        "type": "search_result",
        "source": "https://a.b/c",
        "title": "Keys",
        "content": [{"type": "text", "text": "k"}],
    }
    result = {"type": "tool_result", "tool_use_id": "t", "content": [found, found | {"title": "", "content": []}]}
    [message] = messages({"role": "user", "content": [result]})
    assert [part["text"] for part in message["content"]] == ["Keys\nhttps://a.b/c\n", "k", "https://a.b/c\n"]
    assert messages({"role": "user", "content": [found]})[0]["content"][1]["text"] == "k"
    assert not parse(messages=[{"role": "user", "content": [result]}]).dropped


def test_blocks_and_tools_of_unknown_types_are_dropped_and_named() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "container_upload", "file_id": "f"}]
    echoed = {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "w", "input": {}}]}
    asked = parse(
        messages=[{"role": "user", "content": content}, echoed, USER],
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        unknown={"field": 1},
    )
    assert asked.dropped == ["web_search_20250305", "container_upload", "server_tool_use"]
    assert [message["content"] for message in asked.job.messages] == ["a", "", "hi"]
    assert [tool["function"]["name"] for tool in asked.job.tools] == ["f"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.source.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
                {"type": "text", "text": ""}, {"type": "image", "source": {}}]}]}]},
            "messages.0.content.0.content.1.source.type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
         "messages.0.content.0.source.type"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "content", "content": [
            "a", {"type": "document", "source": {"type": "text", "data": "b"}}]}}]}]},
         "messages.0.content.0.source.content.1.type"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result", "content": "a"}]}]},
         "messages.0.content.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result", "content": [{"type": "search_result"}]}]}]},
         "messages.0.content.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}, USER]},
         "messages.0.content.0.name"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
        ({"messages": "hi"}, "messages"),
    ],
)  # fmt: skip
def test_what_cant_be_honoured_is_refused_by_its_path(body: dict[str, Any], field: str) -> None:
    assert refused(**body).field == field


# -- tools, sampling, options ---------------------------------------------------------------------------------------------


def test_tools_and_choice() -> None:
    strict = {"name": "g", "description": "d", "input_schema": {"type": "object"}, "strict": True, "type": "custom"}
    job = parse(tools=[TOOL | {"cache_control": {}}, strict], tool_choice={"type": "tool", "name": "g"}).job
    assert job.tools == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
        {
            "type": "function",
            "function": {"name": "g", "description": "d", "parameters": {"type": "object"}, "strict": True},
        },
    ]
    assert job.tool_choice == "function:g"


@pytest.mark.parametrize(
    ("choice", "canonical"),
    [(None, ("auto", True)), ({"type": "auto"}, ("auto", True)), ({"type": "none"}, ("none", True)),
     ({"type": "any"}, ("required", True)),
     ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
     ({"type": "any", "disable_parallel_tool_use": True}, ("required", False))],
)  # fmt: skip
def test_each_tool_choice(choice: Any, canonical: tuple[str, bool]) -> None:
    job = parse(tools=[TOOL], tool_choice=choice).job
    assert (job.tool_choice, job.parallel_tool_calls) == canonical


def test_sampling_as_asked_and_as_served() -> None:
    asked = parse(temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["", "END"], max_tokens=2**40)
    law = asked.job.sampling
    assert (law.temperature, law.top_p, law.top_k, law.stop, law.max_tokens) == (0.5, 0.9, 40, ["END"], 2**31 - 1)
    assert asked.asked["stop_sequences"] == ["", "END"] and asked.asked["max_tokens"] == 2**40
    assert parse().job.sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("body", "kwargs"),
    [({"thinking": {"type": "adaptive"}}, {}),
     ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True, "thinking": True}),
     ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
     ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
     ({"output_config": {"effort": "wild"}}, {})],
)  # fmt: skip
def test_thinking_and_effort_are_template_options(body: dict[str, Any], kwargs: dict[str, Any]) -> None:
    assert parse(**body).job.template_kwargs == kwargs


@pytest.mark.parametrize("where", ["output_format", "output_config"])
def test_structured_output(where: str) -> None:
    asked = {"type": "json_schema", "schema": {"type": "object"}}
    job = parse(**{where: asked if where == "output_format" else {"format": asked}}).job
    assert (job.response_format.type, job.response_format.schema) == ("json_schema", {"type": "object"})


def test_count_tokens_takes_what_is_not_to_be_answered() -> None:
    body = json.dumps({"model": "m", "messages": [USER, {"role": "assistant", "content": "I"}]}).encode()
    asked = MessagesCount().parse_count(body)
    assert asked.model == "m" and [message["role"] for message in asked.job.messages] == ["user", "assistant"]
    assert MessagesCount().count_answer(7) == b'{"input_tokens":7}'


# -- recognition ----------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e6, 1e6) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(min_size=1, max_size=5), json_values, max_size=3).map(json.dumps) | st.sampled_from(
    ["", " ", '{"a": 1.0}', '{"n": 9007199254740993}', '{"cut', "[1]", '"text"', "not json"]
)
replies = st.fixed_dictionaries(
    {"content": st.text(max_size=20) | st.sampled_from(["", "\n\n", "  a \n"]), "reasoning": st.text(max_size=8)}
    | {"calls": st.lists(st.tuples(st.sampled_from(["f", "g"]), arguments), max_size=3)}
)


def recorded(reply: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply["content"]}
    if reply["reasoning"]:
        message["reasoning_content"] = reply["reasoning"]
    if reply["calls"]:
        message["tool_calls"] = [
            {"id": f"toolu_0123456789ab_{i}", "type": "function", "function": {"name": name, "arguments": text}}
            for i, (name, text) in enumerate(reply["calls"])
        ]
    return message


@given(reply=replies, keep_thinking=st.booleans(), cached=st.booleans())
def test_every_echo_of_an_answer_is_that_answer(reply: dict[str, Any], keep_thinking: bool, cached: bool) -> None:
    """Thinking kept or dropped, cache marks moved, input parsed by JavaScript, text alone as a string."""
    message = recorded(reply)
    seen = json.loads(as_sent(message))
    echo = [block for block in seen if keep_thinking or block["type"] != "thinking"]
    for block in echo:
        if block["type"] == "tool_use":
            block["input"] = through_javascript(block["input"])
    if cached and echo:
        echo[-1]["cache_control"] = {"type": "ephemeral"}
    content: Any = echo
    if [block["type"] for block in echo] == ["text"] and not cached:
        content = echo[0]["text"]
    found = messages(USER, {"role": "assistant", "content": content}, USER)[1]
    assert message_digest(found) == message_digest(message)
    assert echoed_ids(found) == echoed_ids(message)


def as_sent(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(blocks(message, "0123456789ab"))


def through_javascript(value: Any) -> Any:
    """Numbers as doubles, whole ones written without a point."""
    if isinstance(value, dict):
        return {key: through_javascript(item) for key, item in value.items()}
    if isinstance(value, list):
        return [through_javascript(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        double = float(value)
        return int(double) if double.is_integer() else double
    return value


@given(st.recursive(json_values, lambda inner: st.dictionaries(st.text(max_size=6), inner, max_size=4), max_leaves=20))
def test_any_json_is_parsed_or_refused(body: Any) -> None:
    for given_body in (body, {"messages": body}, {"messages": [{"role": "user", "content": body}]}):
        try:
            MessagesDialect().parse(json.dumps(given_body).encode())
        except BadRequest as error:
            assert error.message
