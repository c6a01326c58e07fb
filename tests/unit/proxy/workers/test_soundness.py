"""What a stream's answer is held against."""

from __future__ import annotations

import math
from hashlib import blake2b

import pytest

from steno.contracts.chat import Job, Sampling, TokenLogprob
from steno.contracts.errors import UnsoundOutput
from steno.contracts.records import MOST_LOGPROB, floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import Delta, Generate, ModelCard, Started
from steno_proxy.workers.soundness import ExpectedAnswer, check_delta, check_started

CARD = ModelCard("m", 100, vocabulary_size=10)
PREFIX, NEW = ids_to_bytes([1, 2]), ids_to_bytes([3])


def generate(max_tokens: int | None, sampled: int = 0) -> Generate:
    job = Job(sampling=Sampling(max_tokens=max_tokens))
    return Generate(1, "t", 0, "trial", job, PREFIX, sampled_ids=bytes(4 * sampled))


def delta(ids: list[int], logprobs: list[float] | None = None) -> Delta:
    values = [-1.0] * len(ids) if logprobs is None else logprobs
    return Delta(1, ids_to_bytes(ids), floats_to_bytes(values), "base/0")


def test_an_attempt_that_goes_on_may_sample_the_rest() -> None:
    assert [ExpectedAnswer.of(generate(*given)).most_tokens for given in ((None, 3), (5, 0), (5, 3), (5, 7))] == [
        None,
        5,
        2,
        0,
    ]
    check_delta(delta([1, 2]), 0, ExpectedAnswer.of(generate(5, 3)), CARD)
    with pytest.raises(UnsoundOutput, match=r"more tokens than max_tokens \(2\)"):
        check_delta(delta([1, 2]), 1, ExpectedAnswer.of(generate(5, 3)), CARD)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2 * MOST_LOGPROB, 3e38])
def test_one_number_that_can_not_be_is_found_wherever_it_stands(place: int, value: float) -> None:
    values = [-0.5, 0.0, -3e38]
    check_delta(delta([1, 2, 9], values), 0, ExpectedAnswer(), CARD)
    values[place] = value
    with pytest.raises(UnsoundOutput, match="must be finite and at most"):
        check_delta(delta([1, 2, 9], values), 0, ExpectedAnswer(), CARD)


def test_numbers_that_cancel_out_are_not_finite_either() -> None:
    with pytest.raises(UnsoundOutput):
        check_delta(delta([1, 2], [math.inf, -math.inf]), 0, ExpectedAnswer(), CARD)


def test_ids_are_held_against_a_vocabulary_that_is_known() -> None:
    unknown = ModelCard("older", 100)
    check_delta(delta([10**6]), 0, ExpectedAnswer(), unknown)
    check_delta(delta([0, 2**31 - 1, 255, 128]), 0, ExpectedAnswer(), unknown)
    check_delta(delta([9, 0]), 0, ExpectedAnswer(), CARD)
    for wrong, named in (([10], 10), ([0, -1], -1), ([3, 10, 4], 10), ([3, -(2**31), -5], -(2**31))):
        with pytest.raises(UnsoundOutput, match=f"a token id of {named}"):
            check_delta(delta(wrong), 0, ExpectedAnswer(), CARD)
        if named < 0:
            with pytest.raises(UnsoundOutput, match=f"a token id of {named}"):
                check_delta(delta(wrong), 0, ExpectedAnswer(), unknown)


def test_a_prompt_is_no_longer_than_the_models_context() -> None:
    kept, most = ids_to_bytes([1] * 60), ids_to_bytes([2] * 40)
    check_started(Started(1, 60, most, 100, b"", Sampling()), ExpectedAnswer(kept), CARD)
    with pytest.raises(UnsoundOutput, match="a prompt of 101 tokens, the model's context is 100"):
        check_started(Started(1, 60, most + NEW, 101, b"", Sampling()), ExpectedAnswer(kept), CARD)


def test_a_prompts_digest_is_of_the_prefix_that_it_keeps_and_what_is_new() -> None:
    whole, alone = (blake2b(raw, digest_size=16).digest() for raw in (PREFIX + NEW, NEW))
    asked = ExpectedAnswer(PREFIX)
    check_started(Started(1, 2, NEW, 3, whole, Sampling()), asked, CARD)
    check_started(Started(1, 0, NEW, 1, alone, Sampling()), asked, CARD)
    for kept, digest in ((2, alone), (0, whole)):
        with pytest.raises(UnsoundOutput, match="prompt_digest"):
            check_started(Started(1, kept, NEW, kept + 1, digest, Sampling()), asked, CARD)


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_every_number_of_the_law_is_finite(name: str) -> None:
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(UnsoundOutput, match=f"law.{name}"):
            check_started(Started(1, 0, b"", 0, b"", Sampling(**{name: value})), ExpectedAnswer(), CARD)


def test_what_a_client_is_shown_may_have_alternatives_that_could_not_be_drawn() -> None:
    said = delta([])
    said.tokens = [TokenLogprob("a", b"a", -0.5, [("b", b"b", -math.inf)])]
    check_delta(said, 0, ExpectedAnswer(), CARD)
    for token in (TokenLogprob("a", b"a", math.nan), TokenLogprob("a", b"a", -0.5, [("b", b"b", math.nan)])):
        said.tokens = [token]
        with pytest.raises(UnsoundOutput):
            check_delta(said, 0, ExpectedAnswer(), CARD)
