"""The transcript of a completion: what adds up is kept to the token, what does not is an error (I1)."""

from __future__ import annotations

import pytest

from steno.contracts.chat import Sampling, ToolCallPiece
from steno.contracts.errors import EngineFailed
from steno.contracts.records import TokenSpan, bytes_to_floats, bytes_to_ids, floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import Delta, Finish, ModelCard, Shown, Started
from steno_proxy.turns.transcript import ChoiceTranscript

TURN = "0123456789ab"


def pad(law: Sampling | None = None, *, constrained: bool = False, **card: bool) -> ChoiceTranscript:
    transcript = ChoiceTranscript(TURN, "call", ModelCard("m", 100, **card))
    transcript.take(Started(0, 0, ids_to_bytes([1]), 1, b"", law or Sampling(), constrained=constrained))
    return transcript


def delta(ids: list[int], version: str = "base/0", **fields: object) -> Delta:
    """Each id is drawn at a log-probability of its own."""
    return Delta(0, ids_to_bytes(ids), floats_to_bytes(drawn(ids)), version, **fields)  # type: ignore[arg-type]


def drawn(ids: list[int]) -> list[float]:
    return [-0.5 * id_ for id_ in ids]


def test_ids_versions_and_text_accumulate() -> None:
    transcript = pad()
    for event in (delta([1, 2], content="a"), delta([3], content="b"), delta([4], "base/1", reasoning="r")):
        transcript.take(event)
    transcript.take(Finish(0, "stop", 4))
    assert bytes_to_ids(bytes(transcript.ids)).tolist() == [1, 2, 3, 4]
    assert bytes_to_floats(bytes(transcript.logprobs)).tolist() == drawn([1, 2, 3, 4])
    spans = [TokenSpan(version="base/0", start=0, end=3), TokenSpan(version="base/1", start=3, end=4)]
    assert transcript.versions() == spans
    assert transcript.message() == {"role": "assistant", "content": "ab", "reasoning_content": "r"}
    assert transcript.choice(0).completion_tokens == 4


def test_calls_get_our_ids_once_and_keep_the_models_own() -> None:
    transcript = pad()
    first = transcript.take(delta([1], tool_calls=[ToolCallPiece(0, "", "own", "f")]))
    later = transcript.take(delta([2], tool_calls=[ToolCallPiece(0, '{"a"'), ToolCallPiece(1, "{}", "", "g")]))
    transcript.take(delta([3], tool_calls=[ToolCallPiece(0, ": 1}")]))
    assert first is not None and later is not None
    assert first.tool_calls == [ToolCallPiece(0, "", f"call_{TURN}_0", "f")]
    assert later.tool_calls == [ToolCallPiece(0, '{"a"'), ToolCallPiece(1, "{}", f"call_{TURN}_1", "g")]
    assert [call["function"] for call in transcript.message()["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"},
    ]  # fmt: skip
    assert transcript.own_call_ids() == ["own", ""]
    assert transcript.call_ids() == {f"call_{TURN}_0": "own"}


def test_constrained_ranges_merge_where_they_touch() -> None:
    transcript = pad()
    for constrained in (False, True, True, False, True):
        transcript.take(delta([1], constrained=constrained))
    assert transcript.constrained() == [(1, 3), (4, 5)]


@pytest.mark.parametrize("law", [Sampling(top_p=0.9), Sampling(temperature=0.0)])
def test_a_bent_law_constrains_every_token(law: Sampling) -> None:
    transcript = pad(law)
    transcript.take(delta([1, 2]))
    assert transcript.constrained() == [(0, 2)]


def test_tokens_that_came_are_tokens_that_were_sampled() -> None:
    transcript = pad()
    transcript.take(delta([1]))
    with pytest.raises(EngineFailed):
        transcript.take(Finish(0, "stop", 2))


def test_a_missing_log_probability_is_an_error_but_of_synthetic_engines() -> None:
    silent = Delta(0, ids_to_bytes([1]), b"", "base/0")
    with pytest.raises(EngineFailed):
        pad().take(silent)
    transcript = pad(synthetic=True)
    transcript.take(silent)
    assert (transcript.tokens, bytes(transcript.logprobs)) == (1, b"")


def test_what_is_closed_leaves_out_the_block_that_is_open() -> None:
    transcript = pad()
    said = []
    for event in (
        delta([1], reasoning="r"),
        delta([2], content="a"),
        delta([3], content="b"),
        delta([4], tool_calls=[ToolCallPiece(0, "{", "", "f")]),
        delta([5], tool_calls=[ToolCallPiece(0, "}"), ToolCallPiece(1, "", "", "g")]),
        delta([6], content="c"),
    ):
        transcript.take(event)
        message = transcript.message(closed=True)
        calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
        said.append((message.get("reasoning_content"), message["content"], calls))
    assert said == [
        (None, "", []), ("r", "", []), ("r", "", []), ("r", "ab", []), ("r", "ab", ["f"]), ("r", "ab", ["f", "g"])
    ]  # fmt: skip
    assert transcript.message()["content"] == "abc"


def test_what_is_closed_holds_a_call_whose_end_came_with_what_follows_it() -> None:
    """Its text was taken for what had been there before: the call was left out, and the client went on with it."""
    transcript = pad()
    transcript.take(delta([1], tool_calls=[ToolCallPiece(0, "{", "", "f")]))
    closed = []
    for more in ([], [ToolCallPiece(1, "{}", "", "g")]):
        going_on = ToolCallPiece(0, "}")
        transcript.take(delta([2], content=")", tool_calls=[going_on, *more] if not closed else more))
        message = transcript.message(closed=True)
        closed.append((message["content"], [call["function"] for call in message.get("tool_calls", [])]))
    assert closed == [("", [{"name": "f", "arguments": "{}"}]), ("))", [{"name": "f", "arguments": "{}"}])]


def test_another_worker_goes_on_after_the_same_prompt_and_nothing_of_the_first_is_lost() -> None:
    transcript = pad()
    transcript.take(delta([1, 2], content="a", tool_calls=[ToolCallPiece(0, '{"x', "own", "look")]))
    transcript.take(delta([3], reasoning="why"))
    assert not transcript.is_empty() and transcript.last_version == "base/0"
    assert transcript.shown() == Shown(3, 1, [3])
    transcript.taken_over("first", ModelCard("m", 100))
    transcript.take(Started(0, 1, b"", 1, b"", Sampling()))
    transcript.take(delta([4, 5], "base/1", tool_calls=[ToolCallPiece(0, '": 1}')]))
    transcript.take(Finish(0, "tool_calls", 2))
    assert bytes_to_ids(bytes(transcript.ids)).tolist() == [1, 2, 3, 4, 5]
    assert bytes_to_floats(bytes(transcript.logprobs)).tolist() == drawn([1, 2, 3, 4, 5])
    assert transcript.versions() == [
        TokenSpan(version="base/0", start=0, end=3),
        TokenSpan(version="base/1", start=3, end=5),
    ]
    [call] = transcript.message()["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"x": 1}'} and transcript.own_call_ids() == ["own"]
    assert transcript.workers == [("first", 0, 3)]
    transcript.taken_over("second", ModelCard("m", 100))
    assert transcript.workers == [("first", 0, 3), ("second", 3, 5)]


def test_what_a_client_has_is_counted_in_characters() -> None:
    transcript = pad()
    for event in (delta([1], reasoning="why"), delta([2], content="four"), delta([3], content="teen")):
        transcript.take(event)
    transcript.take(delta([4], tool_calls=[ToolCallPiece(0, '{"at"', "", "f"), ToolCallPiece(0, ": 1}")]))
    assert transcript.shown() == Shown(3, 8, [9])


def test_another_prompt_or_a_wrong_count_of_the_second_part_is_an_error() -> None:
    transcript = pad()
    transcript.take(delta([1, 2]))
    transcript.taken_over("first", ModelCard("m", 100))
    with pytest.raises(EngineFailed, match="different prompt"):
        transcript.take(Started(0, 1, b"", 1, b"other", Sampling()))
    transcript.take(delta([3]))
    with pytest.raises(EngineFailed, match="completion_tokens: got 3, but the worker sent 1 tokens"):
        transcript.take(Finish(0, "stop", 3))
