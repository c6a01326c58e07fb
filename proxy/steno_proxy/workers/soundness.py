"""Checks what a worker sends of a turn as it arrives, so that no record has data that can't be trained on (I1).

Pure. What can't be is refused, never clipped or padded. One linear pass over what has come. Engines that give text without ids
have nothing to check.
"""

from __future__ import annotations

import math
from array import array
from hashlib import blake2b
from struct import Struct

import msgspec

from steno.contracts.chat import Sampling, TokenLogprob
from steno.contracts.errors import UnsoundOutput
from steno.contracts.records import MOST_LOGPROB, bytes_to_floats, bytes_to_ids
from steno.contracts.wire.frames import Delta, Generate, ModelCard, Started

_one_id, _one_float = Struct("<i").unpack, Struct("<f").unpack
_NUMBERS = tuple(field.name for field in msgspec.structs.fields(Sampling) if field.type is float)


class ExpectedAnswer(msgspec.Struct, frozen=True):
    """What the answer on a stream is checked against.

    prefix_ids: the recorded ids that its prompt begins with, if the worker keeps them (int32 LE). most_tokens: how many tokens it
    may sample; None: no bound was asked for.
    """

    prefix_ids: bytes = b""
    most_tokens: int | None = None

    @classmethod
    def of(cls, generate: Generate) -> ExpectedAnswer:
        most = generate.job.sampling.max_tokens
        if most is not None:
            most = max(0, most - len(generate.sampled_ids) // 4)  # of an attempt that goes on: the rest
        return cls(generate.prefix_ids, most)


def check_started(started: Started, expected: ExpectedAnswer, card: ModelCard) -> None:
    """Check the prompt and the sampling law of a generation. Raises: UnsoundOutput."""
    law = started.law
    for name in _NUMBERS:
        if not math.isfinite(getattr(law, name)):
            raise UnsoundOutput(f"Started: law.{name} is {getattr(law, name)}, not a finite number")
    if not all(map(math.isfinite, law.logit_bias.values())):
        raise UnsoundOutput("Started: law.logit_bias has a value that is not a finite number")
    if card.text_only:
        return
    if (tokens := started.kept_tokens + (len(started.new_ids) >> 2)) > card.context_tokens:
        raise UnsoundOutput(f"Started: a prompt of {tokens} tokens, the model's context is {card.context_tokens}")
    if started.new_ids:
        _check_ids("Started: new_ids", started.new_ids, card.vocabulary_size)
    if started.prompt_digest:
        digest = blake2b(expected.prefix_ids if started.kept_tokens else b"", digest_size=16)
        digest.update(started.new_ids)
        if digest.digest() != started.prompt_digest:
            raise UnsoundOutput("Started: prompt_digest is not that of the prompt's ids")


def check_delta(delta: Delta, before: int, expected: ExpectedAnswer, card: ModelCard) -> None:
    """Check sampled ids and their log-probabilities; as many of these as ids, or none. before: tokens of the stream so far.

    Raises: UnsoundOutput.
    """
    if delta.ids:
        if expected.most_tokens is not None and before + (len(delta.ids) >> 2) > expected.most_tokens:
            raise UnsoundOutput(f"Delta: more tokens than max_tokens ({expected.most_tokens})")
        if len(delta.ids) == 4 and len(delta.logprobs) == 4:  # most deltas: ten times as fast
            [id_], [value] = _one_id(delta.ids), _one_float(delta.logprobs)
            if 0 <= id_ < (card.vocabulary_size or math.inf) and -math.inf < value <= MOST_LOGPROB:
                if delta.tokens:
                    _check_shown(delta.tokens)
                return
        _check_ids("Delta: ids", delta.ids, card.vocabulary_size)
        if delta.logprobs:
            _check_logprobs(bytes_to_floats(delta.logprobs))
    _check_shown(delta.tokens)


def _check_logprobs(values: array[float]) -> None:
    # A sum of float32s can't overflow a double, so it is finite where all of them are.
    if not math.isfinite(sum(values)) or max(values) > MOST_LOGPROB:
        wrong = next(value for value in values if not -math.inf < value <= MOST_LOGPROB)
        raise UnsoundOutput(f"Delta: logprobs: got {wrong}, must be finite and at most {MOST_LOGPROB}")


def _check_ids(what: str, raw: bytes, vocabulary_size: int) -> None:
    if not raw[3::4].isascii():  # a sign is the highest bit of a last byte; `min` takes thirty times as long
        raise UnsoundOutput(f"{what}: a token id of {min(bytes_to_ids(raw))}")
    if vocabulary_size and (most := max(bytes_to_ids(raw))) >= vocabulary_size:
        raise UnsoundOutput(f"{what}: a token id of {most}, with a vocabulary of {vocabulary_size}")


def _check_shown(tokens: list[TokenLogprob]) -> None:
    """What a client is shown. An alternative that could not be drawn has -inf."""
    for token in tokens:
        if not math.isfinite(token.logprob) or any(math.isnan(top) or top == math.inf for _, _, top in token.top):
            raise UnsoundOutput("Delta: tokens: a log-probability that is not a finite number")
