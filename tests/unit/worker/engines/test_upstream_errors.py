"""Upstreams' failures, as LiteLLM raises them, and what the agent is told of them."""

from __future__ import annotations

import json
import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import httpx
import litellm.exceptions as upstream
import pytest

from steno.contracts.errors import BadRequest, ContextOverflow, EngineFailed, StenoError, TooManyRequests
from steno_worker.engines.upstream_errors import MAX_CHARS, retry_after_s, translate

WHO = {"llm_provider": "openai", "model": "m"}
KEY = "sk-very-secret"
LIMIT = "This model's maximum context length is"
PASTED = json.dumps({"error": {"message": "slowly"}, "hint": "it's é"}, ensure_ascii=False).encode()


def response(status: int, **headers: str) -> httpx.Response:
    return httpx.Response(status, headers=headers, request=httpx.Request("POST", "https://provider.test"))


def translated(error: Exception) -> StenoError:
    return translate(error, context_tokens=1000, key=KEY, now=0.0)


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (upstream.RateLimitError("slowly", response=response(429), **WHO), TooManyRequests, 429),
        (upstream.ServiceUnavailableError("overloaded", response=response(503), **WHO), EngineFailed, 503),
        (upstream.InternalServerError("oops", response=response(500), **WHO), EngineFailed, 503),
        (upstream.Timeout("silence", **WHO), EngineFailed, 503),
        (upstream.APIConnectionError("refused", **WHO), EngineFailed, 503),
        (upstream.NotFoundError("no model", response=response(404), **WHO), EngineFailed, 503),
        (upstream.BadRequestError("bad tools", response=response(400), **WHO), BadRequest, 400),
        (upstream.ContentPolicyViolationError("no", response=response(400), **WHO), BadRequest, 400),
        (upstream.ContextWindowExceededError("too long", response=response(400), **WHO), ContextOverflow, 400),
        (ValueError("odd"), EngineFailed, 503),
    ],
)
def test_each_failure_has_its_class_and_says_what_happened(
    error: Exception, kind: type[StenoError], status: int
) -> None:
    found = translated(error)
    assert type(found) is kind and found.status == status
    assert "litellm" not in found.message.lower() and found.message


def test_a_refused_key_is_told_without_a_word_of_the_provider() -> None:
    error = upstream.AuthenticationError(f"Incorrect API key provided: {KEY}", response=response(401), **WHO)
    found = translated(error)
    assert type(found) is EngineFailed and "401" in found.message
    assert "Incorrect" not in found.message and KEY not in found.message


def test_the_key_is_blotted_out_of_every_message_and_long_ones_are_cut() -> None:
    error = upstream.BadRequestError(f"request {KEY} said " + "x" * 5000, response=response(400), **WHO)
    found = translated(error)
    assert KEY not in found.message and "***" in found.message and len(found.message) < MAX_CHARS + 100


@pytest.mark.parametrize(
    "said",
    [
        'litellm.RateLimitError: AnthropicException - b\'{"type":"error","error":{"message":"slowly"}}\'',
        'OpenAIException - {"error": "slowly"}',
        "OpenAIException - slowly",
        f"AnthropicException - {PASTED!r}",
    ],
)
def test_of_a_body_that_is_pasted_whole_its_message_is_told(said: str) -> None:
    error = upstream.RateLimitError(said, response=response(429), **WHO)
    assert translated(error).message == "the upstream is at its limit: slowly"


@pytest.mark.parametrize(
    "said",
    [
        "bad: " + '{"a":' * 5000 + "1" + "}" * 5000,
        'bad: {"error": "slowly", "a": ' + "9" * 5000 + "}",
        "b'{" + "'+" + "(" * 5000 + "}'",
        "b'{" + "'+" + "-" * 200_000 + "}'",
    ],
)
def test_a_refusal_with_a_text_that_can_t_be_read_is_still_the_requests(said: str) -> None:
    found = translated(upstream.BadRequestError(said, response=response(400), **WHO))
    assert type(found) is BadRequest and found.message.startswith(f"the upstream refuses this request: {said[:100]}")


def test_what_only_looks_like_one_is_told_as_it_is() -> None:
    error = upstream.RateLimitError("b'{\\x' }' slowly", response=response(429), **WHO)
    assert "slowly" in translated(error).message


def test_the_upstreams_wait_is_passed_on() -> None:
    error = upstream.RateLimitError("slowly", response=response(429, **{"retry-after": "17"}), **WHO)
    assert translated(error).retry_after_s == 17.0


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:09 GMT"}, 9.0),
        ({"retry-after": "soon"}, None),
    ],
)
def test_retry_after_is_seconds_or_a_date(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(headers, 0.0) == expected


@pytest.mark.parametrize(
    ("said", "prompt", "context"),
    [
        (
            "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens",
            9000,
            8192,
        ),
        ("prompt is too long: 210,000 tokens > 200,000 maximum", 210000, 200000),
        ("context_length_exceeded", 1001, 1000),
        ("context_length_exceeded (request id: 2025021016352486213124GSwX)", 1001, 1000),
        (f"{LIMIT} 65536 tokens. However, your messages resulted in 70000 tokens. (request id: 2025021016352486213124GSwX)",
         70000, 65536),
        (f"{LIMIT} 65536 tokens. However, you requested 70000 tokens (62000 in the messages, 8000 in the completion).",
         62000, 65536),
        (f"{LIMIT} 4096 tokens. However, you requested 4000 output tokens and your prompt contains 192 input tokens, for a "
         "total of 4192 tokens.", 192, 4096),
        (f"{LIMIT} 4096 tokens. However, your prompt contains at least 4097 input tokens, which exceeds this limit even "
         "without any output tokens.", 4097, 4096),
        (f"{LIMIT} 4096 tokens. However, your prompt contains 131073 characters (more than 131072 characters, which is the "
         "upper bound for 4095 input tokens).", 0, 0),
        (f"{LIMIT} 4096 tokens, not 5000", 0, 0),
        (f"{LIMIT} 4096 tokens. However, your messages resulted in 2147483648 tokens", 0, 0),
        (f"Error code: 400 - {{'error': {{'message': \"{LIMIT} 65536 tokens. However, your messages resulted in 70000 "
         "tokens\"}}", 70000, 65536),
        ("the prompt has 5000 tokens; the model's context is 4000", 5000, 4000),
        ("You passed 4097 input tokens and requested 256 output tokens. However, the model's context length is only 4096 tokens, "
         "resulting in a maximum input length of 3840 tokens.", 4097, 4096),
        ("The decoder prompt (length 5000) is longer than the maximum model length of 4096; the context window", 5000, 4096),
        ("Input length (5000) exceeds model's maximum context length (4096).", 5000, 4096),
        ("The input (5000 tokens) is longer than the model's maximum context length (4096 tokens).", 5000, 4096),
        ("Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length", 40000, 32768),
        ("This endpoint's maximum context length is 65536 tokens. However, you requested about 70000 tokens (62000 of text "
         "input, 8000 in the output).", 62000, 65536),
    ],
)  # fmt: skip
def test_an_overflow_carries_both_numbers(said: str, prompt: int, context: int) -> None:
    found = translated(upstream.BadRequestError(said, response=response(400), **WHO))
    assert isinstance(found, ContextOverflow)
    assert (found.prompt_tokens, found.context_tokens) == (prompt, context)


@pytest.mark.parametrize(
    ("said", "prompt", "context"),
    [
        ("The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).", 1200000, 1048576),
        ("input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease one", 188240, 200000),
        ("the request exceeds the available context size (4096 tokens), try increasing it", 0, 0),
        ("Please reduce the length of the messages. Current length is 9000 while limit is 8192", 9000, 8192),
        ("The prompt is too long: 141309, model maximum context length: 131072", 141309, 131072),
        ("This model's prompt cannot exceed 4081 - received 4292", 4292, 4081),
        ("`inputs` tokens + `max_new_tokens` must be <= 4097. Given: 4000 and 1000", 0, 0),
    ],
)
def test_an_overflow_that_litellm_alone_knows_keeps_its_words(said: str, prompt: int, context: int) -> None:
    found = translated(upstream.ContextWindowExceededError(said, response=response(400), **WHO))
    assert isinstance(found, ContextOverflow) and found.message == said
    assert (found.prompt_tokens, found.context_tokens) == (prompt, context)


def test_what_is_ours_already_stays() -> None:
    error = BadRequest("no", field="x")
    assert translated(error) is error
