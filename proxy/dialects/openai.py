"""What OpenAI's two formats (`chat.py`, `completions.py`) share: sampling fields, server-sent events, usage, error bodies.

Fields, ranges and shapes after the OpenAI API reference; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`ignore_eos` and `stop_token_ids` as vLLM's clients send them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.contracts.canonical import Sampling, TokenLogprob
from proxy.contracts.errors import BadRequest, ContextOverflow, StenoError
from proxy.dialects.base import Choice, Header, check_range

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n"
"""A comment line without an empty line after it: several SSE parsers take `comment + blank` for an (empty) event."""
LEAST_LOGPROB = -9999.0
MAX_CHOICES = 64
MAX_TOKENS = 2**31 - 1
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "min_tokens", "max_tokens", "max_completion_tokens", "seed", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip

to_json = msgspec.json.encode


class SamplingBody(msgspec.Struct):
    """The sampling fields of a request body. None: not given (null and absent are the same)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    model: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


def asked_for(body: SamplingBody) -> dict[str, Any]:
    """The sampling fields that the client sent, as it sent them."""
    return {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}


def sampling_of(body: SamplingBody, *, default_max_tokens: int | None = None) -> Sampling:
    """The sampling law that the client asks for.

    Raises: BadRequest naming the field that is out of range.
    """
    check_range("temperature", body.temperature, 0.0, 100.0)
    check_range("top_p", body.top_p, 0.0, 1.0)
    check_range("top_k", body.top_k, -1, 2**31 - 1)
    check_range("min_p", body.min_p, 0.0, 1.0)
    check_range("presence_penalty", body.presence_penalty, -2.0, 2.0)
    check_range("frequency_penalty", body.frequency_penalty, -2.0, 2.0)
    check_range("repetition_penalty", body.repetition_penalty, 1e-3, 100.0)
    check_range("min_tokens", body.min_tokens, 0, MAX_TOKENS)
    check_range("max_tokens", body.max_tokens, 1, 2**63)
    check_range("max_completion_tokens", body.max_completion_tokens, 1, 2**63)
    check_range("seed", body.seed, -(2**63), 2**63 - 1)
    check_range("n", body.n, 1, MAX_CHOICES)
    if body.top_p == 0.0:
        raise BadRequest("top_p must be above 0", field="top_p")
    limit = body.max_completion_tokens or body.max_tokens or default_max_tokens
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=_logit_bias(body.logit_bias),
        min_tokens=body.min_tokens or 0,
        max_tokens=min(limit, MAX_TOKENS) if limit is not None else None,
        seed=body.seed,
        stop=_stop(body.stop),
        stop_token_ids=_token_ids("stop_token_ids", body.stop_token_ids or []),
        ignore_eos=bool(body.ignore_eos),
    )


def _logit_bias(given: dict[str, float] | None) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (given or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) > MAX_TOKENS:
            raise BadRequest(f"logit_bias: {key[:40]!r} is not a token id", field=f"logit_bias.{key[:40]}")
        check_range(f"logit_bias.{key}", value, -100.0, 100.0)
        bias[int(key)] = value
    return bias


def _stop(given: str | list[str] | None) -> list[str]:
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > 16:
        raise BadRequest("stop takes at most 16 strings", field="stop")
    return [stop for stop in stops if stop]


def _token_ids(name: str, given: list[int]) -> list[int]:
    for i, value in enumerate(given):
        if not 0 <= value <= MAX_TOKENS:
            raise BadRequest(f"{name}.{i} is not a token id", field=f"{name}.{i}")
    return given


def envelope(header: Header, prefix: str, kind: str) -> dict[str, Any]:
    """What every answer and every chunk says. prefix: of its id. kind: its `object`."""
    return {
        "id": f"{prefix}-{header.answer_id}",
        "object": kind,
        "created": header.created,
        "model": header.model,
        "system_fingerprint": None,
    }


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Prompt tokens count once, however many choices were drawn from the prompt."""
    prompt = choices[0].prompt_tokens
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": choices[0].cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }


def error_body(error: StenoError) -> bytes:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return to_json({"error": {"message": error_words(error), "type": kind, "param": error.field, "code": error.code}})


def error_words(error: StenoError) -> str:
    """OpenAI's own for a prompt that is too long: LiteLLM and what is built on it look for these and not for the code."""
    if isinstance(error, ContextOverflow) and error.prompt_tokens:
        # Room for one token of the answer is asked for too, so a prompt may be as long as the context and still too long.
        maximum = min(error.context_tokens, error.prompt_tokens - 1)
        return (
            f"This model's maximum context length is {maximum} tokens. However, your messages resulted in"
            f" {error.prompt_tokens} tokens. Please reduce the length of the messages."
        )
    return error.message


def shown(logprob: float) -> float:
    """An alternative that could not be drawn, as OpenAI writes it: JSON has no infinity."""
    return max(logprob, LEAST_LOGPROB)


def logprobs_of(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """As chat completions and responses show them."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.raw),
            "top_logprobs": [
                {"token": text, "logprob": shown(logprob), "bytes": list(raw)} for text, raw, logprob in token.top
            ],
        }
        for token in tokens
    ]
