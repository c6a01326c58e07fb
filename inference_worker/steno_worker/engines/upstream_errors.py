"""Upstreams' failures -> ours: the error tree's class, words that an agent may read, and when to come back.

LiteLLM raises its own classes for all providers; they are told apart by status, which they all carry, so litellm is not imported
here. A refused key is the operator's affair: the agent reads that it was refused, and nothing of what the provider said about it.
"""

from __future__ import annotations

import ast
import email.utils
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from steno.contracts.errors import BadRequest, ContextOverflow, EngineFailed, StenoError, TooManyRequests

MAX_CHARS = 600
"""Of a provider's message: some repeat the whole request in it."""
MIN_SECRET_CHARS = 6
"""Shorter keys ("none", "x") are no secrets, and would blot out words."""
_HEAD = re.compile(r"^(litellm\.)?\w*(Error|Exception|Timeout): |^\w+Exception - ", re.ASCII)
_OVERFLOW = (
    "context_length_exceeded",
    "maximum context length",
    "prompt is too long",
    "context window",
    "model's context is",
    "model's context length",
)
_N = r"(\d[\d,_]*)"
_CONTEXT = re.compile(
    rf"context (?:length |window )?(?:is|of)(?: only)? {_N}|(?:context length|context size|tokens allowed)(?: \(|: ){_N}"
    rf"|> {_N} maximum|{_N} maximum context|context limit: .*> {_N}|model length of {_N}|limit is {_N}|cannot exceed {_N}",
    re.IGNORECASE,
)
_PROMPT = re.compile(
    rf"resulted in {_N}|{_N} (?:tokens )?(?:in|from|of) (?:the messages|your prompt|the input|text input)"
    rf"|(?:contains|has|passed) (?:at least )?{_N} (?:input )?tokens|{_N} tokens >|context limit: {_N} \+"
    rf"|(?:token count|input length) \({_N}\)|input \({_N} tokens|prompt \(length {_N}\)"
    rf"|current length is {_N}|prompt is too long: {_N}|received {_N}",
    re.IGNORECASE,
)
_ANY_NUMBER = re.compile(r"(?<!\w)(\d[\d,_]{2,})(?!\w)")


def translate(error: Exception, *, context_tokens: int, key: str = "", now: float | None = None) -> StenoError:
    """The error to raise for one that came from an upstream.

    Args: context_tokens: of the model, for overflows whose text does not name it. key: is blotted out wherever it appears.
        now: Unix s, for dates in Retry-After.
    """
    if isinstance(error, StenoError):
        return error
    status = _status(error)
    said = _words(error, key)
    wait_s = retry_after_s(_headers(error), time.time() if now is None else now)
    if status in (401, 403):
        return EngineFailed(
            f"the upstream refuses the worker's API key ({status}); the operator must set another (api_key)"
        )
    if status in (400, 413, 422):
        if _is_overflow(error, said):
            return _overflow(said, context_tokens)
        return BadRequest(f"the upstream refuses this request: {said}")
    if status == 429:
        return TooManyRequests(f"the upstream is at its limit: {said}", retry_after_s=wait_s)
    if status == 404:
        return EngineFailed("the upstream has no such model or route (404)")
    if status in (408, 504):
        return EngineFailed("the upstream did not answer in time", retry_after_s=wait_s)
    return EngineFailed(f"the upstream failed{f' ({status})' if status else ''}: {said}", retry_after_s=wait_s)


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds to wait as `Retry-After-Ms` or `Retry-After` (RFC 9110, 10.2.3: seconds or a date) say; None: they don't."""
    try:
        if (ms := headers.get("retry-after-ms")) is not None:
            return max(0.0, float(ms) / 1000)
        given = headers.get("retry-after")
        if given is None:
            return None
        if re.fullmatch(r"\d+(\.\d+)?", given.strip()):
            return float(given)
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - now)
    except ValueError:
        return None


def _status(error: Exception) -> int | None:
    status = getattr(error, "status_code", None)
    if isinstance(status, str) and status.isdigit():
        status = int(status)
    if not isinstance(status, int):
        return None
    # A connection that failed is given 500 by LiteLLM: it is nobody's status.
    return None if type(error).__name__ == "APIConnectionError" else status


def _headers(error: Exception) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for headers in (
        getattr(getattr(error, "response", None), "headers", None),
        getattr(error, "litellm_response_headers", None),
    ):
        if headers:
            found |= {str(name).lower(): str(value) for name, value in headers.items()}
    return found


def _words(error: Exception, key: str) -> str:
    given: Any = getattr(error, "message", None)
    said: str = given if isinstance(given, str) and given else str(error) or type(error).__name__
    while (bare := _HEAD.sub("", said, count=1)) != said:
        said = bare
    said = _inner(said)
    if len(key) >= MIN_SECRET_CHARS:
        said = said.replace(key, "***")
    said = " ".join(said.split())
    return said if len(said) <= MAX_CHARS else said[: MAX_CHARS - 1] + "…"


def _inner(said: str) -> str:
    """The message in an error body that was pasted whole: `{"error": {"message": …}}`, perhaps as Python shows bytes."""
    start, end = said.find("{"), said.rfind("}")
    if start < 0 or end < start:
        return said
    text = said[start : end + 1]
    if said[max(0, start - 2) : start] in ("b'", 'b"'):
        quote = said[start - 1]
        try:
            text = ast.literal_eval(f"b{quote}{text}{quote}").decode(errors="replace")
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: it is too deep
            return said
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return said
    error = body.get("error", body)
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else said


def _is_overflow(error: Exception, said: str) -> bool:
    if "ContextWindow" in type(error).__name__ or getattr(error, "code", None) == "context_length_exceeded":
        return True
    low = said.lower()
    return any(mark in low for mark in _OVERFLOW)


def _overflow(said: str, context_tokens: int) -> ContextOverflow:
    """Providers' texts have other numbers too: characters, tokens of the answer, request ids. A text whose numbers do not say how
    long the prompt is goes on as it is. If it has none, only this is known: the prompt exceeds the model's context."""
    context, prompt = _number(_CONTEXT, said), _number(_PROMPT, said)
    if not prompt and _number(_ANY_NUMBER, said):
        return ContextOverflow(said, field="messages")
    context = context or context_tokens
    return ContextOverflow(said, prompt_tokens=prompt or context + 1, context_tokens=context, field="messages")


def _number(pattern: re.Pattern[str], said: str) -> int:
    """The first that can be a count of tokens; 0: there is none."""
    found = (int(re.sub(r"[,_]", "", match[match.lastindex or 0])) for match in pattern.finditer(said))
    return next((number for number in found if number < 2**31), 0)
