"""OpenAI's (legacy) Completions: `POST /{trial_id}/v1/completions`, with a text or a list of token ids as the prompt.

One prompt per request. `echo`, `suffix` and `best_of` above 1 are refused: the record holds what was sampled from the prompt as
it stands. `logprobs: N` gives the legacy shape with N alternatives a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from steno.contracts.chat import CanonicalRequest, Job, TokenLogprob
from steno.contracts.errors import BadRequest, StenoError
from steno.contracts.records import ids_to_bytes
from steno_proxy.dialects import bounds
from steno_proxy.dialects.base import Choice, Header, Piece, Writer, decode
from steno_proxy.dialects.openai import common
from steno_proxy.dialects.openai.common import to_json
from steno_proxy.dialects.openai.schema import COMPLETIONS
from steno_proxy.dialects.openai.structured import ResponseFormatBody, format_of, response_format_of
from steno_proxy.dialects.refusals import must_be

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's own default for this route, where chat has none."""


class _CompletionsBody(common.SamplingBody, kw_only=True):
    prompt: Any
    logprobs: bounds.TopLogprobs | None = None
    response_format: ResponseFormatBody | None = None
    best_of: int | None = None


_decoder = msgspec.json.Decoder(_CompletionsBody)


class CompletionsDialect:
    """The dialect. Stateless."""

    name: ClassVar[str] = "completions"
    paths: ClassVar[tuple[str, ...]] = ("/v1/completions",)
    call_prefix: ClassVar[str] = "call"
    keepalive: ClassVar[bytes] = common.KEEPALIVE

    def parse(self, body: bytes) -> CanonicalRequest:
        given = decode(_decoder, body)
        common.check_fields(given, "completions")
        if given.best_of is not None and given.best_of != (given.n or 1):
            raise BadRequest(
                "best_of is not supported (unless equal to n): the answer has every sampled completion", field="best_of"
            )
        prompt = _single(given.prompt)
        job = Job(
            prompt_text=prompt if isinstance(prompt, str) else None,
            prompt_ids=None if isinstance(prompt, str) else prompt,
            response_format=format_of(given, response_format_of(given.response_format), "response_format"),
            top_logprobs=given.logprobs,
            sampling=common.sampling_of(given, default_max_tokens=_DEFAULT_MAX_TOKENS),
            shows_stop=bool(given.include_stop_str_in_output),
            shows_special=given.skip_special_tokens is False,
        )
        return common.request_of(given, "completions", job)

    def writer(self, request: CanonicalRequest, header: Header) -> Writer:
        return CompletionsWriter(request, header)

    def answer(self, request: CanonicalRequest, header: Header, choices: Sequence[Choice]) -> bytes:
        wants = request.job.top_logprobs
        return to_json(
            {
                **common.envelope(header, "cmpl", "text_completion"),
                "choices": [
                    {
                        "index": choice.index,
                        "text": choice.message["content"],
                        "logprobs": None if wants is None else _legacy_logprobs(choice.tokens, 0)[0],
                        "finish_reason": choice.finish_reason,
                        **common.prompt_ids(request, choices),
                        **common.token_ids(request, choice),
                    }
                    for choice in choices
                ],
                "usage": common.usage(choices),
            }
        )

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return common.error_body(error)

    def broken(self, error: StenoError) -> bytes:
        return b""

    def openapi(self) -> dict[str, Any]:
        return COMPLETIONS


def _single(prompt: Any) -> str | bytes:
    """The one prompt: its text, or its ids as int32 LE. A list of exactly one prompt is that prompt."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise BadRequest("prompt: one prompt per request; send the others separately", field="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise must_be("a string or a list of token ids", "prompt", prompt)
    if not prompt:
        raise must_be("a string or a list of token ids", "prompt", prompt)
    for i, value in enumerate(prompt):
        if type(value) is not int or not 0 <= value <= bounds.MAX_TOKENS:
            shown = bounds.number(value) if type(value) is int else type(value).__name__
            raise BadRequest(
                f"prompt.{i}: got {shown}, must be a token id, 0 to {bounds.MAX_TOKENS}", field=f"prompt.{i}"
            )
    return ids_to_bytes(prompt)


def _legacy_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
    """The legacy shape, and the text offset after these tokens (in characters, from the start of the completion)."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
        "text_offset": offsets,
    }, offset


def _top(token: TokenLogprob) -> dict[str, float]:
    """The sampled token, whichever place it has, and the likeliest ones. Of tokens of the same text the sampled one counts."""
    others = {text: common.shown(logprob) for text, _, logprob in token.top}
    return {token.text: token.logprob} | others | {token.text: token.logprob}


class CompletionsWriter:
    """`text_completion` events, spliced like chat's."""

    def __init__(self, request: CanonicalRequest, header: Header) -> None:
        self._wants_logprobs = request.job.top_logprobs is not None
        self._include_usage = request.include_usage
        self._constant = b"data: " + to_json(common.envelope(header, "cmpl", "text_completion"))[:-1]
        self._heads = [
            self._constant + b',"choices":[{"index":%d,"text":' % index for index in range(max(request.n, 1))
        ]
        self._shown = common.StreamExtras(request, len(self._heads))
        self._offsets = [0] * len(self._heads)

    def prompt(self, ids: bytes) -> None:
        self._shown.prompt(ids)

    def closes(self, index: int, piece: Piece) -> bool:
        return False

    def begin(self, index: int, prompt_tokens: int, cached_tokens: int) -> bytes:
        self._shown.begins(prompt_tokens)
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        text = piece.content
        self._shown.count(index, piece.ids)
        logprobs = b',"logprobs":null'
        if self._wants_logprobs and piece.tokens:
            legacy, self._offsets[index] = _legacy_logprobs(piece.tokens, self._offsets[index])
            logprobs = b',"logprobs":' + to_json(legacy)
        elif not text and not (self._shown.ids and piece.ids):
            return b""
        return self._heads[index] + to_json(text) + logprobs + self._tail(index, b"null", piece.ids)

    def _tail(self, index: int, reason: bytes, ids: bytes, total: int | None = None) -> bytes:
        """The end of an event; the first of all says the prompt's ids, to those who asked."""
        shown = self._shown
        members = shown.prompt_member() + shown.ids_member(ids)
        return b',"finish_reason":' + reason + members + b"}]" + shown.usage(index, total) + b"}\n\n"

    def finish(self, choice: Choice) -> bytes:
        tail = self._tail(choice.index, to_json(choice.finish_reason), b"", choice.completion_tokens)
        return self._heads[choice.index] + b'"","logprobs":null' + tail

    def end(self, choices: Sequence[Choice]) -> bytes:
        if not self._include_usage:
            return common.DONE
        return self._constant + b',"choices":[],"usage":' + to_json(common.usage(choices)) + b"}\n\n" + common.DONE
