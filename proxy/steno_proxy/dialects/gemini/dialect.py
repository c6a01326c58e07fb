"""Google Gemini: `POST /{trial_id}/v1beta/models/{model}:generateContent`, `:streamGenerateContent`, `:countTokens`.

A stream is server-sent events (`alt=sse`) or one JSON array that grows. What this format can't say, and what is done instead:

    arguments that are no JSON object     `args` is {"__unparsedToolInput": the text}
    text after or between calls           comes before them: text streams, calls leave whole when the turn is on record (I3)
    thoughts                              shown only to those who ask (`thinkingConfig.includeThoughts`), recorded always

Each chunk has a candidate with a part in it, the last one too: if any chunk of a turn has none, Google's own chat clients drop
the turn from their history. A function call carries its id twice, as `id` and as `thoughtSignature`, which clients send back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from steno.contracts.chat import CanonicalRequest, TokenLogprob
from steno.contracts.errors import BadRequest, ContextOverflow, StenoError
from steno_proxy.dialects.base import Choice, Header, Piece, Writer, decode
from steno_proxy.dialects.gemini import contents, jobs
from steno_proxy.dialects.gemini.fields import Fields
from steno_proxy.dialects.gemini.openapi import COUNT, GENERATE, STREAM
from steno_proxy.dialects.openai.common import shown, to_json
from steno_proxy.dialects.parts import SeenParts

THOUGHTS = "thoughts"
_FINISH = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}
_STATUS = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED",
    409: "ABORTED", 410: "FAILED_PRECONDITION", 413: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 502: "UNAVAILABLE",
    503: "UNAVAILABLE",
}  # fmt: skip
_DETAILS = "type.googleapis.com/google.rpc."
_decoder = msgspec.json.Decoder(dict[str, Any])


class GeminiDialect:
    """The dialect, one instance for each way to answer. Stateless. The model is in the path: who has the path sets it."""

    name: ClassVar[str] = "gemini"
    paths: ClassVar[tuple[str, ...]] = ()
    call_prefix: ClassVar[str] = "fc"
    keepalive: ClassVar[bytes] = b"\n"
    """Google's SDK takes a comment line for a broken chunk. An empty line is nothing to it, and white space in JSON."""

    def __init__(self, *, stream: bool = False, sse: bool = False) -> None:
        self._stream = stream
        self._sse = sse

    def parse(self, body: bytes) -> CanonicalRequest:
        fields = Fields(decode(_decoder, body))
        seen = SeenParts()
        try:
            job, thoughts = jobs.job_of(fields, seen)
            config = fields.sub("generationConfig", {})
            return CanonicalRequest(
                dialect=self.name,
                model="",
                job=job,
                asked=jobs.requested_sampling(config),
                n=jobs.choices_of(config),
                stream=self._stream,
                dropped=seen.dropped,
                images=seen.images,
                kept={THOUGHTS: True} if thoughts else {},
            )
        except RecursionError:
            raise BadRequest("the body is nested too deeply") from None

    def writer(self, request: CanonicalRequest, header: Header) -> Writer:
        return GeminiWriter(request, header, sse=self._sse)

    def answer(self, request: CanonicalRequest, header: Header, choices: Sequence[Choice]) -> bytes:
        candidates = []
        for choice in choices:
            message = choice.message
            parts: list[Any] = []
            if request.kept.get(THOUGHTS) and message.get("reasoning_content"):
                parts.append({"text": message["reasoning_content"], "thought": True})
            if message["content"]:
                parts.append({"text": message["content"]})
            parts += [_call(call) for call in message.get("tool_calls") or ()]
            candidates.append(_last(choice, parts, request.job.top_logprobs is not None))
        return to_json({"candidates": candidates, "usageMetadata": usage(choices), **_constant(header)})

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        details: list[dict[str, Any]] = [{"@type": f"{_DETAILS}ErrorInfo", "reason": error.code, "domain": "steno"}]
        if error.field:
            violation = {"field": error.field, "description": error.message}
            details.append({"@type": f"{_DETAILS}BadRequest", "fieldViolations": [violation]})
        if error.retry_after_s is not None:
            details.append({"@type": f"{_DETAILS}RetryInfo", "retryDelay": f"{error.retry_after_s:g}s"})
        status = _STATUS.get(error.status, "INTERNAL")
        shown = {"code": error.status, "message": _message(error), "status": status, "details": details}
        return to_json({"error": shown})

    def broken(self, error: StenoError) -> bytes:
        """Nothing: Google's SDK for Python knows no error inside a stream and would take one that ends for a whole answer, so the
        connection breaks (after an error that others do know: `steno_proxy/api/agents/gemini.py`)."""
        return b""

    def openapi(self) -> dict[str, Any]:
        return STREAM if self._stream else GENERATE


class GeminiCount:
    """`:countTokens`: of contents alone, or of a whole `generateContentRequest`."""

    name: ClassVar[str] = GeminiDialect.name

    def parse_count(self, body: bytes) -> CanonicalRequest:
        """Raises: BadRequest naming the field."""
        fields = Fields(decode(_decoder, body))
        try:
            whole = fields.sub("generateContentRequest")
            job, _ = jobs.job_of(Fields(whole.given) if whole else fields, SeenParts(), complete=False)
            return CanonicalRequest(dialect=self.name, model="", job=job)
        except RecursionError:
            raise BadRequest("the body is nested too deeply") from None

    def count_answer(self, tokens: int) -> bytes:
        return to_json({"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]})

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return GeminiDialect().error(error)

    def openapi(self) -> dict[str, Any]:
        return COUNT


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Prompt tokens count once. Thoughts are none of the candidates' tokens."""
    prompt = choices[0].prompt_tokens
    completion = sum(choice.completion_tokens for choice in choices)
    thoughts = sum(choice.reasoning_tokens for choice in choices)
    counts: dict[str, Any] = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": completion - thoughts,
        "totalTokenCount": prompt + completion,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": prompt}],
    }
    if thoughts:
        counts["thoughtsTokenCount"] = thoughts
    if choices[0].cached_tokens:
        counts["cachedContentTokenCount"] = choices[0].cached_tokens
    return counts


def _message(error: StenoError) -> str:
    if isinstance(error, ContextOverflow) and error.prompt_alone:
        return (
            f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens allowed"
            f" ({error.context_tokens})."
        )
    return error.message


def _constant(header: Header) -> dict[str, str]:
    return {"modelVersion": header.model, "responseId": header.answer_id}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    shown = {"id": call["id"], "name": function["name"], "args": _args(function["arguments"])}
    return {"functionCall": shown, "thoughtSignature": contents.sign(call["id"])}


def _args(arguments: str) -> Any:
    """The arguments as they were sampled, to the digit, if they are an object. Line ends in JSON stand between tokens only, and
    would end an event."""
    if not arguments.strip():
        return {}
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return msgspec.Raw(arguments.replace("\n", " ").replace("\r", " ").encode())
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        pass  # no object either way: it goes out as text
    return {contents.UNPARSED: arguments}


def _last(choice: Choice, parts: list[Any], wants_logprobs: bool) -> dict[str, Any]:
    """A candidate with how it ended."""
    candidate = {
        "content": {"parts": parts or [{"text": ""}], "role": "model"},
        "finishReason": _FINISH.get(choice.finish_reason, "OTHER"),
        "index": choice.index,
    }
    if wants_logprobs:
        candidate["logprobsResult"] = _logprobs(choice.tokens)
        if choice.tokens:
            candidate["avgLogprobs"] = sum(token.logprob for token in choice.tokens) / len(choice.tokens)
    return candidate


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "chosenCandidates": [{"token": token.text, "logProbability": token.logprob} for token in tokens],
        "topCandidates": [
            {"candidates": [{"token": text, "logProbability": shown(logprob)} for text, _, logprob in token.top]}
            for token in tokens
        ],
    }


class GeminiWriter:
    """Chunks of one answer. What is the same in each of a stream is encoded once; a piece is spliced between."""

    def __init__(self, request: CanonicalRequest, header: Header, *, sse: bool) -> None:
        self._wants_logprobs = request.job.top_logprobs is not None
        self._thoughts = bool(request.kept.get(THOUGHTS))
        self._count = max(request.n, 1)
        self._finished: list[Choice] = []
        self._sse = sse
        self._lead = b"data: " if sse else b"["
        self._constant = b"," + to_json(_constant(header))[1:] + (b"\n\n" if sse else b"\n")

    def begin(self, index: int, prompt_tokens: int, cached_tokens: int) -> bytes:
        return b""

    def closes(self, index: int, piece: Piece) -> bool:
        return False

    def piece(self, index: int, piece: Piece) -> bytes:
        parts = []
        if piece.reasoning and self._thoughts:
            parts.append(b'{"text":' + to_json(piece.reasoning) + b',"thought":true}')
        if piece.content:
            parts.append(b'{"text":' + to_json(piece.content) + b"}")
        logprobs = b""
        if self._wants_logprobs and piece.tokens:
            logprobs = b',"logprobsResult":' + to_json(_logprobs(piece.tokens))
            parts = parts or [b'{"text":""}']
        if not parts:
            return b""
        inside = b'{"parts":[' + b",".join(parts) + b'],"role":"model"},"index":%d' % index
        return self._chunk(b'{"candidates":[{"content":' + inside + logprobs + b"}]")

    def finish(self, choice: Choice) -> bytes:
        """The calls, how it ended, and the usage of all that have ended."""
        self._finished.append(choice)
        parts = [_call(call) for call in choice.message.get("tool_calls") or ()]
        candidate = to_json(_last(choice, parts, False))
        counts = to_json(usage(self._finished))
        return self._chunk(b'{"candidates":[' + candidate + b'],"usageMetadata":' + counts)

    def end(self, choices: Sequence[Choice]) -> bytes:
        return b"" if self._sse else b"]"

    def _chunk(self, data: bytes) -> bytes:
        lead = self._lead
        if not self._sse:
            self._lead = b","
        return lead + data + self._constant
