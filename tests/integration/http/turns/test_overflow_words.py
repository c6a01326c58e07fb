"""A prompt that is too long is told in the words that clients look for. LiteLLM, and with it SWE-agent, mini-swe-agent and
OpenHands, reads no code: what it does not know by its words is just a bad request to it, and the agent gives up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from steno.contracts.errors import ContextOverflow
from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import ParrotEngine, Say

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or importing it waits for a network

WORDS = (
    "This model's maximum context length is {} tokens. However, your messages resulted in {} tokens. "
    "Please reduce the length of the messages."
)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    overflow = ContextOverflow("too long", prompt_tokens=300, context_tokens=200)
    async with running(ParrotEngine(lambda request: Say(refuse=overflow))) as found:
        yield found


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {"messages": HELLO}),
        ("completions", {"prompt": "hello"}),
        ("responses", {"input": "hello"}),
    ],
)
async def test_each_of_openais_dialects_has_openais_words(proxy: Proxy, route: str, body: dict[str, object]) -> None:
    answer = await proxy.http.post(f"/t/v1/{route}", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["message"], error["code"]) == (WORDS.format(200, 300), "context_length_exceeded")


async def test_a_prompt_as_long_as_the_context_is_longer_than_what_is_named() -> None:
    """Room for one token of the answer is needed too."""
    overflow = ContextOverflow("too long", prompt_tokens=200, context_tokens=200)
    async with running(ParrotEngine(lambda request: Say(refuse=overflow))) as proxy:
        answer = await proxy.chat("t", "hello")
    assert answer.json()["error"]["message"] == WORDS.format(199, 200)


@pytest.mark.parametrize("numbers", [(0, 0), (150, 200)])
async def test_where_not_the_prompt_alone_is_too_long_the_workers_words_are_told(numbers: tuple[int, int]) -> None:
    overflow = ContextOverflow("150 + 80 > 200", prompt_tokens=numbers[0], context_tokens=numbers[1])
    async with running(ParrotEngine(lambda request: Say(refuse=overflow))) as proxy:
        chat = await proxy.chat("t", "hello")
        gemini = await proxy.http.post(
            "/t/v1beta/models/m:generateContent", json={"contents": [{"parts": [{"text": "hi"}]}]}
        )
    assert [answer.json()["error"]["message"] for answer in (chat, gemini)] == ["150 + 80 > 200"] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_litellm_knows_it_for_what_it_is(proxy: Proxy, stream: bool) -> None:
    import litellm

    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.acompletion(
            "openai/policy", HELLO, api_base=f"{proxy.url}/t/v1", api_key="none", stream=stream, num_retries=0
        )
    with pytest.raises(litellm.ContextWindowExceededError):
        await asyncio.to_thread(
            litellm.completion, "openai/policy", HELLO, api_base=f"{proxy.url}/t/v1", api_key="none"
        )
