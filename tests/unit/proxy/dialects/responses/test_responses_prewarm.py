"""The message by which Codex opens a socket early (`generate: false`): it gets an empty response, and nothing is asked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from steno_proxy.api.agents.response_socket import _Socket
from steno_proxy.api.bodies_in_flight import BodiesInFlight
from tests.unit.proxy.dialects.responses.test_responses import USER
from tests.unit.proxy.dialects.responses.test_responses_events import EVENT


async def test_a_socket_that_is_opened_early_gets_an_empty_response_and_nothing_is_asked() -> None:
    asked = {"type": "response.create", "model": "m", "input": [USER], "generate": False}
    waiting = [{"type": "websocket.receive", "text": json.dumps(asked)}]
    told: list[Any] = []
    answered = asyncio.Event()

    async def receive() -> Any:
        if waiting:
            return waiting.pop()
        await answered.wait()
        return {"type": "websocket.disconnect"}

    async def send(message: Any) -> None:
        told.append(json.loads(message["text"]))
        if told[-1]["type"] == "response.completed":
            answered.set()

    async def create(*asked: Any) -> None:
        raise AssertionError("a request was made")

    scope: Any = {"path": "/t/v1/responses", "path_params": {"trial_id": "t"}, "headers": []}
    endpoint: Any = create
    share = BodiesInFlight(1 << 20, 1 << 20).hold("t")
    await _Socket(scope, receive, send, endpoint, share, asyncio.Event()).run()
    assert [event["type"] for event in told] == ["response.created", "response.in_progress", "response.completed"]
    for event in told:
        EVENT.validate_python(event)
    answer = told[-1]["response"]
    assert (answer["id"], answer["model"], answer["output"], answer["usage"]["total_tokens"]) == ("", "m", [], 0)
