"""A trial that asks too much is told so before any byte, in its own dialect's words; others notice nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.integration.http.conftest import running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

USER = {"role": "user", "content": "x"}
GEMINI = {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/v1/responses": {"input": "x"},
    "/v1beta/models/m:generateContent": GEMINI,
    "/v1beta/models/m:streamGenerateContent?alt=sse": GEMINI,
    "/v1beta/models/m:countTokens": GEMINI,
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/responses/input_tokens": {"input": "x"},
}


def words_of(path: str, answer: dict[str, Any]) -> bool:
    """Whether the refusal has the shape that this API's clients read."""
    error = answer["error"]
    if "v1beta" in path:
        return (error["code"], error["status"]) == (429, "RESOURCE_EXHAUSTED")
    if "messages" in path:
        return (answer["type"], error["type"]) == ("error", "rate_limit_error")
    return bool(error["code"] == "rate_limited" and error["message"])


@pytest.mark.parametrize("path", ASKED)
async def test_each_dialect_says_it_in_its_own_words(path: str) -> None:
    async with running(trial_requests_per_s=0.01, trial_burst=1) as proxy:
        first = await proxy.http.post("/t" + path, json=ASKED[path])
        assert first.status_code == 200, first.text
        refused = await proxy.http.post("/t" + path, json=ASKED[path])
        assert refused.status_code == 429 and 60 <= int(refused.headers["retry-after"]) <= 100
        assert words_of(path, refused.json()), refused.text
        assert (await proxy.http.post("/u" + path, json=ASKED[path])).status_code == 200


async def test_so_many_streams_at_once_and_a_place_is_free_when_one_ends_or_its_client_leaves() -> None:
    gate = asyncio.Event()
    engine = ParrotEngine(lambda request: Say("hello", gates={2: gate}))
    async with running(engine, trial_streams=2) as proxy:
        asked = [asyncio.create_task(proxy.chat("t", f"{n}")) for n in range(2)]
        await until(lambda: len(engine.requests) == 2)
        refused = await proxy.chat("t", "third", stream=True)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "in flight" in refused.json()["error"]["message"]
        asked[0].cancel()
        await until(lambda: engine.cancelled)
        third = asyncio.create_task(proxy.chat("t", "third"))
        await until(lambda: len(engine.requests) == 3)
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(asked[1], third, proxy.chat("u", "x"))] == [
            200
        ] * 3
        for n in range(5):
            assert (await proxy.chat("t", f"later {n}")).status_code == 200


async def test_what_is_refused_for_its_key_or_its_body_holds_no_place() -> None:
    async with running(trial_streams=1, admin_key="admin") as proxy:
        await proxy.http.post("/sessions/t")
        for _ in range(3):
            stranger = {"authorization": "Bearer x"}
            assert (await proxy.http.post("/t/v1/chat/completions", json={}, headers=stranger)).status_code == 403
            assert (await proxy.chat("t", "x", n=-1)).status_code == 400
        assert (await proxy.chat("t", "x")).status_code == 200
