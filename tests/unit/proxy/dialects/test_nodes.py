"""What a body holds is counted in its bytes, exactly, however it is cut, and refused before any object is made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.chat import Message
from steno.contracts.errors import BodyTooLarge
from steno_proxy.dialects.nodes import MOST_ESCAPES, SLICE_BYTES, NodeCounter, check_arguments, check_nodes, unbounded

TEXTS = st.text(alphabet=st.sampled_from('ab"\\{}[],:\n\u00e9'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def held(value: Any) -> tuple[int, int]:
    """(objects and arrays, all values) by looking at them."""
    if not isinstance(value, dict | list):
        return 0, 1
    found = [held(inner) for inner in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(nodes for nodes, _ in found), 1 + sum(values for _, values in found)


@given(VALUES, st.lists(st.integers(1, 20), max_size=20), st.booleans())
def test_the_count_is_that_of_the_decoded_value_however_it_is_cut(
    value: Any, cuts: list[int], ascii_only: bool
) -> None:
    body, found, at = json.dumps(value, ensure_ascii=ascii_only).encode(), NodeCounter(), 0
    for cut in cuts:
        found.take(body[at : at + cut])
        at += cut
    found.take(body[at:])
    nodes, values = held(value)
    assert found.nodes == nodes
    # Commas are counted, and not what stands between them: what is empty has as many as what holds one value.
    assert values - 1 <= found.values < values + max(nodes, 1)
    assert found.escapes == body.count(b"\\")


def refusal(body: bytes, most_nodes: int = 50_000) -> str | None:
    try:
        for _ in check_nodes(body, most_nodes):
            pass
    except BodyTooLarge as error:
        return error.message
    return None


def test_a_refusal_says_what_was_seen_and_the_setting() -> None:
    empty = json.dumps({"messages": [{"role": "user", "content": ""}] * 900_000}).encode()
    said = refusal(empty)
    assert said is not None and "max_request_nodes is 50000" in said and "objects and arrays" in said
    ids = json.dumps({"prompt": [7] * 600_000}).encode()
    assert "at least 600001 values; 10 times max_request_nodes is 500000" in (refusal(ids) or "")
    escapes = b'{"messages": "' + b"\\n" * (MOST_ESCAPES + 1) + b'"}'
    assert str(MOST_ESCAPES) in (refusal(escapes) or "")


def test_it_is_refused_within_the_first_slices() -> None:
    """A body of any length costs what it takes to see that it is too much."""
    body, slices = b"[" + b"[]," * 9_000_000 + b"[]]", 0
    with pytest.raises(BodyTooLarge):
        for _ in check_nodes(body, 50_000):
            slices += 1
    assert slices == 0 and len(body) > 20 * SLICE_BYTES


def test_what_real_agents_send_is_far_from_it() -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "edit", "arguments": '{"path": "a,b", "lines": [1, 2]}'},
    }
    turn = [
        {"role": "assistant", "content": [{"type": "text", "text": "I edit [this], {that}."}], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "def f(a, b): {[]}\n" * 100}]},
    ]
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(10)}}
    tool = {"type": "function", "function": {"name": "edit", "parameters": schema}}
    body = json.dumps({"messages": turn * 2_500, "tools": [tool] * 200}).encode()
    assert refusal(body) is None
    assert not unbounded(json.dumps({"messages": turn * 10}).encode(), 50_000)  # it is not even looked at


def test_arguments_are_counted_too_since_a_history_is_compared_by_them() -> None:
    def message(arguments: str) -> Message:
        calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    for _ in check_arguments([message(json.dumps([1.5] * 900))] * 100, 50_000):
        pass
    with pytest.raises(BodyTooLarge, match="max_request_nodes is 100000"):
        for _ in check_arguments([message(json.dumps([1.5] * 900))] * 120, 50_000):
            pass
    for _ in check_arguments([message(json.dumps({"text": "a, [b], {c} " * 100_000}))], 50_000):
        pass  # one string
