"""What Gemini's clients get, read by Google's own SDK: its HTTP layer, its event parser, its types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types
from hypothesis import given, settings
from hypothesis import strategies as st

from steno.contracts.chat import CanonicalRequest, Job, TokenLogprob, ToolCallPiece
from steno.contracts.errors import BadRequest, BudgetSpent, ContextOverflow, Gone, NoWorker, StenoError
from steno_proxy.dialects.base import Choice, Header, Piece
from steno_proxy.dialects.gemini.dialect import GeminiDialect

HEADER = Header("0123456789ab", 1_700_000_000, "gemini-x")
EVENTS, ARRAY, WHOLE = GeminiDialect(stream=True, sse=True), GeminiDialect(stream=True), GeminiDialect()


@dataclass
class Said:
    """One completion. pieces: as they stream; text, reasoning and arguments add up over them."""

    pieces: list[Piece] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments)
    finish: str = "stop"
    thought_tokens: int = 0

    def choice(self, index: int = 0) -> Choice:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(piece.content for piece in self.pieces)}
        if reasoning := "".join(piece.reasoning for piece in self.pieces):
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": f"fc_0123456789ab_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(self.calls)
            ]
        tokens = [token for piece in self.pieces for token in piece.tokens]
        count = len(self.pieces) + self.thought_tokens + 1
        return Choice(index, message, self.finish, 11, count, 5, tokens, reasoning_tokens=self.thought_tokens)


def request(*, thoughts: bool = False, top: int | None = None, n: int = 1) -> CanonicalRequest:
    kept = {"thoughts": True} if thoughts else {}
    return CanonicalRequest("gemini", "gemini-x", Job(top_logprobs=top), n=n, kept=kept)


def streamed(dialect: GeminiDialect, asked: CanonicalRequest, *said: Said) -> bytes:
    writer = dialect.writer(asked, HEADER)
    out = [writer.begin(i, 11, 5) for i in range(len(said))]
    out += [writer.piece(i, piece) for i, each in enumerate(said) for piece in each.pieces]
    choices = [each.choice(i) for i, each in enumerate(said)]
    return b"".join([*out, *map(writer.finish, choices), writer.end(choices)])


class Sdk:
    """Google's client over a transport that answers what it is given, in the chunks it is given."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.status = 200
        transport = httpx.MockTransport(self._answer)
        self.client = genai.Client(
            api_key="k", http_options=types.HttpOptions(base_url="http://steno/t", client_args={"transport": transport})
        )

    def _answer(self, asked: httpx.Request) -> httpx.Response:
        self.asked = asked
        return httpx.Response(self.status, stream=_Chunks(self.chunks), headers={"content-type": "application/json"})

    def stream(self, data: bytes, cuts: list[int]) -> list[types.GenerateContentResponse]:
        edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        self.chunks = [data[start:end] for start, end in pairwise(edges)]
        return list(self.client.models.generate_content_stream(model="m", contents="hi"))

    def whole(self, data: bytes) -> types.GenerateContentResponse:
        self.chunks = [data]
        return self.client.models.generate_content(model="m", contents="hi")


class _Chunks(httpx.SyncByteStream):
    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)


sdk = Sdk()


def read(chunks: list[types.GenerateContentResponse], index: int = 0) -> dict[str, Any]:
    """What a client makes of an answer, whatever its chunks."""
    seen: dict[str, Any] = {"text": "", "thought": "", "calls": [], "finish": [], "usage": None}
    for chunk in chunks:
        assert (chunk.model_version, chunk.response_id) == ("gemini-x", "0123456789ab")
        for candidate in chunk.candidates or []:
            if (candidate.index or 0) != index:
                continue
            assert candidate.content is not None and candidate.content.role == "model" and candidate.content.parts
            for part in candidate.content.parts:
                if part.function_call is not None:
                    called = part.function_call
                    assert part.thought_signature == (called.id or "").encode()
                    seen["calls"].append((called.id, called.name, called.args))
                else:
                    seen["thought" if part.thought else "text"] += part.text
            if candidate.finish_reason is not None:
                seen["finish"].append(candidate.finish_reason.value)
        seen["usage"] = chunk.usage_metadata or seen["usage"]
    return seen


def projected(said: Said, thoughts: bool) -> dict[str, Any]:
    """The same, from the canonical answer."""
    message = said.choice().message
    return {
        "text": message["content"],
        "thought": message.get("reasoning_content", "") if thoughts else "",
        "calls": [
            (call["id"], call["function"]["name"], _object(call["function"]["arguments"]))
            for call in message.get("tool_calls", [])
        ],
        "finish": ["MAX_TOKENS" if said.finish == "length" else "STOP"],
    }


def _object(arguments: str) -> Any:
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"__unparsedToolInput": arguments}


def check_usage(usage: types.GenerateContentResponseUsageMetadata, *said: Said) -> None:
    thoughts = sum(each.thought_tokens for each in said)
    completion = sum(each.choice().completion_tokens for each in said)
    assert usage.prompt_token_count == 11
    assert usage.candidates_token_count == completion - thoughts
    assert (usage.thoughts_token_count or 0) == thoughts
    assert usage.cached_content_token_count == 5
    assert usage.total_token_count == 11 + completion


TEXT = st.text(max_size=8) | st.sampled_from(["\n", "\r\n", "\u2028", "data: {", "☕", "</think>", "\0", '"'])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = (
    st.tuples(st.dictionaries(TEXT, JSON, max_size=3), st.sampled_from([None, 2]), st.booleans()).map(
        lambda made: json.dumps(made[0], indent=made[1], ensure_ascii=made[2])
    )
    | JSON.map(json.dumps)
    | TEXT
)
SAID = st.builds(
    Said,
    st.lists(st.builds(Piece, TEXT, TEXT), max_size=6),
    st.lists(st.tuples(st.text("abc_", min_size=1, max_size=5), ARGUMENTS), max_size=3),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.integers(0, 3),
)


@settings(max_examples=300)
@given(SAID, st.booleans(), st.lists(st.integers(0, 3000), max_size=8))
def test_any_answer_in_any_chunks_reads_back_as_its_projection(said: Said, thoughts: bool, cuts: list[int]) -> None:
    asked = request(thoughts=thoughts)
    wanted = projected(said, thoughts)
    chunks = sdk.stream(streamed(EVENTS, asked, said), cuts)
    seen = read(chunks)
    check_usage(seen.pop("usage"), said)
    assert seen == wanted
    assert all(chunk.candidates for chunk in chunks)  # the SDK's chats forget a turn with a chunk that has none
    whole = read([sdk.whole(WHOLE.answer(asked, HEADER, [said.choice()]))])
    check_usage(whole.pop("usage"), said)
    assert whole == wanted
    array = read(
        [types.GenerateContentResponse.model_validate(each) for each in json.loads(streamed(ARRAY, asked, said))]
    )
    assert {key: array[key] for key in wanted} == wanted


def test_candidates_come_side_by_side_and_the_last_usage_is_of_all() -> None:
    said = [Said([Piece("one")]), Said([Piece("two"), Piece("!")], finish="length"), Said(calls=[("f", '{"a": 1}')])]
    for cuts in ([], [10, 200]):
        chunks = sdk.stream(streamed(EVENTS, request(n=3), *said), cuts)
        for index, each in enumerate(said):
            seen = read(chunks, index)
            assert (seen["text"], seen["finish"]) == (projected(each, False)["text"], projected(each, False)["finish"])
        assert chunks[-1].usage_metadata is not None
        check_usage(chunks[-1].usage_metadata, *said)
    whole = sdk.whole(WHOLE.answer(request(n=3), HEADER, [each.choice(i) for i, each in enumerate(said)]))
    assert [candidate.index for candidate in whole.candidates or []] == [0, 1, 2]


def test_calls_leave_with_the_end_and_their_arguments_as_sampled() -> None:
    pieces = [
        Piece(tool_calls=[ToolCallPiece(0, '{"a":', "fc_0123456789ab_0", "f")]),
        Piece(tool_calls=[ToolCallPiece(0, "1.0}")]),
    ]
    said = Said(pieces, [("f", '{"a":\n 1.0, "b": 123456789012345678901234567890}')])
    writer = EVENTS.writer(request(), HEADER)
    assert [writer.piece(0, piece) for piece in pieces] == [b"", b""]
    last = writer.finish(said.choice())
    assert b'"args":{"a":  1.0, "b": 123456789012345678901234567890}' in last
    assert last.count(b"\n\n") == 1 and last.endswith(b"\n\n")


def test_logprobs_only_for_those_who_ask() -> None:
    tokens = [TokenLogprob("a", b"a", -0.5, [("a", b"a", -0.5), ("b", b"b", -1.5)]), TokenLogprob("", b"\xff", -0.25)]
    said = Said([Piece("a", tokens=tokens[:1]), Piece("", tokens=tokens[1:])])
    for top, expected in ((2, tokens), (None, [])):
        chunks = sdk.stream(streamed(EVENTS, request(top=top), said), [])
        found = [c.candidates[0].logprobs_result for c in chunks if c.candidates and c.candidates[0].logprobs_result]
        chosen = [each for result in found for each in result.chosen_candidates or []]
        assert [(each.token, each.log_probability) for each in chosen] == [
            (token.text, token.logprob) for token in expected
        ]
    [candidate] = sdk.whole(WHOLE.answer(request(top=2), HEADER, [said.choice()])).candidates or []
    assert candidate.avg_logprobs == -0.375 and candidate.logprobs_result is not None
    tops = candidate.logprobs_result.top_candidates or []
    assert [[each.token for each in top.candidates or []] for top in tops] == [["a", "b"], []]


def test_a_keepalive_is_nothing_to_the_sdk_and_to_json() -> None:
    said = Said([Piece("a"), Piece("b")])
    keepalive = GeminiDialect.keepalive
    data = keepalive * 2 + streamed(EVENTS, request(), said).replace(b"\n\n", b"\n\n" + keepalive * 3)
    assert read(sdk.stream(data, [3, 40]))["text"] == "ab"
    assert len(json.loads(keepalive + streamed(ARRAY, request(), said) + keepalive)) == 3
    assert EVENTS.broken(NoWorker("gone")) == b""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadRequest("no", field="contents"), "INVALID_ARGUMENT"),
        (ContextOverflow("too long", prompt_tokens=9, context_tokens=8), "INVALID_ARGUMENT"),
        (BudgetSpent("spent"), "PERMISSION_DENIED"),
        (Gone("over"), "FAILED_PRECONDITION"),
        (NoWorker("none"), "UNAVAILABLE"),
        (StenoError("bug"), "INTERNAL"),
    ],
)
def test_errors_are_googles(error: StenoError, status: str) -> None:
    answering = Sdk()
    answering.status = error.status
    with pytest.raises(errors.APIError) as raised:
        answering.whole(WHOLE.error(error))
    assert (raised.value.code, raised.value.status) == (error.status, status)
    if isinstance(error, ContextOverflow):
        assert raised.value.message == "The input token count (9) exceeds the maximum number of tokens allowed (8)."
    details = {each["@type"].rpartition(".")[2]: each for each in raised.value.details["error"]["details"]}
    assert details["ErrorInfo"]["reason"] == error.code
    assert details.get("RetryInfo", {}).get("retryDelay") == ("1s" if error.retryable else None)
    assert ("BadRequest" in details) == (error.field is not None)
