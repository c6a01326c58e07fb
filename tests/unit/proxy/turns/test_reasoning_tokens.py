"""How many of a completion's tokens were reasoning: what `usage` says in every dialect that has a field for it."""

from __future__ import annotations

import pytest

from steno.contracts.chat import Sampling, ToolCallPiece
from steno.contracts.records import floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import Delta, Finish, ModelCard, Started
from steno_proxy.turns.transcript import ChoiceTranscript

Said = tuple[int, str, str, bool]  # tokens, reasoning, content, a tool call


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([(2, "", "plain", False)], 0),
        ([(1, "", "", False), (3, "why", "", False), (1, "", "", False), (2, "", "so", False)], 4),
        ([(3, "why", "", False), (2, "", "", True), (4, "then", "", False), (1, "", "", False)], 7),
        ([(2, "", "so", False), (3, "why", "", False)], 3),
        ([(4, "all of it", "", False)], 4),
    ],
)
def test_tokens_that_became_reasoning_are_counted(said: list[Said], expected: int) -> None:
    transcript = ChoiceTranscript("0" * 12, "call", ModelCard("m", 100))
    transcript.take(Started(1, 0, b"", 0, b"", Sampling()))
    for tokens, reasoning, content, called in said:
        calls = [ToolCallPiece(0, "{}", "", "f")] if called else []
        ids, logprobs = ids_to_bytes([1] * tokens), floats_to_bytes([-0.5] * tokens)
        transcript.take(Delta(1, ids, logprobs, "base/0", content, reasoning, calls))
    transcript.take(Finish(1, "stop", sum(tokens for tokens, *_ in said)))
    assert transcript.choice(0).reasoning_tokens == transcript.reasoning_tokens == expected
