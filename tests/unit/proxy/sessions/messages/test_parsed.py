"""Arguments as a client's schema parsed them are those that were sampled. Emptied, shortened or other ones are not."""

from __future__ import annotations

import json

import pytest

from steno_proxy.sessions.messages.echoes import EchoedAs, echo_of
from steno_proxy.sessions.messages.normalise import message_digest
from steno_proxy.sessions.messages.parsed import is_as_parsed, schemas_of
from tests.unit.proxy.sessions.agent import assistant

TURN = "0123456789ab"
ONE, TWO = f"call_{TURN}_0", f"call_{TURN}_1"
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "limit": {"type": "number", "default": 100},
        "all": {"type": "boolean", "default": False},
        "range": {"type": "object", "properties": {"from": {"type": "number"}, "step": {"default": 1}}},
        "edits": {"type": "array", "items": {"type": "object", "properties": {"old": {}, "new": {}}}},
    },
    "required": ["path"],
}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": "a", "limit": None}, {"path": "a"}),
        ({"path": "a"}, {"path": "a", "limit": None}),
        ({"path": "a", "why": "to see"}, {"path": "a"}),
        ({"path": "a"}, {"path": "a", "limit": 100.0, "all": False}),
        ({"path": "a", "limit": "3", "all": "true"}, {"path": "a", "limit": 3, "all": True}),
        ({"path": 3}, {"path": "3"}),
        ({"range": {"from": "-2.5", "x": 1}}, {"range": {"from": -2.5, "step": 1}}),
        ({"edits": [{"old": "a", "new": None, "why": ""}]}, {"edits": [{"old": "a"}]}),
        ({"limit": None}, {}),
        ({}, {"limit": 100}),
    ],
)
def test_what_parsing_by_the_schema_makes_of_arguments_is_the_call(given, said):
    assert is_as_parsed(said, given, SCHEMA)
    reply = assistant("Both.", (ONE, "read", json.dumps(given)), (TWO, "ls", "{}"))
    echo = assistant("Both.", (ONE, "read", json.dumps(said)), (TWO, "ls", "{}"))
    assert echo_of(echo, reply, TURN, partial=False, tools=TOOLS) == (message_digest(reply), reply, EchoedAs.CALL_IDS)
    foreign = assistant("Both.", ("x", "read", json.dumps(said)), ("y", "ls", "{}"))
    assert echo_of(foreign, reply, TURN, partial=False, tools=TOOLS) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": "a"}, {}),
        ({"why": "to see"}, {}),
        ({"path": "a", "limit": 3}, {"path": "a"}),
        ({"path": "a", "limit": 3}, {"limit": 3}),
        ({"path": "a", "limit": 3}, {"path": "a", "limit": 100}),
        ({"path": "a", "limit": 3}, {"path": "a", "limit": None}),
        ({"path": "a", "limit": None}, {"path": "a", "limit": 100}),
        ({"path": "a"}, {"path": "a", "limit": 99}),
        ({"path": "a"}, {"path": "a", "limit": "100"}),
        ({"path": "a"}, {"path": "a", "all": 0}),
        ({"path": "a"}, {"path": "a", "why": "to see"}),
        ({"path": "a long text"}, {"path": "a long"}),
        ({"path": "a long text"}, {"path": ""}),
        ({"path": "a "}, {"path": "a"}),
        ({"path": "null"}, {"path": None}),
        ({"path": "03"}, {"path": 3}),
        ({"path": "1"}, {"path": True}),
        ({"path": 1}, {"path": True}),
        ({"path": '["a"]'}, {"path": ["a"]}),
        ({"range": {"from": 2}}, {"range": {}}),
        ({"edits": [{"old": "a"}, {"old": "b"}]}, {"edits": [{"old": "a"}]}),
        ({"edits": [{"old": "a"}]}, {"edits": [{"old": "b"}]}),
        ({"limit": 3}, {"limit": 3, "path": ""}),
    ],
)
def test_emptied_shortened_or_other_arguments_are_another_call(given, said):
    assert not is_as_parsed(said, given, SCHEMA)
    reply = assistant("Both.", (ONE, "read", json.dumps(given)))
    echo = assistant("Both.", (ONE, "read", json.dumps(said)))
    assert echo_of(echo, reply, TURN, partial=False, tools=TOOLS) is None


@pytest.mark.parametrize(
    "schema",
    [
        None,
        True,
        {},
        {"properties": {}},
        {"properties": True},
        {**SCHEMA, "additionalProperties": {}},
        {**SCHEMA, "additionalProperties": True},
        {**SCHEMA, "patternProperties": {"^w": {}}},
        {**SCHEMA, "unevaluatedProperties": True},
        {**SCHEMA, "oneOf": [{"properties": {"why": {}}, "required": ["why"]}]},
        {**SCHEMA, "$ref": "#/$defs/more"},
    ],
)
def test_a_key_is_gone_by_parsing_only_where_the_schema_lists_all_that_there_are(schema):
    given = {"path": "a", "why": "to see"}
    assert not is_as_parsed({"path": "a"}, given, schema)
    assert is_as_parsed({"path": "a"}, given, {**SCHEMA, "additionalProperties": False})
    assert is_as_parsed({"path": "a"}, {"path": "a", "limit": None}, schema), "null says as much as no key"


def test_of_two_tools_with_one_name_no_schema_is_known():
    other = {"type": "function", "function": {"name": "read"}}
    assert schemas_of([*TOOLS, {"type": "function", "function": {"name": "ls"}}]) == {"read": SCHEMA, "ls": None}
    assert schemas_of([*TOOLS, other]) == schemas_of([other, *TOOLS]) == {"read": None}


def test_arguments_nested_without_end_are_told_apart_without_an_error():
    given: dict = {}
    for _ in range(100_000):
        given = {"a": given}
    assert not is_as_parsed({"a": given["a"], "b": None}, {"a": given["a"]["a"]}, None)
