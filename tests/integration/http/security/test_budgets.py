"""The official SDKs with their own retries: a spent budget is asked for once, a rate is waited for and then answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors, types

from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

MESSAGES: list[Any] = [{"role": "user", "content": "x"}]
RETRIES = 5


async def chat(proxy: Proxy) -> str | None:
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/t/v1", api_key="none", max_retries=RETRIES) as client:
        answer = await client.chat.completions.create(model="m", messages=MESSAGES)
        return answer.choices[0].message.content


async def responses(proxy: Proxy) -> str:
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/t/v1", api_key="none", max_retries=RETRIES) as client:
        return (await client.responses.create(model="m", input="x")).output_text


async def messages(proxy: Proxy) -> str:
    async with anthropic.AsyncAnthropic(base_url=f"{proxy.url}/t", api_key="none", max_retries=RETRIES) as client:
        answer = await client.messages.create(model="m", max_tokens=100, messages=MESSAGES)
        return "".join(block.text for block in answer.content if block.type == "text")


async def gemini(proxy: Proxy) -> str | None:
    """Its retries are off unless asked for, and know no `retry-after`."""
    options = types.HttpRetryOptions(attempts=RETRIES + 1, initial_delay=1.0, max_delay=2.0)
    at = types.HttpOptions(base_url=f"{proxy.url}/t", retry_options=options, timeout=60_000)
    client = genai.Client(api_key="none", http_options=at).aio
    return (await client.models.generate_content(model="m", contents="x")).text


CLIENTS: list[Callable[[Proxy], Awaitable[str | None]]] = [chat, responses, messages, gemini]
REFUSED = (openai.APIStatusError, anthropic.APIStatusError, errors.APIError)


def counted(proxy: Proxy) -> list[int]:
    """Statuses of the agents' requests, from now on."""
    found: list[int] = []
    proxy.app.turns = {key: _counting(endpoint, found) for key, endpoint in proxy.app.turns.items()}
    proxy.app.actions = {key: _counting(endpoint, found) for key, endpoint in proxy.app.actions.items()}
    return found


def _counting(endpoint: Any, found: list[int]) -> Any:
    async def counting(scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                found.append(message["status"])
            await send(message)

        await endpoint(scope, receive, sending)

    return counting


@pytest.mark.parametrize("ask", CLIENTS)
@pytest.mark.parametrize("limits", [{"max_turns": 1}, {"max_tokens": 1}])
async def test_a_spent_budget_ends_the_trial_and_no_client_asks_again(
    ask: Callable[[Proxy], Awaitable[str | None]], limits: dict[str, int]
) -> None:
    async with running() as proxy:
        await proxy.http.post("/sessions/t", json={"limits": limits})
        statuses = counted(proxy)
        await ask(proxy)
        for _ in range(2):
            with pytest.raises(REFUSED) as refused:
                await ask(proxy)
            assert 400 <= (getattr(refused.value, "status_code", None) or refused.value.code) < 429  # type: ignore[union-attr]
        assert statuses[0] == 200 and len(statuses) == 3, statuses
        ended = (await proxy.http.get("/sessions/t")).json()
        assert ended["status"] != "open" and ended["end_reason"], ended


@pytest.mark.parametrize("ask", CLIENTS)
async def test_a_rate_is_waited_for_and_the_retry_is_answered_as_a_turn_of_its_own(
    ask: Callable[[Proxy], Awaitable[str | None]],
) -> None:
    """The retry is marked, and what it repeats was never asked: nothing may be remembered of a 429."""
    async with running(trial_requests_per_s=0.25, trial_burst=1) as proxy:
        statuses, asked = counted(proxy), 0
        while 429 not in statuses:  # a machine may be so busy that none comes too early
            assert asked < 20, statuses
            assert await ask(proxy)
            asked += 1
        assert statuses.count(200) == asked > 1, statuses
        turns = await proxy.turns("t", at_least=asked)
        assert len(turns) == asked and all(turn.finish_reason == "stop" and not turn.partial for turn in turns)


@pytest.mark.parametrize("ask", CLIENTS)
async def test_a_place_among_the_streams_is_waited_for(ask: Callable[[Proxy], Awaitable[str | None]]) -> None:
    gate = asyncio.Event()
    engine = ParrotEngine(lambda request: Say("hello", gates={2: gate}))
    async with running(engine, trial_streams=1) as proxy:
        statuses = counted(proxy)
        first = asyncio.create_task(proxy.chat("t", "first"))
        await until(lambda: engine.requests)
        second = asyncio.create_task(ask(proxy))
        await until(lambda: 429 in statuses)
        gate.set()
        assert (await first).status_code == 200 and await second
        assert len(await proxy.turns("t", at_least=2)) == 2
