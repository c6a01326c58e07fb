"""OpenAI's (legacy) Completions: `POST /{trial_id}/v1/completions`, with a text or a list of token ids as the prompt.

One prompt per request. `echo`, `suffix` and `best_of` above 1 are refused: the record holds what was sampled from the prompt as
it stands. `logprobs: N` gives the legacy shape with N alternatives a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from proxy.contracts.canonical import CanonicalRequest, Job, TokenLogprob
from proxy.contracts.errors import BadRequest, StenoError
from proxy.contracts.records import ids_to_bytes
from proxy.dialects import openai
from proxy.dialects.base import Choice, Header, Piece, Writer, check_range, decode
from proxy.dialects.openai import to_json
from proxy.dialects.openai_schema import COMPLETIONS

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's own default for this route, where chat has none."""


class _Body(openai.SamplingBody, kw_only=True):
    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


_decoder = msgspec.json.Decoder(_Body)


class Completions:
    """The dialect. Stateless."""

    name: ClassVar[str] = "completions"
    paths: ClassVar[tuple[str, ...]] = ("/v1/completions",)
    call_prefix: ClassVar[str] = "call"
    keepalive: ClassVar[bytes] = openai.KEEPALIVE

    def parse(self, body: bytes) -> CanonicalRequest:
        given = decode(_decoder, body)
        if given.echo:
            raise BadRequest("echo can't be honoured: only sampled tokens are answered", field="echo")
        if given.suffix:
            raise BadRequest("suffix can't be honoured: nothing is filled in", field="suffix")
        if given.best_of is not None and given.best_of != (given.n or 1):
            raise BadRequest("best_of can't be honoured: every sampled completion is answered", field="best_of")
        check_range("logprobs", given.logprobs, 0, 20)
        prompt = _single(given.prompt)
        job = Job(
            prompt_text=prompt if isinstance(prompt, str) else None,
            prompt_ids=None if isinstance(prompt, str) else prompt,
            top_logprobs=given.logprobs,
            sampling=openai.sampling_of(given, default_max_tokens=_DEFAULT_MAX_TOKENS),
        )
        return CanonicalRequest(
            dialect="completions",
            model=given.model or "",
            job=job,
            asked=openai.asked_for(given),
            n=given.n or 1,
            stream=bool(given.stream),
            include_usage=bool(given.stream_options and given.stream_options.include_usage),
            user=given.user,
        )

    def writer(self, request: CanonicalRequest, header: Header) -> Writer:
        return CompletionsWriter(request, header)

    def answer(self, request: CanonicalRequest, header: Header, choices: Sequence[Choice]) -> bytes:
        wants = request.job.top_logprobs
        return to_json(
            {
                **openai.envelope(header, "cmpl", "text_completion"),
                "choices": [
                    {
                        "index": choice.index,
                        "text": choice.message["content"],
                        "logprobs": None if wants is None else _legacy_logprobs(choice.tokens, 0)[0],
                        "finish_reason": choice.finish_reason,
                    }
                    for choice in choices
                ],
                "usage": openai.usage(choices),
            }
        )

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return openai.error_body(error)

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
        raise BadRequest("prompt must be a string or a list of token ids", field="prompt")
    if not prompt:
        raise BadRequest("prompt must not be empty", field="prompt")
    for i, value in enumerate(prompt):
        if type(value) is not int or not 0 <= value <= openai.MAX_TOKENS:
            raise BadRequest(f"prompt.{i} is not a token id", field=f"prompt.{i}")
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
        "top_logprobs": [{text: logprob for text, _, logprob in token.top} for token in tokens],
        "text_offset": offsets,
    }, offset


class CompletionsWriter:
    """`text_completion` events, spliced like chat's."""

    def __init__(self, request: CanonicalRequest, header: Header) -> None:
        self._wants_logprobs = request.job.top_logprobs is not None
        self._include_usage = request.include_usage
        self._constant = b"data: " + to_json(openai.envelope(header, "cmpl", "text_completion"))[:-1]
        self._heads = [
            self._constant + b',"choices":[{"index":%d,"text":' % index for index in range(max(request.n, 1))
        ]
        self._usage_null = b',"usage":null' if request.include_usage else b""
        self._offsets = [0] * len(self._heads)

    def closes(self, index: int, piece: Piece) -> bool:
        return False

    def begin(self, index: int, prompt_tokens: int, cached_tokens: int) -> bytes:
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        text = piece.content
        logprobs = b',"logprobs":null'
        if self._wants_logprobs and piece.tokens:
            legacy, self._offsets[index] = _legacy_logprobs(piece.tokens, self._offsets[index])
            logprobs = b',"logprobs":' + to_json(legacy)
        elif not text:
            return b""
        tail = b',"finish_reason":null}]' + self._usage_null + b"}\n\n"
        return self._heads[index] + to_json(text) + logprobs + tail

    def finish(self, choice: Choice) -> bytes:
        tail = b',"logprobs":null,"finish_reason":' + to_json(choice.finish_reason) + b"}]"
        return self._heads[choice.index] + b'""' + tail + self._usage_null + b"}\n\n"

    def end(self, choices: Sequence[Choice]) -> bytes:
        if not self._include_usage:
            return openai.DONE
        return self._constant + b',"choices":[],"usage":' + to_json(openai.usage(choices)) + b"}\n\n" + openai.DONE
