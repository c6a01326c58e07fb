"""Sizes at which vLLM's engine would die in its step are refused by field, in the process that takes requests (I8)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import vllm.envs as envs
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker.gpu.sample import logit_bias

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import BadRequest
from steno_worker.engines.vllm.params import BadWordsRefused, sampling_params
from steno_worker.engines.vllm_server import limits

pytestmark = pytest.mark.vllm

STOPS = frozenset({900})
JOB = Job(messages=[{"role": "user", "content": "hi"}])


class Letters:
    """A tokenizer: each letter is a token, and a space in front makes another one of the first."""

    max_token_id = 2**20

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [2**16 + ord(text[1]), *map(ord, text[2:])] if text.startswith(" ") else [*map(ord, text)]


def params(**law: Any) -> SamplingParams:
    return sampling_params(Sampling(max_tokens=9, **law), JOB, None, STOPS)


def test_the_sizes_are_those_of_vllms_model_runner() -> None:
    assert limits.MAX_BIASES == logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS
    assert limits.MAX_ALLOWED_IDS == logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS
    assert limits.MAX_STOP_IDS == logit_bias.MAX_NUM_STOP_TOKEN_IDS
    assert limits.MAX_BAD_WORD_TOKENS == envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS


@pytest.mark.parametrize(
    ("law", "field"),
    [
        ({"temperature": 0.005}, "temperature"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids"),
        ({"stop_token_ids": list(range(128)), "min_tokens": 1}, "stop_token_ids"),
    ],
)
def test_what_the_engine_would_die_of_is_refused_by_field(law: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        params(**law)
    assert refused.value.field == field and "must be" in refused.value.message


def test_as_many_as_the_engine_takes_are_let_through() -> None:
    taken = params(
        logit_bias=dict.fromkeys(range(1024), 1.0),
        allowed_token_ids=list(range(1024)),
        stop_token_ids=list(range(127)),
        min_tokens=1,
    )
    assert len(taken.all_stop_token_ids) == 128
    params(stop_token_ids=list(range(128)))  # nothing holds them back


def test_bad_words_are_counted_as_vllm_counts_them_before_they_go_to_the_engine() -> None:
    words = [f"word{number:04}" for number in range(64)]
    given = params(bad_words=words).clone()  # vLLM counts on a copy
    given.update_from_tokenizer(Letters())  # type: ignore[arg-type]
    assert sum(map(len, given.bad_words_token_ids or ())) == 1024
    given = params(bad_words=[*words[:63], "x" * 9, words[0]]).clone()
    with pytest.raises(BadWordsRefused, match="bad_words: got 1026 tokens in all, must be at most 1024") as refused:
        given.update_from_tokenizer(Letters())  # type: ignore[arg-type]
    assert refused.value.parameter == "bad_words"


def test_the_engines_process_gets_the_same_parameters() -> None:
    given = params(bad_words=["no"], logit_bias={5: 1.0}, min_tokens=2, stop_token_ids=[7], seed=3)
    sent = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(given))
    plain = SamplingParams(**{name: copy.copy(getattr(given, name)) for name in SAID})
    assert type(sent) is SamplingParams and {n: getattr(sent, n) for n in SAID} == {n: getattr(plain, n) for n in SAID}


SAID = ("temperature", "bad_words", "logit_bias", "min_tokens", "max_tokens", "stop_token_ids", "seed", "logprobs")
