"""Responses that leave: any answer, in any pieces, read by the official SDK's own types, is the answer again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from steno.contracts.chat import TokenLogprob, ToolCallPiece
from steno.contracts.errors import ContextOverflow, EngineFailed, WorkerLost
from steno_proxy.dialects.base import Choice, Header, Piece
from steno_proxy.dialects.responses.dialect import ResponsesDialect
from steno_proxy.dialects.responses.output import ResponsesRequest
from steno_proxy.dialects.responses.text import FreeText, free_text
from steno_proxy.sessions.messages.echoes import EchoedAs, echo_of
from steno_proxy.sessions.messages.normalise import message_digest

RESPONSES = ResponsesDialect()
TURN = "0123456789ab"
HEADER = Header(TURN, 1700000000, "m")
PLAIN: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOOLS: list[dict[str, Any]] = [
    PLAIN,
    {"type": "namespace", "name": "crew", "description": "", "tools": [PLAIN]},
    {"type": "custom", "name": "patch"},
]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def parse(**body: Any) -> ResponsesRequest:
    request = RESPONSES.parse(json.dumps({"input": "hi", "tools": TOOLS, **body}).encode())
    assert isinstance(request, ResponsesRequest)
    return request


def events(data: bytes) -> list[dict[str, Any]]:
    """Checks the frames, and that events are numbered without a gap."""
    found = []
    for frame in data.decode().split("\n\n")[:-1]:
        name, body = frame.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == "event: " + event["type"]
        found.append(event)
    first = found[0]["sequence_number"] if found else 0
    assert [event["sequence_number"] for event in found] == list(range(first, first + len(found)))
    return found


def choice(message: dict[str, Any], reason: str = "stop", **fields: Any) -> Choice:
    return Choice(0, message, reason, prompt_tokens=7, completion_tokens=5, **fields)


def stream(request: ResponsesRequest, pieces: list[Piece], done: Choice) -> tuple[list[dict[str, Any]], list[bool]]:
    """All events, and for each piece whether it closed something."""
    writer = RESPONSES.writer(request, HEADER)
    data, closed = writer.begin(0, 7, 0), []
    for piece in pieces:
        closed.append(writer.closes(0, piece))
        data += writer.piece(0, piece)
    return events(data + writer.finish(done) + writer.end([done])), closed


def read_back(found: list[dict[str, Any]], request: ResponsesRequest) -> Response:
    """What the SDK makes of a stream; it must agree with what the last event says."""
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for event in found:
        state.handle_event(EVENT.validate_python(event))
    snapshot = state._ResponseStreamState__current_snapshot
    final = Response.model_validate(found[-1]["response"])
    for item, whole in zip(snapshot.output, final.output, strict=True):
        before, after = item.to_dict(), whole.to_dict()
        for part in [before, after, *before.get("content", [])]:
            for volatile in ("status", "parsed", "parsed_arguments"):
                part.pop(volatile, None)
        if item.type not in ("reasoning", "custom_tool_call"):  # the SDK does not gather these deltas
            assert before == after
    return final


def message_of(response: Response) -> dict[str, Any]:
    """A response -> the canonical message, as a client would echo it."""
    items = [item.to_dict() for item in response.output]
    [user, message] = RESPONSES.parse(
        json.dumps({"input": [{"role": "user", "content": "hi"}, *items], "tools": TOOLS}).encode()
    ).job.messages
    assert user["role"] == "user"
    return message


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ARGUMENTS = st.one_of(
    TEXT,
    st.dictionaries(st.text('ab%"', max_size=2), TEXT, max_size=2).map(json.dumps),
    TEXT.map(lambda text: json.dumps({"input": text})),
    TEXT.map(lambda text: json.dumps({"input": text}, ensure_ascii=False)),
)
FREE = st.one_of(
    TEXT.map(lambda text: json.dumps({"input": text}, separators=(",", ":"))), TEXT.filter(lambda t: "{" not in t)
)
CALLS = st.lists(
    st.one_of(st.tuples(st.sampled_from(["f", "crew__f", "none"]), ARGUMENTS), st.tuples(st.just("patch"), FREE)),
    max_size=3,
)


def cut(draw: Any, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def answers(draw: Any) -> tuple[dict[str, Any], list[Piece]]:
    """A canonical answer, and one way in which it may arrive."""
    reasoning, content, calls = draw(TEXT), draw(TEXT), draw(CALLS)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    pieces = [Piece(reasoning=part) for part in cut(draw, reasoning)] + [
        Piece(content=part) for part in cut(draw, content)
    ]
    if reasoning:
        message["reasoning_content"] = reasoning
    for i, (name, arguments) in enumerate(calls):
        call_id = f"call_{TURN}_{i}"
        function = {"name": name, "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        first, *rest = cut(draw, arguments)
        pieces.append(Piece(tool_calls=[ToolCallPiece(i, first, call_id, name)]))
        pieces += [Piece(tool_calls=[ToolCallPiece(i, part)]) for part in rest]
    joined: list[Piece] = []
    for piece in pieces:  # deltas of one engine step may come together
        if joined and draw(st.booleans()):
            last = joined[-1]
            if not (piece.reasoning and (last.content or last.tool_calls)) and not (piece.content and last.tool_calls):
                last.reasoning += piece.reasoning
                last.content += piece.content
                last.tool_calls = last.tool_calls + piece.tool_calls
                continue
        joined.append(piece)
    return message, joined


@settings(max_examples=300)
@given(answers(), st.booleans(), st.sampled_from([None, "auto"]), st.sampled_from(["stop", "length"]))
def test_any_answer_in_any_pieces_read_by_the_sdk_is_the_answer_again(
    answer: tuple[dict[str, Any], list[Piece]], sealed: bool, summary: str | None, reason: str
) -> None:
    message, pieces = answer
    include = ["reasoning.encrypted_content"] if sealed else []
    request = parse(include=include, reasoning={"summary": summary}, stream=True)
    done = choice(message, reason)
    found, _ = stream(request, pieces, done)
    streamed = read_back(found, request)
    whole = Response.model_validate_json(RESPONSES.answer(request, HEADER, [done]))
    for response in (streamed, whole):
        echoed = message_of(response)
        assert message_digest(echoed) == message_digest(message)
        assert echoed["content"] == message["content"]
        assert echoed.get("reasoning_content") == message.get("reasoning_content")
    assert streamed.model_dump(exclude={"output"}) == whole.model_dump(exclude={"output"})
    assert [item.id for item in streamed.output] == [item.id for item in whole.output]
    assert streamed.status == ("incomplete" if reason == "length" else "completed")
    assert found[-1]["type"] == f"response.{streamed.status}"


@settings(max_examples=200)
@given(answers())
def test_no_item_is_closed_without_saying_so_first(answer: tuple[dict[str, Any], list[Piece]]) -> None:
    """I3: what closes an item is announced by `closes`, and nothing else is."""
    _, pieces = answer
    writer = RESPONSES.writer(parse(), HEADER)
    writer.begin(0, 7, 0)
    for piece in pieces:
        said = writer.closes(0, piece)
        assert said == (b"output_item.done" in b"".join(
            line for line in writer.piece(0, piece).split(b"\n") if line.startswith(b"event: ")
        ))  # fmt: skip


def test_the_order_of_events_is_openais() -> None:
    calls = [{"id": f"call_{TURN}_0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
    pieces = [
        Piece(reasoning="h"), Piece(reasoning="m"), Piece(content="Lo"), Piece(content="ok"),
        Piece(tool_calls=[ToolCallPiece(0, "", calls[0]["id"], "f")]), Piece(tool_calls=[ToolCallPiece(0, '{"a":1}')]),
    ]  # fmt: skip
    done = choice(
        {"role": "assistant", "content": "Look", "reasoning_content": "hm", "tool_calls": calls}, "tool_calls"
    )
    found, closed = stream(parse(), pieces, done)
    assert closed == [False, False, True, False, True, False]
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert {event["item_id"] for event in found if event.get("output_index") == 1 and "item_id" in event} == {
        f"msg_{TURN}_1"
    }


def test_summaries_are_what_clients_get_that_ask_for_them() -> None:
    done = choice({"role": "assistant", "content": "x", "reasoning_content": "hm"})
    found, _ = stream(parse(reasoning={"summary": "auto"}), [Piece(reasoning="hm"), Piece(content="x")], done)
    assert [event["type"] for event in found[2:8]] == [
        "response.output_item.added", "response.reasoning_summary_part.added", "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done", "response.reasoning_summary_part.done", "response.output_item.done",
    ]  # fmt: skip
    assert found[7]["item"]["summary"] == [{"type": "summary_text", "text": "hm"}] and "content" not in found[7]["item"]


def test_calls_of_namespaces_and_free_text_look_as_their_client_expects() -> None:
    pieces = [
        Piece(tool_calls=[ToolCallPiece(0, "{}", f"call_{TURN}_0", "crew__f")]),
        Piece(tool_calls=[ToolCallPiece(1, '{"inp', f"call_{TURN}_1", "patch")]),
        Piece(tool_calls=[ToolCallPiece(1, 'ut": "*** a\\')]), Piece(tool_calls=[ToolCallPiece(1, 'n\\u00e9"}')]),
    ]  # fmt: skip
    found, _ = stream(parse(), pieces, choice({"role": "assistant", "content": ""}, "tool_calls"))
    first, second = found[-1]["response"]["output"]
    assert (first["type"], first["namespace"], first["name"]) == ("function_call", "crew", "f")
    assert (second["type"], second["name"], second["input"]) == ("custom_tool_call", "patch", "*** a\né")
    deltas = [event["delta"] for event in found if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["*** a", "\né"]


@given(TEXT, st.data())
def test_free_text_comes_out_as_it_is_sampled(text: str, data: Any) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=data.draw(st.booleans()))
    reader = FreeText()
    said = "".join(reader.feed(part) for part in cut(data.draw, arguments)) + reader.end()
    assert (said, reader.raw) == (text, False) == free_text(arguments)


@given(st.text(max_size=20), st.data())
def test_arguments_of_any_shape_have_one_reading(arguments: str, data: Any) -> None:
    reader = FreeText()
    said = "".join(reader.feed(part) for part in cut(data.draw, arguments)) + reader.end()
    assert (said, reader.raw) == free_text(arguments)
    assert not reader.raw or said == arguments


@pytest.mark.parametrize("arguments", ['{"input": "a\\', '{"input": "a\\u12', '{"input": "\\ud83d'])
def test_free_text_that_is_cut_off_loses_half_an_escape_at_most(arguments: str) -> None:
    text, raw = free_text(arguments)
    assert text in ("a", "") and not raw


@pytest.mark.parametrize("escaped", [r"a\ud83d b", r"a\ude00 b", r"a\ud99c b"])
@pytest.mark.parametrize("size", [1, 3, 99])
def test_half_a_surrogate_pair_in_free_text_is_told_as_the_replacement_character(escaped: str, size: int) -> None:
    """Streamed in pieces of any size, and in one piece; what comes back is a call of the same text."""
    arguments = f'{{"input":"{escaped}"}}'
    parts = [arguments[i : i + size] for i in range(0, len(arguments), size)]
    pieces = [Piece(tool_calls=[ToolCallPiece(0, part, "", "")]) for part in parts]
    pieces[0].tool_calls[0] = ToolCallPiece(0, parts[0], f"call_{TURN}_0", "patch")
    call = {"id": f"call_{TURN}_0", "type": "function", "function": {"name": "patch", "arguments": arguments}}
    done = choice({"role": "assistant", "content": "", "tool_calls": [call]}, "tool_calls")
    found, _ = stream(parse(), pieces, done)
    [streamed] = found[-1]["response"]["output"]
    [whole] = json.loads(RESPONSES.answer(parse(), HEADER, [done]))["output"]
    assert streamed["input"] == whole["input"] == "a\ufffd b"
    [echoed] = RESPONSES.parse(json.dumps({"input": [whole], "tools": TOOLS}).encode()).job.messages
    assert echoed["tool_calls"][0]["function"]["arguments"] == '{"input":"a\ufffd b"}'
    echo = echo_of(echoed, done.message, TURN, partial=False)
    assert echo is not None and echo.how is EchoedAs.CALL_IDS


def test_an_empty_answer_has_an_empty_message_and_one_of_thoughts_none() -> None:
    empty = choice({"role": "assistant", "content": ""})
    found, _ = stream(parse(), [], empty)
    assert [item["content"][0]["text"] for item in found[-1]["response"]["output"]] == [""]
    thought = choice({"role": "assistant", "content": "", "reasoning_content": "hm"})
    found, _ = stream(parse(), [Piece(reasoning="hm")], thought)
    assert [item["type"] for item in found[-1]["response"]["output"]] == ["reasoning"]


def test_usage_has_cached_and_reasoning_tokens() -> None:
    done = choice({"role": "assistant", "content": "x"}, cached_tokens=3, reasoning_tokens=2)
    shown = Response.model_validate_json(RESPONSES.answer(parse(), HEADER, [done])).usage
    assert shown is not None and shown.model_dump() == {
        "input_tokens": 7, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0}, "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 12,
    }  # fmt: skip


def test_log_probabilities_come_with_their_text() -> None:
    token = TokenLogprob("a", b"a", -0.5, [("a", b"a", -0.5)])
    thought = TokenLogprob("t", b"t", -0.1)
    request = parse(include=["message.output_text.logprobs"], top_logprobs=1)
    pieces = [Piece(reasoning="t", tokens=[thought]), Piece(content="a", tokens=[token])]
    found, _ = stream(request, pieces, choice({"role": "assistant", "content": "a", "reasoning_content": "t"}))
    [delta] = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [(each["token"], each["logprob"]) for each in delta["logprobs"]] == [("a", -0.5)]
    assert found[-1]["response"]["output"][1]["content"][0]["logprobs"] == delta["logprobs"]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (WorkerLost("gone"), "server_error", "gone"),
        (ContextOverflow("too long"), "context_length_exceeded", "too long"),
        (
            ContextOverflow("too long", prompt_tokens=9, context_tokens=8), "context_length_exceeded",
            "This model's maximum context length is 8 tokens.",
        ),
    ],
)  # fmt: skip
def test_a_stream_that_fails_says_so_and_leaves_its_item_open(error: Any, code: str, words: str) -> None:
    writer: Any = RESPONSES.writer(parse(), HEADER)
    data = writer.begin(0, 7, 0) + writer.piece(0, Piece(content="x")) + writer.broken(error)
    found = events(data)
    assert found[-1]["type"] == "response.failed" and found[-1]["response"]["error"]["code"] == code
    assert found[-1]["response"]["error"]["message"].startswith(words)
    assert "response.output_item.done" not in {event["type"] for event in found}
    assert Response.construct(**found[-1]["response"]).status == "failed"
    unsaid: Any = RESPONSES.writer(parse(), HEADER)
    assert [event["type"] for event in events(unsaid.broken(error))] == [
        "response.created", "response.in_progress", "response.failed",
    ]  # fmt: skip


def test_a_call_that_goes_on_after_another_began_is_an_error() -> None:
    writer = RESPONSES.writer(parse(), HEADER)
    writer.begin(0, 7, 0)
    for i in (0, 1):
        writer.piece(0, Piece(tool_calls=[ToolCallPiece(i, "", f"call_{TURN}_{i}", "f")]))
    with pytest.raises(EngineFailed):
        writer.piece(0, Piece(tool_calls=[ToolCallPiece(0, "x")]))


def test_the_end_of_a_call_may_come_with_what_follows_it() -> None:
    """Where one token, or one step of the engine, holds both: the stream failed, as if another call had begun."""
    call_ids = [f"call_{TURN}_{i}" for i in (0, 1)]
    functions = [{"name": "f", "arguments": '{"a": 1}'}, {"name": "f", "arguments": "{}"}]
    calls = [{"id": call_ids[i], "type": "function", "function": function} for i, function in enumerate(functions)]
    pieces = [
        Piece(tool_calls=[ToolCallPiece(0, '{"a": 1', call_ids[0], "f")]),
        Piece(content=")", tool_calls=[ToolCallPiece(0, "}"), ToolCallPiece(1, "{}", call_ids[1], "f")]),
    ]
    answer = choice({"role": "assistant", "content": ")", "tool_calls": calls})
    found, closed = stream(parse(stream=True), pieces, answer)
    assert closed == [False, True]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [item.get("arguments") or item["content"][0]["text"] for item in done] == ['{"a": 1}', ")", "{}"]
    assert [item["type"] for item in done] == ["function_call", "message", "function_call"]
