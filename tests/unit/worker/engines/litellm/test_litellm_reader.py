"""Chunks of an upstream's stream, as LiteLLM shapes them, become deltas without ids; what does not add up is an error."""

from __future__ import annotations

from types import SimpleNamespace as Chunk
from typing import Any

import msgspec
import pytest

from steno.contracts.chat import TokenLogprob, ToolCallPiece
from steno.contracts.errors import EngineFailed
from steno.contracts.wire.frames import Delta, Finish
from steno_worker.engines.litellm.reader import ChunkReader


def chunk(finish: str | None = None, usage: Any = None, logprobs: Any = None, **delta: Any) -> Any:
    return Chunk(choices=[Chunk(delta=Chunk(**delta), finish_reason=finish, logprobs=logprobs)], usage=usage)


def call(index: int | None, call_id: Any = None, name: str | None = None, arguments: Any = None) -> Any:
    return Chunk(index=index, id=call_id, function=Chunk(name=name, arguments=arguments))


def read(*chunks: Any, wants_logprobs: bool = False) -> tuple[list[Delta], Finish]:
    reader = ChunkReader(3, wants_logprobs=wants_logprobs)
    return [delta for one in chunks if (delta := reader.read(one)) is not None], reader.finish()


def test_text_and_reasoning_come_as_they_stream_and_usage_at_the_end() -> None:
    usage = Chunk(
        prompt_tokens=9, completion_tokens=4, prompt_tokens_details=Chunk(cached_tokens=8),
        completion_tokens_details=Chunk(reasoning_tokens=2),
    )  # fmt: skip
    deltas, finish = read(
        chunk(role="assistant", content=None),
        chunk(reasoning_content="hm"),
        chunk(content="o"),
        chunk(content="k"),
        chunk("stop", content=""),
        Chunk(choices=[], usage=usage),
    )
    assert deltas == [Delta(3, b"", b"", "", "", "hm"), Delta(3, b"", b"", "", "o"), Delta(3, b"", b"", "", "k")]
    assert finish == Finish(3, "stop", 4, cached_tokens=8, prompt_tokens=9, reasoning_tokens=2)


def test_calls_are_numbered_by_us_also_where_the_provider_gives_all_the_same_number() -> None:
    deltas, finish = read(
        chunk(tool_calls=[call(0, "a", "look", "")]),
        chunk(tool_calls=[call(0, None, None, '{"x"')]),
        chunk(tool_calls=[call(0, None, None, ": 1}")]),
        chunk(tool_calls=[call(0, "b", "look", "{}"), call(1, "c", "see", "{}")]),
        chunk("stop"),
    )
    pieces = [piece for delta in deltas for piece in delta.tool_calls]
    assert pieces == [
        ToolCallPiece(0, "", "a", "look"), ToolCallPiece(0, '{"x"'), ToolCallPiece(0, ": 1}"),
        ToolCallPiece(1, "{}", "b", "look"), ToolCallPiece(2, "{}", "c", "see"),
    ]  # fmt: skip
    assert finish.reason == "tool_calls"


def test_half_a_surrogate_pair_is_a_replacement_character() -> None:
    token = Chunk(token="\ud83d", bytes=None, logprob=-0.5, top_logprobs=[])
    (delta,) = read(
        chunk(
            "stop", content="a\ud83d", reasoning_content="\ude00", logprobs=Chunk(content=[token]),
            tool_calls=[call(0, "a", "look\ud83d", "\ud83d🚀")],
        ),
        wants_logprobs=True,
    )[0]  # fmt: skip
    assert (delta.content, delta.reasoning) == ("a\ufffd", "\ufffd")
    assert delta.tool_calls == [ToolCallPiece(0, "\ufffd🚀", "a", "look\ufffd")]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=Delta) == delta


@pytest.mark.parametrize(
    ("said", "reason"), [("stop", "stop"), ("length", "length"), ("content_filter", "stop"), ("eos", "stop")]
)
def test_a_providers_own_words_for_the_end_become_ours(said: str, reason: str) -> None:
    assert read(chunk(said))[1].reason == reason


def test_a_stream_that_ends_without_saying_how_is_an_error() -> None:
    with pytest.raises(EngineFailed, match="without a finish reason"):
        read(chunk(content="half"))


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        (chunk(reasoning_content=[{"type": "text", "text": "hm"}]), "list"),
        (chunk(reasoning_content={"text": "hm"}), "dict"),
        (chunk(content=["ok"]), "list"),
        (chunk(tool_calls=[call(0, "a", "look", {"x": 1})]), "dict"),
        (chunk(tool_calls=[call(0, 7, "look", "{}")]), "int"),
        (Chunk(choices=[Chunk(text=7, finish_reason=None)], usage=None), "int"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_an_error_of_the_upstreams(odd: Any, kind: str) -> None:
    with pytest.raises(EngineFailed, match=f"the upstream gave {kind}, expected text"):
        read(odd)


def test_log_probabilities_are_for_the_client_that_asked() -> None:
    token = Chunk(token="o", bytes=[111], logprob=-0.5, top_logprobs=[Chunk(token="a", bytes=None, logprob=-1.0)])
    chunks = [chunk(content="o", logprobs=Chunk(content=[token])), chunk("stop")]
    assert read(*chunks)[0][0].tokens == []
    (delta,) = read(*chunks, wants_logprobs=True)[0]
    assert delta.tokens == [TokenLogprob("o", b"o", -0.5, [("a", b"a", -1.0)])] and delta.logprobs == b""


def test_plain_completions_have_text_and_no_delta() -> None:
    texts = [
        Chunk(choices=[Chunk(text=text, finish_reason=end)], usage=None)
        for text, end in [("on", None), (None, "length")]
    ]
    deltas, finish = read(*texts)
    assert [delta.content for delta in deltas] == ["on"] and finish.reason == "length"
