"""Chat and completions: any answer, streamed in any pieces and put together by OpenAI's SDK, is its projection onto the format.

What the projection loses is in docs/dialects.md: of chat, the order of text and calls; of completions, everything but the text.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from steno.contracts.chat import ToolCallPiece
from steno_proxy.dialects.base import Choice, Dialect, Header, Piece
from steno_proxy.dialects.openai.chat import ChatDialect
from steno_proxy.dialects.openai.completions import CompletionsDialect

TURN = "0123456789ab"
HEADER = Header(TURN, 1700000000, "m")
ANSWERS = st.fixed_dictionaries(
    {
        "content": st.text(max_size=30),
        "reasoning": st.text(max_size=20),
        "calls": st.lists(st.tuples(st.sampled_from(["f", "g"]), st.text(max_size=12)), max_size=3),
        "finish": st.sampled_from(["stop", "length"]),
    }
)


def ended(answer: dict[str, Any], index: int) -> Choice:
    message: dict[str, Any] = {"role": "assistant", "content": answer["content"]}
    if answer["reasoning"]:
        message["reasoning_content"] = answer["reasoning"]
    if answer["calls"]:
        message["tool_calls"] = [
            {"id": f"call_{TURN}_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(answer["calls"])
        ]
    reason = "tool_calls" if answer["calls"] and answer["finish"] == "stop" else answer["finish"]
    return Choice(index, message, reason, prompt_tokens=9, completion_tokens=4, cached_tokens=3, reasoning_tokens=2)


def cut(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def spoken(draw: st.DrawFn) -> tuple[dict[str, Any], list[Piece]]:
    """An answer and its pieces, several things in one piece or not; text may come between and after the calls."""
    answer = draw(ANSWERS)
    pieces = [Piece(reasoning=part) for part in cut(draw, answer["reasoning"])]
    pieces += [Piece(content=part) for part in cut(draw, answer["content"])]
    for i, (name, arguments) in enumerate(answer["calls"]):
        first, *rest = cut(draw, arguments)
        calls = [Piece(tool_calls=[ToolCallPiece(i, first, f"call_{TURN}_{i}", name)])]
        calls += [Piece(tool_calls=[ToolCallPiece(i, part)]) for part in rest]
        at = draw(st.sampled_from(range(len(pieces) + 1))) if i == 0 and draw(st.booleans()) else len(pieces)
        pieces[at:at] = calls
    merged: list[Piece] = []
    for piece in pieces:
        if merged and draw(st.booleans()):
            merged[-1].reasoning += piece.reasoning
            merged[-1].content += piece.content
            merged[-1].tool_calls += piece.tool_calls
        else:
            merged.append(piece)
    return answer, merged


SPOKEN = st.lists(spoken(), min_size=1, max_size=2)


def chunks(
    dialect: Dialect, body: dict[str, Any], said: list[tuple[dict[str, Any], list[Piece]]]
) -> list[dict[str, Any]]:
    """The events of a stream of several choices, one after the other; usage with the last."""
    given_body = body | {"stream": True, "n": len(said), "stream_options": {"include_usage": True}}
    writer = dialect.writer(dialect.parse(json.dumps(given_body).encode()), HEADER)
    out = b""
    for index, (answer, pieces) in enumerate(said):
        out += writer.begin(index, 9, 3) + b"".join(writer.piece(index, piece) for piece in pieces)
        assert not any(writer.closes(index, piece) for piece in pieces)
        out += writer.finish(ended(answer, index))
    out += writer.end([ended(answer, index) for index, (answer, _) in enumerate(said)])
    *events, done, rest = out.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def seen(message: Any) -> tuple[Any, ...]:
    calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.role, message.content or "", getattr(message, "reasoning_content", None) or "", calls


def projected(answer: dict[str, Any]) -> tuple[Any, ...]:
    calls = [(f"call_{TURN}_{i}", name, arguments) for i, (name, arguments) in enumerate(answer["calls"])]
    return "assistant", answer["content"], answer["reasoning"], calls


def check_usage(usage: Any, count: int) -> None:
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 4 * count, 9 + 4 * count)
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.completion_tokens_details.reasoning_tokens == 2 * count


@settings(max_examples=60)
@given(SPOKEN)
def test_a_chat_reads_back_as_its_projection(said: list[tuple[dict[str, Any], list[Piece]]]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    state = ChatCompletionStreamState()
    for chunk in chunks(ChatDialect(), body, said):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    streamed = state.current_completion_snapshot
    request = ChatDialect().parse(json.dumps(body | {"n": len(said)}).encode())
    choices = [ended(answer, index) for index, (answer, _) in enumerate(said)]
    whole = ChatCompletion.model_validate_json(ChatDialect().answer(request, HEADER, choices))
    assert streamed.id == whole.id == f"chatcmpl-{TURN}"
    for found in (streamed, whole):
        assert [choice.finish_reason for choice in found.choices] == [choice.finish_reason for choice in choices]
        assert [seen(choice.message) for choice in found.choices] == [projected(answer) for answer, _ in said]
        check_usage(found.usage, len(said))


@settings(max_examples=40)
@given(SPOKEN)
def test_a_completion_reads_back_as_its_text(said: list[tuple[dict[str, Any], list[Piece]]]) -> None:
    events = [Completion.construct(**chunk) for chunk in chunks(CompletionsDialect(), {"prompt": "hi"}, said)]
    texts = [""] * len(said)
    for event in events:
        for choice in event.choices:
            texts[choice.index] += choice.text
    request = CompletionsDialect().parse(json.dumps({"prompt": "hi", "n": len(said)}).encode())
    choices = [ended(answer, index) for index, (answer, _) in enumerate(said)]
    whole = Completion.construct(**json.loads(CompletionsDialect().answer(request, HEADER, choices)))
    assert texts == [choice.text for choice in whole.choices] == [answer["content"] for answer, _ in said]
    for usage in (events[-1].usage, whole.usage):
        check_usage(usage, len(said))
