"""Chat Completions: what a client is told, in events and in one piece."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.chat import TokenLogprob, ToolCallPiece
from steno.contracts.errors import BadRequest, NoWorker
from steno_proxy.dialects.base import Choice, Piece
from steno_proxy.dialects.openai.chat import ChatDialect, Reasoning
from tests.unit.proxy.dialects.openai.test_chat import CHAT, HEADER, parse


def events(data: bytes) -> list[Any]:
    assert data.endswith(b"\n\n")
    lines = data.decode().split("\n\n")[:-1]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def choice(**fields: Any) -> Choice:
    message = fields.pop("message", {"role": "assistant", "content": "hi"})
    return Choice(0, message, fields.pop("reason", "stop"), prompt_tokens=5, completion_tokens=2, **fields)


def test_a_stream_is_role_pieces_finish_usage_done() -> None:
    writer = CHAT.writer(parse(stream=True, stream_options={"include_usage": True}), HEADER)
    data = writer.begin(0, 3, 0) + writer.piece(0, Piece(content='a"\n')) + writer.piece(0, Piece(reasoning="r"))
    done = choice(cached_tokens=3)
    found = events(data + writer.finish(done) + writer.end([done]))
    assert [chunk["choices"][0]["delta"] for chunk in found[:4]] == [
        {"role": "assistant", "content": ""}, {"content": 'a"\n'}, {"reasoning_content": "r", "reasoning": "r"}, {},
    ]  # fmt: skip
    assert [chunk["choices"][0]["finish_reason"] for chunk in found[:4]] == [None, None, None, "stop"]
    assert found[4]["choices"] == [] and found[4]["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    assert found[5] == "[DONE]"
    assert {chunk["id"] for chunk in found[:5]} == {"chatcmpl-0123456789ab"}
    assert {chunk["object"] for chunk in found[:5]} == {"chat.completion.chunk"}


def test_tool_calls_stream_with_index_and_name_once() -> None:
    writer = CHAT.writer(parse(stream=True), HEADER)
    first = ToolCallPiece(0, "", "call_0123456789ab_0", "f")
    data = writer.piece(0, Piece(tool_calls=[first])) + writer.piece(0, Piece(tool_calls=[ToolCallPiece(0, '{"a"')]))
    deltas = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in events(data)]
    assert deltas == [
        {"index": 0, "id": "call_0123456789ab_0", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a"'}},
    ]


def test_a_chunk_says_one_thing() -> None:
    """AutoGen's client drops calls that are in one chunk with text."""
    calls = [
        ToolCallPiece(0, "{}", "call_0123456789ab_0", "f"),
        ToolCallPiece(1, "", "call_0123456789ab_1", "g"),
        ToolCallPiece(1, '{"a": 1}'),
    ]
    tokens = [TokenLogprob("a", b"a", -0.5, [])]
    piece = Piece(content="Now.", reasoning="Well.", tool_calls=calls, tokens=tokens)
    found = events(CHAT.writer(parse(stream=True, logprobs=True), HEADER).piece(0, piece))
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert [list(delta) for delta in deltas] == [
        ["reasoning_content", "reasoning"],
        ["content"],
        ["tool_calls"],
        ["tool_calls"],
    ]
    assert [call["function"] for delta in deltas[2:] for call in delta["tool_calls"]] == [
        {"name": "f", "arguments": "{}"}, {"name": "g", "arguments": '{"a": 1}'},
    ]  # fmt: skip
    assert [chunk["choices"][0]["logprobs"] is not None for chunk in found] == [True, False, False, False]


def test_logprobs_in_chunks_and_bodies() -> None:
    token = TokenLogprob("a", b"a", -0.5, [("a", b"a", -0.5), ("b", b"b", -1.0)])
    request = parse(stream=True, logprobs=True, top_logprobs=2)
    shape = {
        "token": "a", "logprob": -0.5, "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.0, "bytes": [98]}],
    }  # fmt: skip
    [chunk] = events(CHAT.writer(request, HEADER).piece(0, Piece(content="a", tokens=[token])))
    assert chunk["choices"][0]["logprobs"]["content"] == [shape]
    body = json.loads(CHAT.answer(request, HEADER, [choice(tokens=[token])]))
    assert body["choices"][0]["logprobs"]["content"] == [shape]


def test_a_token_without_text_makes_no_chunk_unless_logprobs_were_asked_for() -> None:
    assert CHAT.writer(parse(stream=True), HEADER).piece(0, Piece(ids=b"\1\0\0\0")) == b""
    [chunk] = events(
        CHAT.writer(parse(stream=True, logprobs=True), HEADER).piece(0, Piece(tokens=[TokenLogprob("", b"\xc3", -1.0)]))
    )
    assert chunk["choices"][0]["delta"] == {} and len(chunk["choices"][0]["logprobs"]["content"]) == 1


def test_a_body_without_reasoning_says_so() -> None:
    """As vLLM does. Where the fields are missing LiteLLM looks for reasoning in the text, and takes it out of it."""
    [shown] = json.loads(CHAT.answer(parse(), HEADER, [choice()]))["choices"]
    assert shown["message"]["reasoning_content"] is None and shown["message"]["reasoning"] is None


def test_a_body_has_null_content_beside_tool_calls() -> None:
    calls = [{"id": "call_0123456789ab_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "r"}
    [shown] = json.loads(CHAT.answer(parse(), HEADER, [choice(message=message, reason="tool_calls")]))["choices"]
    assert shown["message"] == {
        "role": "assistant", "content": None, "refusal": None, "reasoning_content": "r", "reasoning": "r", "tool_calls": calls,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("reasoning_content", ["reasoning_content"]),
        ("reasoning", ["reasoning"]),
        ("both", ["reasoning_content", "reasoning"]),
    ],
)
def test_reasoning_is_in_the_fields_that_the_setting_says_and_comes_back_as_one(
    said: Reasoning, fields: list[str]
) -> None:
    chat = ChatDialect(said)
    expected = dict.fromkeys(fields, "r")
    [event] = events(chat.writer(parse(stream=True), HEADER).piece(0, Piece(reasoning="r")))
    assert event["choices"][0]["delta"] == expected
    message = {"role": "assistant", "content": "c", "reasoning_content": "r"}
    [shown] = json.loads(chat.answer(parse(), HEADER, [choice(message=message)]))["choices"]
    assert shown["message"] == {"role": "assistant", "content": "c", "refusal": None, **expected}
    assert parse(messages=[shown["message"]]).job.messages == [message]
    hidden = parse(include_reasoning=False)
    [shown] = json.loads(chat.answer(hidden, HEADER, [choice(message=message)]))["choices"]
    assert shown["message"].keys().isdisjoint(fields)
    assert chat.writer(parse(stream=True, include_reasoning=False), HEADER).piece(0, Piece(reasoning="r")) == b""


def test_errors_have_openais_shape() -> None:
    assert json.loads(CHAT.error(BadRequest("no", field="a.b"))) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "a.b", "code": "invalid_request"}
    }
    assert json.loads(CHAT.error(NoWorker("none")))["error"]["type"] == "server_error"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_splicing(text: str) -> None:
    found = CHAT.writer(parse(stream=True), HEADER).piece(0, Piece(content=text))
    assert (not text and found == b"") or events(found)[0]["choices"][0]["delta"] == {"content": text}
