"""What OpenAI's two formats (`chat.py`, `completions.py`) share: sampling fields, server-sent events, usage, error bodies.

Fields, ranges and shapes after the OpenAI API reference; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`ignore_eos`, `stop_token_ids` and what `vllm_fields.py` lists as vLLM's clients send them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from steno.contracts.chat import CONTINUES, OPEN_END, CanonicalRequest, Job, Sampling, TokenLogprob
from steno.contracts.errors import BadRequest, ContextOverflow, StenoError
from steno.contracts.records import bytes_to_ids
from steno_proxy.dialects import bounds
from steno_proxy.dialects.base import Choice, Header, check_wire
from steno_proxy.dialects.bounds import MAX_TOKENS
from steno_proxy.dialects.openai.structured import StructuredBody
from steno_proxy.dialects.openai.vllm_fields import refuse

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n"
"""A comment line without an empty line after it: several SSE parsers take `comment + blank` for an (empty) event."""
LEAST_LOGPROB = -9999.0
MAX_ALLOWED_IDS = 1024
"""The most `allowed_token_ids`: each turn's record has them twice."""
MAX_BIASES, MAX_STOP_IDS = 1024, 128
"""vLLM's engine has room for so many."""
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 64, 256
"""The engine compares all of them with the end of what it has sampled, for each token."""
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "min_tokens", "max_tokens", "max_completion_tokens", "seed", "stop", "stop_token_ids", "ignore_eos",
    "allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip

to_json = msgspec.json.encode


class SamplingBody(StructuredBody):
    """The sampling fields of a request body. None: not given (null and absent are the same)."""

    temperature: bounds.Temperature | None = None
    top_p: bounds.TopP | None = None
    top_k: bounds.TopK | None = None
    min_p: bounds.MinP | None = None
    presence_penalty: bounds.Penalty | None = None
    frequency_penalty: bounds.Penalty | None = None
    repetition_penalty: bounds.RepetitionPenalty | None = None
    logit_bias: dict[str, bounds.Bias] | None = None
    min_tokens: bounds.MinTokens | None = None
    max_tokens: bounds.Limit | None = None
    max_completion_tokens: bounds.Limit | None = None
    seed: bounds.Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[bounds.TokenId] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[bounds.TokenId] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    n: bounds.Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    model: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def check_fields(body: SamplingBody, dialect: str) -> None:
    """Raises: BadRequest: a field that can't be honoured, alone or beside another."""
    refuse(body, dialect)
    options = body.stream_options
    if options is not None and not body.stream and options != StreamOptions():
        raise BadRequest("stream_options needs a stream: send stream: true as well", field="stream_options")
    shows_special = body.skip_special_tokens is False
    if body.include_stop_str_in_output and body.stop_token_ids:
        raise BadRequest(
            "include_stop_str_in_output can't be combined with stop_token_ids: it applies to strings in stop",
            field="include_stop_str_in_output",
        )
    if shows_special and (body.ignore_eos or body.include_stop_str_in_output):
        beside = "ignore_eos" if body.ignore_eos else "include_stop_str_in_output"
        raise BadRequest(
            f"skip_special_tokens: false can't be combined with {beside}: the answer has no text for end tokens",
            field="skip_special_tokens",
        )


def usage_wanted(body: SamplingBody) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether each of its events says the usage so far, which vLLM does only then."""
    options = body.stream_options
    whole = bool(options and options.include_usage)
    return whole, whole and bool(options and options.continuous_usage_stats)


def request_of(body: SamplingBody, dialect: str, job: Job) -> CanonicalRequest:
    """The canonical request of a body, with this job."""
    include_usage, usage_in_chunks = usage_wanted(body)
    return CanonicalRequest(
        dialect=dialect,
        model=body.model or "",
        job=job,
        asked=requested_sampling(body),
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=include_usage,
        usage_in_chunks=usage_in_chunks,
        returns_ids=bool(body.return_token_ids),
    )


def template_kwargs_of(given: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`, checked. Raises: BadRequest: one has a request field of its own, or fails `check_wire`."""
    kwargs = dict(given or {})
    check_wire("chat_template_kwargs", kwargs)
    for name in (OPEN_END, CONTINUES):
        if name in kwargs:
            raise BadRequest(
                f"chat_template_kwargs.{name}: send {name} as a field of the request instead",
                field=f"chat_template_kwargs.{name}",
            )
    return kwargs


def requested_sampling(body: SamplingBody) -> dict[str, Any]:
    """The sampling fields that the client sent, as it sent them."""
    return {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}


def sampling_of(body: SamplingBody, *, default_max_tokens: int | None = None) -> Sampling:
    """The sampling law that the client asks for. Raises: BadRequest naming the field that can't be honoured."""
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
        stop_token_ids=_stop_ids(body.stop_token_ids or []),
        ignore_eos=bool(body.ignore_eos),
        allowed_token_ids=_allowed(body.allowed_token_ids),
        bad_words=_bad_words(body.bad_words or []),
    )


def _logit_bias(given: dict[str, float] | None) -> dict[int, float]:
    bias: dict[int, float] = {}
    if given and len(given) > MAX_BIASES:
        raise BadRequest(f"logit_bias: got {len(given)} ids, must be at most {MAX_BIASES}", field="logit_bias")
    for key, value in (given or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) > MAX_TOKENS:
            raise BadRequest(f"logit_bias: {key[:40]!r} is not a token id", field=f"logit_bias.{key[:40]}")
        bias[int(key)] = value
    return bias


def _stop(given: str | list[str] | None) -> list[str]:
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > 16:
        raise BadRequest("stop takes at most 16 strings", field="stop")
    return [stop for stop in stops if stop]


def _stop_ids(given: list[int]) -> list[int]:
    if len(given) > MAX_STOP_IDS:
        raise BadRequest(
            f"stop_token_ids: got {len(given)} ids, must be at most {MAX_STOP_IDS}", field="stop_token_ids"
        )
    return given


def _allowed(given: list[int] | None) -> list[int]:
    if given is None:
        return []
    if not 0 < len(given) <= MAX_ALLOWED_IDS:
        raise BadRequest(
            f"allowed_token_ids: got {len(given)} ids, must be 1 to {MAX_ALLOWED_IDS}", field="allowed_token_ids"
        )
    return given


def _bad_words(given: list[str]) -> list[str]:
    if len(given) > MAX_BAD_WORDS or not all(0 < len(word) <= MAX_BAD_WORD_CHARS for word in given):
        raise BadRequest(
            f"bad_words takes at most {MAX_BAD_WORDS} texts, of 1 to {MAX_BAD_WORD_CHARS} characters", field="bad_words"
        )
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


def usage_so_far(prompt: int, completion: int) -> bytes:
    """Of one choice in the middle of a stream, as a member of its event: vLLM's `continuous_usage_stats`."""
    return b',"usage":' + to_json(
        {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    )


def ids_json(ids: bytes) -> bytes:
    """int32 LE -> a JSON array."""
    return to_json(bytes_to_ids(ids).tolist())


def prompt_ids(request: CanonicalRequest, choices: Sequence[Choice]) -> dict[str, Any]:
    """`prompt_token_ids` of an answer in one piece, where they were asked for; all choices have the same."""
    return {"prompt_token_ids": bytes_to_ids(choices[0].prompt_ids).tolist()} if request.returns_ids else {}


def token_ids(request: CanonicalRequest, choice: Choice) -> dict[str, Any]:
    """`token_ids` of one choice, where they were asked for and the reasoning among them is not hidden."""
    if not request.returns_ids or request.hides_reasoning:
        return {}
    return {"token_ids": bytes_to_ids(choice.ids).tolist()}


class StreamExtras:
    """What the events of one stream say beside the text, to those who ask: ids, and the usage so far. Of both formats."""

    def __init__(self, request: CanonicalRequest, choices: int) -> None:
        self.ids = request.returns_ids and not request.hides_reasoning
        self._returns_ids = request.returns_ids
        self._prompt_ids = b""
        self._prompt_tokens = 0
        self._each = request.usage_in_chunks
        self._tokens = [0] * choices
        self._plain = b',"usage":null' if request.include_usage else b""
        self.tail = b',"finish_reason":null}]' + self._plain + b"}\n\n"
        self.is_plain = not (self.ids or self._each)

    def prompt(self, ids: bytes) -> None:
        self._prompt_ids = ids

    def begins(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens

    def prompt_member(self) -> bytes:
        """`prompt_token_ids`, the first time; then nothing."""
        if not self._returns_ids or not self._prompt_ids:
            return b""
        ids, self._prompt_ids = self._prompt_ids, b""
        return b',"prompt_token_ids":' + ids_json(ids)

    def tail_of(self, index: int, ids: bytes) -> bytes:
        """`tail`, where ids or usage are asked for."""
        return b',"finish_reason":null' + self.ids_member(ids) + b"}]" + self.usage(index) + b"}\n\n"

    def ids_member(self, ids: bytes) -> bytes:
        return b',"token_ids":' + ids_json(ids) if self.ids else b""

    def count(self, index: int, ids: bytes) -> None:
        self._tokens[index] += len(ids) >> 2

    def usage(self, index: int, total: int | None = None) -> bytes:
        """`usage` of an event. total: tokens of the whole choice, at its end."""
        if not self._each:
            return self._plain
        return usage_so_far(self._prompt_tokens, self._tokens[index] if total is None else total)


def error_body(error: StenoError) -> bytes:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return to_json({"error": {"message": error_words(error), "type": kind, "param": error.field, "code": error.code}})


def error_words(error: StenoError) -> str:
    """OpenAI's own for a prompt that is too long: LiteLLM and what is built on it look for these and not for the code."""
    if isinstance(error, ContextOverflow) and error.prompt_alone:
        # Room for one token of the answer is asked for too, so a prompt may be as long as the context and still too long.
        maximum = min(error.context_tokens, error.prompt_tokens - 1)
        return (
            f"This model's maximum context length is {maximum} tokens. However, your messages resulted in"
            f" {error.prompt_tokens} tokens. Please reduce the length of the messages."
        )
    return error.message


def shown(logprob: float) -> float:
    """A log-probability for JSON, which has no infinity: OpenAI's own lowest value for an alternative that can't be drawn."""
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
