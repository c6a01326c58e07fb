"""Chat Completions: what a client may send, and what is refused by name. What leaves: test_chat_stream.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.chat import CanonicalRequest, ResponseFormat
from steno.contracts.errors import BadRequest
from steno_proxy.dialects.base import Header
from steno_proxy.dialects.openai.chat import ChatDialect

CHAT = ChatDialect()
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HEADER = Header("0123456789ab", 1700000000, "m")


def parse(**body: Any) -> CanonicalRequest:
    return CHAT.parse(json.dumps({"messages": [USER], **body}).encode())


def refused(**body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    return caught.value


def test_null_absent_and_empty_content_are_equal() -> None:
    messages = [{"role": "assistant"}, {"role": "assistant", "content": None}, {"role": "assistant", "content": []}]
    assert [m["content"] for m in parse(messages=messages).job.messages] == ["", "", ""]


@pytest.mark.parametrize("content", [None, "", [], [{"type": "refusal", "refusal": "I can't."}]])
def test_what_an_assistant_refused_with_is_its_text(content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content, "refusal": "I can't."}, USER]
    assert parse(messages=messages).job.messages[1] == {"role": "assistant", "content": "I can't."}
    messages[1]["content"] = "so"
    assert parse(messages=messages).job.messages[1]["content"] == "so"
    assert refused(messages=[{"role": "assistant", "refusal": 7}]).field == "messages.0.refusal"


def test_developer_becomes_system_and_one_text_part_its_text() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {}}]
    job = parse(messages=[{"role": "developer", "content": parts}, USER]).job
    assert job.messages[0] == {"role": "system", "content": "a"}


def test_several_text_parts_stay_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse(messages=[{"role": "user", "content": parts}]).job.messages[0]["content"] == parts


@pytest.mark.parametrize("kind", ["input_audio", "file", "video_url"])
def test_what_is_neither_text_nor_image_is_refused_by_its_path(kind: str) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {}}]
    error = refused(messages=[USER, {"role": "user", "content": parts}])
    assert error.field == "messages.1.content.1.type"


def test_echoed_tool_calls_and_results_keep_what_counts() -> None:
    call = {"id": "call_0123456789ab_0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}, "x": 1}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "provider": {}},
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "ok"}]},
    ]
    job = parse(messages=messages).job
    assert job.messages[1]["tool_calls"] == [
        {"id": call["id"], "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    ]
    assert job.messages[1]["reasoning_content"] == "hm"
    assert job.messages[2] == {"role": "tool", "content": "ok", "tool_call_id": call["id"]}


def test_arguments_given_as_an_object_become_text() -> None:
    call = {"function": {"name": "f", "arguments": {"a": [1]}}}
    message = parse(messages=[USER, {"role": "assistant", "tool_calls": [call]}]).job.messages[1]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a":[1]}'


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, "function:f"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}, "required"),
    ],
)
def test_tool_choice(given: Any, canonical: str) -> None:
    assert parse(tools=[TOOL], tool_choice=given).job.tool_choice == canonical


def test_allowed_tools_leaves_only_those() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [other]}}
    assert [t["function"]["name"] for t in parse(tools=[TOOL, other], tool_choice=choice).job.tools] == ["g"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "wizard"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls.0.function.name"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": [1]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"99999999999": 1}}, "logit_bias.99999999999"),
        ({"logit_bias": {"1": 1000}}, "logit_bias.1"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": [TOOL, {"type": "custom", "custom": {"name": "c"}}]}, "tools.1.type"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL, {"type": "computer_use_preview", "display_width": 9}]}, "tools.1.type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"messages": [USER, {"role": "system", "tools": [{"function": {}}]}]}, "messages.1.tools.0.function"),
        ({"messages": [USER, {"role": "system", "tools": [{"type": "computer"}, TOOL]}]}, "messages.1.tools.0.type"),
        ({"messages": [USER, {"role": "system", "tools": [{"type": "file_search"}]}]}, "messages.1.tools.0.type"),
        ({"messages": [{"role": "system", "tools": [TOOL]}]}, "messages"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template_kwargs": {"a": 2**70}}, "chat_template_kwargs"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    assert refused(**body).field == field


def test_tools_that_the_provider_runs_are_left_out_and_named() -> None:
    hosted = {"type": "builtin_function", "function": {"name": "$web_search"}}
    request = parse(tools=[{"type": "web_search_preview"}, TOOL, hosted], tool_choice="required")
    assert (request.job.tools, request.dropped) == ([TOOL], ["web_search_preview", "builtin_function"])
    assert "only the provider can run it" in refused(tools=[hosted], tool_choice="required").message
    assert "/v1/responses" in refused(tools=[{"type": "custom", "custom": {"name": "c"}}, TOOL]).message


def test_tools_of_a_system_message_come_after_the_requests_own() -> None:
    """As Kimi Code brings tools that it found later."""
    late = {"type": "function", "function": {"name": "late"}}
    again = {"type": "function", "function": {"name": "f", "description": "other"}}
    brings = {"role": "system", "tools": [late, again, {"type": "web_search"}]}
    request = parse(messages=[USER, brings, USER], tools=[TOOL])
    assert request.job.messages == [USER, USER] and request.job.tools == [again, late]
    assert request.dropped == ["web_search"]
    said = parse(messages=[USER, brings | {"content": "more"}]).job
    assert said.messages[1] == {"role": "system", "content": "more"} and len(said.tools) == 2
    assert not parse(messages=[USER | {"tools": "mine"}]).job.tools  # of other roles it is an unknown field


@pytest.mark.parametrize("other", ["all", ["read"], [TOOL, "read"], {"a": 1}, {"function": TOOL}, [{"name": "f"}], 3])
def test_tools_of_a_system_message_in_another_shape_are_an_unknown_field(other: Any) -> None:
    job = parse(messages=[USER, {"role": "system", "content": "s", "tools": other}], tools=[TOOL]).job
    assert job.messages == [USER, {"role": "system", "content": "s"}] and job.tools == [TOOL]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled", "keep": "all"}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": "off"}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}}, {"thinking": False}),
        ({"enable_thinking": None, "thinking": None}, {}),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
    ],
)
def test_thinking_is_switched_by_each_providers_field(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert parse(**fields).job.template_kwargs == options


def test_unknown_fields_are_ignored_at_every_level() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hi", "x": 1}], "x": 1}
    request = parse(messages=[message], x={"y": 1}, tools=[{**TOOL, "x": 1}], stream_options={"x": 1}, store=True)
    assert request.job.messages == [USER] and request.job.tools == [TOOL]


def test_stream_options_are_of_a_stream() -> None:
    for stream in ({}, {"stream": False}):
        error = refused(stream_options={"include_usage": False}, **stream)
        assert error.field == "stream_options" and "send stream: true" in error.message
        assert not parse(stream_options=None, **stream).stream
        assert not parse(stream_options={}, **stream).stream  # it asks for nothing: vLLM takes it too
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_tokens", 10**20, "got 100000000000000000000, must be at most 9223372036854775807"),
        ("seed", -(10**25), "got -10000000000000000000000000, must be at least -9223372036854775808"),
        ("n", 123456789, "got 123456789, must be at most 64"),
        ("n", 10**400, "got an integer of more than 300 digits, must be at most 64"),
        ("min_tokens", 2147483648, "got 2147483648, must be at most 2147483647"),
        ("temperature", 10**20, "got 100000000000000000000, must be at most 100"),
        ("temperature", -1e-07, "got -1e-07, must be at least 0"),
        ("top_p", 0, "got 0, must be above 0"),
        ("repetition_penalty", 0.0001, "got 0.0001, must be at least 0.001"),
        ("stop_token_ids.1", [1, 123456789012], "got 123456789012, must be at most 2147483647"),
        ("allowed_token_ids.0", [-1, 2], "got -1, must be at least 0"),
        ("logit_bias.8", {"7": 1, "8": -100.5, "9": 101}, "got -100.5, must be at least -100"),
    ],
)
def test_a_number_out_of_range_is_told_with_all_its_digits(field: str, value: Any, said: str) -> None:
    error = refused(**{field.partition(".")[0]: value})
    assert (error.field, error.message) == (field, f"{field}: {said}")


def test_a_number_out_of_range_in_a_body_that_goes_on_badly_is_a_bad_request() -> None:
    for rest in (b"}}", b',"messages":' + b"[" * 200_000, b""):
        with pytest.raises(BadRequest):
            CHAT.parse(b'{"n":0' + rest)


@pytest.mark.parametrize(
    ("field", "twice"),
    [
        ("n", '"n":0,"n":"x"'),
        ("n", '"n":0,"n":1'),
        ("n", '"n":0,"n":[1]'),
        ("logit_bias", '"logit_bias":{"5":200,"5":1}'),
        ("logit_bias", '"logit_bias":{"5":200},"logit_bias":null'),
        ("allowed_token_ids.0", '"allowed_token_ids":[-1],"allowed_token_ids":[]'),
    ],
)
def test_a_number_out_of_range_in_a_field_that_stands_twice_is_a_bad_request(field: str, twice: str) -> None:
    with pytest.raises(BadRequest, match="expected `") as error:
        CHAT.parse(f'{{"messages":[{{"role":"user","content":"x"}}],{twice}}}'.encode())
    assert error.value.field == field


def test_the_bounds_that_are_enforced_are_those_of_the_openapi_document() -> None:
    """Each number's both ends are taken, and what lies beyond is refused by name."""
    seen = 0
    for name, schema in CHAT.openapi()["requestBody"]["content"]["application/json"]["schema"]["properties"].items():
        kind = schema.get("anyOf", [schema])[0]
        if kind.get("type") not in ("number", "integer"):
            continue
        seen += 1
        step = 1 if kind["type"] == "integer" else 0.0001
        low = kind["minimum"] if "minimum" in kind else kind["exclusiveMinimum"] + step
        for value in (low, kind["maximum"]):
            parse(**{name: value, "logprobs": True})
        for value in (low - step, kind["maximum"] + step):
            assert refused(**{name: value}).field == name
    assert seen == 13


def test_sampling_is_taken_whole_and_recorded_as_asked() -> None:
    asked = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.1, "logit_bias": {"7": 2}, "min_tokens": 1, "max_completion_tokens": 9, "seed": 3,
        "stop": "x", "ignore_eos": True,
    }  # fmt: skip
    request = parse(**asked, max_tokens=None)
    law = request.job.sampling
    assert (law.temperature, law.top_p, law.top_k, law.min_p) == (0.5, 0.9, 5, 0.1)
    assert (law.logit_bias, law.max_tokens, law.seed, law.stop) == ({7: 2.0}, 9, 3, ["x"])
    assert request.asked == asked


def test_defaults_are_plain_sampling_without_a_limit() -> None:
    law = parse().job.sampling
    assert law.is_plain() and law.max_tokens is None


@pytest.mark.parametrize("part", [
    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}], "closed": True},
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "reasoning", "text": "hm"},
    {"type": "reasoning_text", "text": "hm"},
])  # fmt: skip
def test_reasoning_in_an_assistants_content_is_its_reasoning(part: Any) -> None:
    """Mistral's models say it so, and clients keep it."""
    content = [part, {"type": "text", "text": "so"}]
    user = {"role": "user", "content": "hi"}
    echo = {"role": "assistant", "content": content}
    said = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    assert parse(messages=[echo, user]).job.messages[0] == said
    assert parse(messages=[echo | {"reasoning_content": "hm"}, user]).job.messages[0] == said, "not twice"
    assert parse(messages=[{"role": "assistant", "content": [{"type": "redacted_thinking"}]}, user]).job.messages[0] == {
        "role": "assistant", "content": "",
    }  # fmt: skip


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_part_that_cant_be_shown_is_refused_and_never_vanishes(role: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(
            messages=[{"role": role, "content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}]}]
        )
    assert caught.value.field == "messages.0.content.1.type"
    with pytest.raises(BadRequest) as caught:
        parse(messages=[{"role": "assistant", "content": [{"type": "thinking", "thinking": 3}]}])
    assert caught.value.field == "messages.0.content.0.thinking"


def test_huge_token_limits_are_clamped_not_refused() -> None:
    assert parse(max_tokens=10**12).job.sampling.max_tokens == 2**31 - 1


def test_response_format_and_template_arguments() -> None:
    schema = {"type": "object"}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    request = parse(response_format=asked, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert request.job.response_format == ResponseFormat("json_schema", "n", schema, True)
    assert request.job.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": 1', b'{"messages":' + b"[" * 200_000],
)  # fmt: skip
def test_malformed_bodies_are_bad_requests(body: bytes) -> None:
    with pytest.raises(BadRequest):
        CHAT.parse(body)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(
            ["messages", "tools", "tool_choice", "stop", "n", "logit_bias", "response_format", "stream_options", "seed",
             "logprobs", "top_logprobs", "temperature", "max_tokens", "chat_template_kwargs", "reasoning_effort"]
        ),
        _values,
    )
)  # fmt: skip
def test_any_json_is_either_taken_or_a_bad_request(body: dict[str, Any]) -> None:
    try:
        CHAT.parse(json.dumps({"messages": [USER], **body}).encode())
    except BadRequest as error:
        assert error.message
