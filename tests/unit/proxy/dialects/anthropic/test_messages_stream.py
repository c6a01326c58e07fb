"""Anthropic Messages, answers: the official SDK reads back what was said in any chunking; blocks close when `closes` says so."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steno.contracts.chat import CanonicalRequest, Job, Sampling, ToolCallPiece
from steno.contracts.errors import (
    BadRequest,
    BodyTooLarge,
    BudgetSpent,
    ContextOverflow,
    Gone,
    NotFound,
    NoWorker,
    StenoError,
    TooManyRequests,
    Unauthorized,
)
from steno_proxy.dialects.anthropic.dialect import MessagesDialect, blocks, signature
from steno_proxy.dialects.base import Choice, Header, Piece

TURN = "0123456789ab"
HEADER = Header(TURN, 1700000000, "policy")
REQUEST = CanonicalRequest("messages", "policy", Job(sampling=Sampling(stop=["END"])), stream=True)
ORDER = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


class Wire:
    """What the SDK's HTTP client gets instead of a network."""

    def __init__(self) -> None:
        self.body = b""
        self.status = 200
        transport = httpx2.MockTransport(self._answer)
        self.client = anthropic.Anthropic(
            base_url="http://proxy/t",
            api_key="k",
            max_retries=0,
            http_client=anthropic.DefaultHttpxClient(transport=transport),
        )

    def _answer(self, request: Any) -> Any:
        kind = "application/json" if self.body.startswith(b"{") else "text/event-stream"
        return httpx2.Response(self.status, content=self.body, headers={"content-type": kind, "request-id": "r1"})

    def ask(self, **more: Any) -> Any:
        return self.client.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}], **more
        )

    def read(self, body: bytes) -> anthropic.types.Message:
        self.body = body
        return self.ask()

    def events(self, body: bytes) -> list[Any]:
        self.body = body
        return list(self.ask(stream=True))

    def read_stream(self, body: bytes) -> anthropic.types.Message:
        self.body = body
        asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        with self.client.messages.stream(**asked) as stream:  # type: ignore[arg-type]
            return stream.get_final_message()


WIRE = Wire()


def choice(message: dict[str, Any], finish: str = "stop", **more: Any) -> Choice:
    return Choice(0, {"role": "assistant", "content": "", **message}, finish, 100, 7, **{"cached_tokens": 60, **more})


def stream(pieces: list[Piece], ended: Choice) -> bytes:
    """As the turn drives a writer; and its promise about `closes` (I3) is kept on the way."""
    writer = MessagesDialect().writer(REQUEST, HEADER)
    out = writer.begin(0, 100, 0)
    for piece in pieces:
        closes = writer.closes(0, piece)
        data = writer.piece(0, piece)
        assert closes == (b"content_block_stop" in data)
        out += data
    return out + writer.finish(ended) + writer.end([ended])


def call(index: int, arguments: str, name: str = "") -> ToolCallPiece:
    return ToolCallPiece(index, arguments, f"toolu_{TURN}_{index}" if name else "", name)


json_objects = st.dictionaries(
    st.text(max_size=4), st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.text(max_size=6), max_size=3
).map(json.dumps)
answers = st.fixed_dictionaries(
    {"content": st.text(max_size=30), "reasoning": st.text(max_size=20)}
    | {"calls": st.lists(st.tuples(st.sampled_from(["f", "g"]), json_objects), max_size=3)}
)


def canonical(answer: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer["content"]}
    if answer["reasoning"]:
        message["reasoning_content"] = answer["reasoning"]
    if answer["calls"]:
        message["tool_calls"] = [
            {"id": f"toolu_{TURN}_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(answer["calls"])
        ]
    return message


def chunks(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def chunked(draw: st.DrawFn) -> tuple[dict[str, Any], list[Piece]]:
    """An answer, and its pieces in one of the ways a parser may give them: also several things in one piece."""
    answer = draw(answers)
    pieces = [Piece(reasoning=part) for part in chunks(draw, answer["reasoning"])]
    pieces += [Piece(content=part) for part in chunks(draw, answer["content"])]
    for index, (name, arguments) in enumerate(answer["calls"]):
        first, *rest = chunks(draw, arguments)
        pieces.append(Piece(tool_calls=[call(index, first, name)]))
        pieces += [Piece(tool_calls=[call(index, part)]) for part in rest]
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        later = last is not None and (last.tool_calls or (last.content and piece.reasoning))
        if last is not None and draw(st.booleans()) and (piece.tool_calls or not later):
            last.reasoning += piece.reasoning
            last.content += piece.content
            last.tool_calls += piece.tool_calls
        else:
            merged.append(piece)
    return answer, merged


@settings(max_examples=150)
@given(chunked())
def test_the_sdk_reads_back_any_answer_in_any_chunking(given: tuple[dict[str, Any], list[Piece]]) -> None:
    answer, pieces = given
    message = canonical(answer)
    ended = choice(message, "tool_calls" if answer["calls"] else "stop")
    streamed = WIRE.read_stream(stream(pieces, ended))
    whole = WIRE.read(MessagesDialect().answer(REQUEST, HEADER, [ended]))
    projection = json.loads(MessagesDialect().answer(REQUEST, HEADER, [ended]))["content"]
    for read in (streamed, whole):
        seen = [
            {key: value for key, value in block.model_dump().items() if value is not None and key != "parsed_output"}
            for block in read.content
        ]
        assert seen == projection
        assert (read.id, read.model, read.role) == (f"msg_{TURN}", "policy", "assistant")
        assert read.stop_reason == ("tool_use" if answer["calls"] else "end_turn")
        usage = read.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (40, 60, 7)


@settings(max_examples=150)
@given(st.lists(st.sampled_from("rtsc"), max_size=12))
def test_blocks_come_one_after_the_other_in_whatever_order_a_model_speaks(order: list[str]) -> None:
    """r reasoning, t text, s white space, c a new call. Indices ascend, nothing is filled before it opens or after it closes."""
    pieces, calls = [], 0
    for kind in order:
        pieces.append(
            {"r": Piece(reasoning="r"), "t": Piece(content="t"), "s": Piece(content="\n")}.get(kind)
            or Piece(tool_calls=[call(calls, "{}", "f")])
        )
        calls += kind == "c"
    events = WIRE.events(stream(pieces, choice({})))
    open_, next_index = None, 0
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert open_ is None and event.index == next_index
            open_, next_index = event.index, next_index + 1
        else:
            assert event.index == open_
            open_ = None if event.type == "content_block_stop" else open_
    assert open_ is None
    assert [event.type for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    text = "".join(e.delta.text for e in events if e.type == "content_block_delta" and e.delta.type == "text_delta")
    assert text.count("t") == order.count("t")


def test_the_events_of_an_answer_in_their_order() -> None:
    pieces = [
        Piece(reasoning="hm"),
        Piece(content="Now."),
        Piece(tool_calls=[call(0, "", "f")]),
        Piece(tool_calls=[call(0, "{}")]),
    ]
    raw = stream(pieces, choice({}, "tool_calls"))
    events = WIRE.events(raw)
    shape = [(event.type, getattr(getattr(event, "delta", None), "type", None)) for event in events]
    assert shape == [
        ("message_start", None),
        ("content_block_start", None), ("content_block_delta", "thinking_delta"), ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_start", None), ("content_block_delta", "text_delta"), ("content_block_stop", None),
        ("content_block_start", None), ("content_block_delta", "input_json_delta"), ("content_block_delta", "input_json_delta"),
        ("content_block_stop", None),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    assert {event.type for event in events} == set(ORDER)
    assert events[3].delta.signature == signature(TURN)
    assert events[8].content_block.id == f"toolu_{TURN}_0"
    start = events[0].message.usage
    assert (start.input_tokens, start.cache_read_input_tokens, start.cache_creation_input_tokens) == (100, 0, 0)
    assert b"event: ping\n" in raw
    lines = raw.decode().split("\n")
    assert all(
        json.loads(data[6:])["type"] == name[7:] for name, data in zip(lines[::3], lines[1::3], strict=False) if name
    )


@pytest.mark.parametrize(("thinking", "shown"), [
    (None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True), ({"type": "enabled", "budget_tokens": 9}, True),
])  # fmt: skip
def test_thinking_is_shown_to_clients_that_asked_for_it(thinking: dict[str, Any] | None, shown: bool) -> None:
    """As Anthropic shows it. Outlines and many scripts read `content[0].text`; AG2 puts the thought into the reply's text."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "thinking": thinking}
    request = MessagesDialect().parse(json.dumps(body).encode())
    said = choice({"reasoning_content": "hm", "content": "Now."})
    types = ["thinking", "text"] if shown else ["text"]
    assert [block.type for block in WIRE.read(MessagesDialect().answer(request, HEADER, [said])).content] == types
    writer = MessagesDialect().writer(request, HEADER)
    told = writer.begin(0, 100, 0)
    assert not writer.closes(0, Piece(reasoning="hm"))
    told += writer.piece(0, Piece(reasoning="hm"))
    assert writer.closes(0, Piece(content="Now.")) is shown, "an open block of thinking"
    told += writer.piece(0, Piece(content="Now.")) + writer.finish(said) + writer.end([said])
    assert [block.type for block in WIRE.read_stream(told).content] == types


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [("stop", "", "end_turn", None), ("stop", "END", "stop_sequence", "END"), ("stop", "151645", "end_turn", None),
     ("length", "", "max_tokens", None), ("tool_calls", "", "tool_use", None)],
)  # fmt: skip
def test_stop_reasons(finish: str, stop: str, reason: str, sequence: str | None) -> None:
    ended = choice({"content": "a"}, finish, stop=stop)
    for read in (
        WIRE.read(MessagesDialect().answer(REQUEST, HEADER, [ended])),
        WIRE.read_stream(stream([Piece(content="a")], ended)),
    ):
        assert (read.stop_reason, read.stop_sequence) == (reason, sequence)


def test_an_empty_answer_has_no_blocks() -> None:
    assert WIRE.read_stream(stream([], choice({}))).content == []
    assert WIRE.read(MessagesDialect().answer(REQUEST, HEADER, [choice({"content": " \n"})])).content == []


@pytest.mark.parametrize("arguments", ['{"cut', "[1]", "text", '{"a": "b\nc"}', '{"a": "\\ud99c"}'])
def test_arguments_that_no_client_can_read_are_text_in_an_object(arguments: str) -> None:
    """Also in a stream, of which Anthropic's SDK would fail otherwise."""
    ended = choice(canonical({"content": "", "reasoning": "", "calls": [("f", arguments)]}), "tool_calls")
    pieces = [Piece(tool_calls=[call(0, text, "f" if at == 0 else "")]) for at, text in enumerate(arguments)]
    for read in (
        WIRE.read(MessagesDialect().answer(REQUEST, HEADER, [ended])), WIRE.read_stream(stream(pieces, ended))
    ):  # fmt: skip
        [block] = read.content
        assert block.type == "tool_use" and block.input == {"__unparsedToolInput": arguments}


def test_arguments_are_held_back_until_their_block_is_closed() -> None:
    """As they were sampled then; each piece before is an event, so that nobody takes the stream for dead."""
    sampled = '{"a":1.0, "b":123456789012345678901}'
    pieces = [Piece(tool_calls=[call(0, sampled[:5], "f")]), Piece(tool_calls=[call(0, sampled[5:])])]
    events = WIRE.events(stream([*pieces, Piece(tool_calls=[call(1, "{}", "g")])], choice({}, "tool_calls")))
    deltas = [e.delta.partial_json for e in events if e.type == "content_block_delta"]
    assert deltas == ["", "", sampled, "", "{}"]


def test_the_end_of_a_call_may_come_with_what_follows_it() -> None:
    """Where one token, or one step of the engine, holds both."""
    pieces = [
        Piece(tool_calls=[call(0, '{"a": 1', "f")]),
        Piece(content=")", tool_calls=[call(0, "}"), call(1, "{}", "g")]),
    ]
    read = WIRE.read_stream(stream(pieces, choice({}, "tool_calls")))
    assert [getattr(block, "input", None) or getattr(block, "text", None) for block in read.content] == [
        {"a": 1},
        ")",
        None,
    ]


def test_numbers_in_arguments_are_written_as_they_were_sampled() -> None:
    ended = choice(canonical({"content": "", "reasoning": "", "calls": [("f", '{"a":1.0,"b":123456789012345678901}')]}))
    assert b'"input":{"a":1.0,"b":123456789012345678901}' in MessagesDialect().answer(REQUEST, HEADER, [ended])


# -- errors ---------------------------------------------------------------------------------------------------------------

ERRORS: list[tuple[StenoError, type[anthropic.APIStatusError], str]] = [
    (BadRequest("no", field="messages"), anthropic.BadRequestError, "invalid_request_error"),
    (Unauthorized("no"), anthropic.AuthenticationError, "authentication_error"),
    (BudgetSpent("no"), anthropic.PermissionDeniedError, "permission_error"),
    (NotFound("no"), anthropic.NotFoundError, "not_found_error"),
    (Gone("no"), anthropic.APIStatusError, "not_found_error"),
    (BodyTooLarge("no"), anthropic.APIStatusError, "request_too_large"),
    (TooManyRequests("no"), anthropic.RateLimitError, "rate_limit_error"),
    (NoWorker("no"), anthropic.InternalServerError, "overloaded_error"),
    (StenoError("no"), anthropic.InternalServerError, "api_error"),
]


@pytest.mark.parametrize(("error", "kind", "word"), ERRORS, ids=lambda value: getattr(value, "code", ""))
def test_errors_before_the_first_byte(error: StenoError, kind: type[anthropic.APIStatusError], word: str) -> None:
    wire = Wire()
    wire.status, wire.body = error.status, MessagesDialect().error(error, "r1")
    with pytest.raises(kind) as caught:
        wire.ask()
    assert caught.value.body == {"type": "error", "error": {"type": word, "message": "no"}, "request_id": "r1"}
    assert caught.value.request_id == "r1"


def test_an_error_after_the_first_byte_is_an_event() -> None:
    writer = MessagesDialect().writer(REQUEST, HEADER)
    raw = writer.begin(0, 1, 0) + writer.piece(0, Piece(content="a")) + MessagesDialect().broken(NoWorker("gone"))
    with pytest.raises(anthropic.APIStatusError) as caught:
        WIRE.events(raw)
    assert caught.value.body == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}


@pytest.mark.parametrize(("prompt", "maximum"), [(131, 100), (100, 99)])
def test_context_overflow_in_the_words_that_clients_look_for(prompt: int, maximum: int) -> None:
    error = ContextOverflow("too long", prompt_tokens=prompt, context_tokens=100)
    shown = json.loads(MessagesDialect().error(error))["error"]
    assert shown["message"] == f"prompt is too long: {prompt} tokens > {maximum} maximum"


@pytest.mark.parametrize("numbers", [(0, 0), (62, 100)])
def test_context_overflow_in_an_upstreams_words_is_known_by_ours(numbers: tuple[int, int]) -> None:
    error = ContextOverflow("62 in the messages, 80 in the answer", prompt_tokens=numbers[0], context_tokens=numbers[1])
    shown = json.loads(MessagesDialect().error(error))["error"]
    assert shown["message"] == "prompt is too long: 62 in the messages, 80 in the answer"


def test_a_projection_leaves_out_what_is_not_there() -> None:
    assert blocks({"role": "assistant", "content": ""}, TURN) == []
