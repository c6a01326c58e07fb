"""What makes two messages the same message, and what does not. Every rewriting here was seen from some client."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.chat import EMPTY_TEXT
from steno_proxy.sessions.messages.normalise import message_digest, options_digest, tools_digest
from tests.unit.proxy.sessions.agent import assistant, system, tool, user


def call(arguments, name="bash", call_id="x"):
    return assistant("", (call_id, name, arguments))


def same(*messages):
    return len({message_digest(m) for m in messages}) == 1


SAME = {
    "string or one text part": (user("hi"), user([{"type": "text", "text": "hi"}])),
    "parts merged": (user("hi there"), user([{"type": "text", "text": "hi"}, {"type": "text", "text": " there"}])),
    "null, empty, absent, no parts": (user(""), user(None), {"role": "user"}, user([])),
    "whitespace-only text": (assistant(""), assistant("\n\n"), assistant([{"type": "text", "text": " \t"}])),
    "whitespace-only part": (user("hi"), user([{"type": "text", "text": "hi"}, {"type": "text", "text": "\n"}])),
    "cache_control": (user("hi"), user([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}])),
    "reasoning": (
        assistant("hi"),
        {**assistant("hi"), "reasoning_content": "hm"},
        assistant([{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "hi"}]),
        assistant([{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "hi"}]),
    ),
    "names and provider fields": (
        assistant("hi"),
        {**assistant("hi"), "name": "bot", "provider_specific_fields": {"refusal": None}, "tool_calls": None},
    ),
    "what LiteLLM sends for an empty reply": (assistant(""), assistant("\n"), assistant(EMPTY_TEXT)),
    "developer is system": (system("hi"), {"role": "developer", "content": "hi"}),
    "billing header": (
        system(
            [{"type": "text", "text": "x-anthropic-billing-header: cc=1; cch=ab12"}, {"type": "text", "text": "You"}]
        ),
        system(
            [{"type": "text", "text": "x-anthropic-billing-header: cc=1; cch=77ff"}, {"type": "text", "text": "You"}]
        ),
        system("x-anthropic-billing-header: cc=1; cch=0000\nYou"),
        system("You"),
    ),
    "key order and spaces": (call('{"a": 1, "b": [1, 2]}'), call('{"b":[1,2],"a":1}')),
    "escapes": (call('{"a": "\\u00fc\\/"}'), call('{"a": "ü/"}')),
    "numbers": (call('{"a": 1.0}'), call('{"a": 1}'), call('{"a": 1e0}')),
    "minus zero": (call('{"a": -0.0}'), call('{"a": 0}')),
    "large numbers": (call('{"a": 1e21}'), call('{"a": 1000000000000000000000}'), call('{"a": 1e+21}')),
    "integers that lost digits": (
        call('{"a": [12345678901234567890]}'),
        call('{"a": [12345678901234567000]}'),
        call('{"a": [1.2345678901234567e19]}'),
    ),
    "numbers past every double": (call('{"a": 1e999}'), call('{"a": 1' + "0" * 999 + "}"), call('{"a": null}')),
    "the first integer that a double loses": (
        call('{"a": 9007199254740993}'),
        call('{"a": 9007199254740992}'),
        call('{"a": 9007199254740992.0}'),
    ),
    "text that is no JSON": (
        call("rm -rf"),
        call(" rm -rf\n"),
        call(json.dumps({"__unparsedToolInput": "rm -rf"})),
    ),
    "JSON said to be unparsed": (call('{"a": 1}'), call(json.dumps({"__unparsedToolInput": '{"a":1.0}'}))),
    "no arguments": (call(""), call("{}"), call(" { } "), call(None), call({})),
    "arguments as an object": (call('{"a": 1.0}'), call({"a": 1})),
    "ids of calls": (call("{}", call_id="a"), call("{}", call_id="call_0123456789ab_0")),
    "foreign ids of results": (tool("toolu_1", "out"), tool("toolu_2", "out"), {"role": "tool", "content": "out"}),
    "our ids under any prefix": (tool("call_0123456789ab_0", "out"), tool("toolu_0123456789ab_0", "out")),
}

DIFFERENT = {
    "role": (user("hi"), assistant("hi"), system("hi"), tool("x", "hi"), {"role": "critic", "content": "hi"}),
    "unknown roles": ({"role": "critic", "content": "hi"}, {"role": "judge", "content": "hi"}),
    "inner and outer whitespace": (user("a b"), user("a  b"), user(" a b"), user("a b\n")),
    "case": (user("a"), user("A")),
    "a header elsewhere": (user("x-anthropic-billing-header: 1"), user("x-anthropic-billing-header: 2")),
    "call names": (call("{}", name="a"), call("{}", name="b")),
    "a call or none": (assistant(""), call("{}")),
    "arguments": (call('{"a": 1}'), call('{"a": 2}'), call('{"a": "1"}'), call('{"a": true}'), call('{"a": 1.5}')),
    "exact integers": (call('{"a": 9007199254740991}'), call('{"a": 9007199254740990}')),
    "digits in strings": (call('{"a": "12345678901234567890"}'), call('{"a": "12345678901234567000"}')),
    "text and JSON": (call("{"), call("{}"), call('"{"')),
    "number and order of calls": (
        assistant("", ("1", "a", "{}"), ("2", "b", "{}")),
        assistant("", ("2", "b", "{}"), ("1", "a", "{}")),
        assistant("", ("1", "a", "{}")),
    ),
    "our ids of results": (
        tool("call_0123456789ab_0", "out"),
        tool("call_0123456789ab_1", "out"),
        tool("call_ba9876543210_0", "out"),
        tool("x", "out"),
    ),
    "images": (
        user([{"type": "image_url", "image_url": {"url": "a"}}]),
        user([{"type": "image_url", "image_url": {"url": "b"}}]),
        user(""),
    ),
    "what LiteLLM sends for an empty text of others": (user(""), user(EMPTY_TEXT)),
    "where text ends": (
        user([{"type": "image_url", "image_url": {"url": "a"}}, {"type": "text", "text": "b"}]),
        user([{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": "a"}}]),
    ),
    "content that looks like a call": (call("{}"), assistant("\xff" + "bash" + "\xff" + "{{}")),
}


@pytest.mark.parametrize("messages", SAME.values(), ids=SAME.keys())
def test_the_same_message(messages):
    assert same(*messages)


@pytest.mark.parametrize("messages", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_another_message(messages):
    assert len({message_digest(m) for m in messages}) == len(messages)


def test_a_digest_says_who_spoke():
    said = [system("x"), user("x"), assistant("x"), tool("x", "x"), {"role": "critic", "content": "x"}]
    assert [message_digest(m)[:1] for m in said] == [b"s", b"u", b"a", b"t", b"o"]
    assert all(len(message_digest(m)) == 16 for m in said)


@pytest.mark.parametrize("odd", ["\ud800", '{"a": "\\ud800"}', "[" * 100_000, '{"a": NaN}', "\x00", '{"a":1}{'])
def test_odd_text_is_never_an_error(odd):
    assert same(call(odd), call(odd + " "))
    assert len(message_digest(user(odd))) == 16


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def as_javascript_would(value):
    """What a client in JavaScript has after JSON.parse: every number a double."""
    if isinstance(value, dict):
        return {key: as_javascript_would(item) for key, item in reversed(list(value.items()))}
    if isinstance(value, list):
        return [as_javascript_would(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            return None
        if number in (float("inf"), float("-inf")):
            return None
        return int(number) if number.is_integer() and abs(number) < 1e21 else number
    return value


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_arguments_survive_a_round_trip_through_a_javascript_client(arguments):
    echo = json.dumps(as_javascript_would(arguments), separators=(",", ":"))
    assert same(call(json.dumps(arguments, indent=1)), call(echo))


def test_tools_count_in_order_and_whole():
    a = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}}
    b = {"type": "function", "function": {"name": "b"}}
    marked = {**a, "cache_control": {"type": "ephemeral"}, "function": {**a["function"], "description": None}}
    assert tools_digest([]) == tools_digest(None)
    assert tools_digest([a, b]) == tools_digest([dict(reversed(marked.items())), b])
    others = [[a, b], [b, a], [a], [], [{**a, "function": {**a["function"], "description": "x"}}]]
    assert len({tools_digest(tools) for tools in others}) == len(others)
    assert len(tools_digest([a])) == 8


def test_options_count_when_they_are_set():
    assert options_digest(None) == options_digest({}) == options_digest({"a": None, "b": {}})
    assert options_digest({"a": 1, "b": 2}) == options_digest({"b": 2, "a": 1})
    assert options_digest({"a": True}) != options_digest({"a": False})
    assert len(options_digest({})) == 8


@pytest.mark.parametrize("text", ['{"command": "ls", "', "plain", "x" * 5000, "é☕𝄞" * 2000])
def test_arguments_that_are_no_json_come_back_wrapped_and_cut(text: str) -> None:
    """As Claude Code does it: the beginning of a long one, and its length, in JavaScript's units."""
    units = text.encode("utf-16-le")
    raw = units[: 2 * 2048].decode("utf-16-le", "ignore")
    wrapped = json.dumps({"__unparsedToolInput": {"raw": raw, "len": len(units) // 2}})
    assert digest_of(text) == digest_of(wrapped) == digest_of(json.dumps({"__unparsedToolInput": text}))
    assert digest_of(text) != digest_of("y" + text[1:])
    assert (digest_of(text) == digest_of(text[:-1])) == (len(text) > 2048)


def digest_of(arguments: str) -> bytes:
    call = {"id": "", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return message_digest({"role": "assistant", "content": "", "tool_calls": [call]})
