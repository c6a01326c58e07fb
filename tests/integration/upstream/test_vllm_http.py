"""HTTP to a vLLM server that refuses, breaks off, or says very much: real sockets, and a server that does just that."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from steno.contracts.errors import BadRequest, ConfigError, ContextOverflow, EngineFailed, StenoError, TooManyRequests
from steno_worker.engines.vllm_server.http import MAX_LINE_BYTES, VllmServer
from tests.support.programs.server import serve

KEY = "sk-of-the-vllm-server"
LONG = "This model's maximum context length is 4096 tokens, not 5000"


class Upstream:
    """An ASGI app that answers what a test tells it."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self.keys: list[str] = []
        self.sessions: list[str | None] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = Request(scope).headers
            self.keys.append(headers.get("authorization", ""))
            self.sessions.append(headers.get("x-session-id"))
            await self.response(scope, receive, send)


async def asked(response: Response, *, stream: bool = False) -> list[Any]:
    upstream = Upstream(response)
    async with serve(upstream, lifespan="off") as port:
        server = VllmServer(f"http://127.0.0.1:{port}/v1", KEY, 10.0)
        server.context_tokens = 100
        await server.open()
        try:
            if stream:
                return [event async for event in server.stream("/v1/completions", {}, "")]
            return [await server.post("/v1/completions", {})]
        finally:
            await server.close()
            assert upstream.keys == [f"Bearer {KEY}"]


def events(*data: str, whole: bool = True) -> StreamingResponse:
    async def body() -> AsyncIterator[bytes]:
        for one in data:
            yield f"data: {one}\n\n".encode()
        if not whole:
            raise ConnectionError("gone")

    return StreamingResponse(body(), media_type="text/event-stream")


async def test_events_come_up_to_the_last() -> None:
    assert await asked(events('{"a": 1}', '{"b": 2}', "[DONE]"), stream=True) == [{"a": 1}, {"b": 2}]


async def test_the_trial_is_said_to_a_router_that_keeps_sessions_at_one_server() -> None:
    upstream = Upstream(events("[DONE]"))
    async with serve(upstream, lifespan="off") as port:
        server = VllmServer(f"http://127.0.0.1:{port}/v1", "", 10.0)
        await server.open()
        for trial_id in ("trial-7", ""):
            upstream.response = events("[DONE]")
            assert [event async for event in server.stream("/v1/completions", {}, trial_id)] == []
        await server.close()
    assert upstream.sessions == ["trial-7", None]


async def test_a_prompt_of_a_million_ids_fits_in_an_event() -> None:
    ids = [150_000] * 1_000_000
    first = json.dumps({"prompt_token_ids": ids}, separators=(",", ":"))
    assert len(first) < MAX_LINE_BYTES
    assert (await asked(events(first, "[DONE]"), stream=True))[0]["prompt_token_ids"] == ids


@pytest.mark.parametrize(
    ("response", "kind", "said"),
    [
        (JSONResponse({"error": {"message": "bad tools"}}, 400), BadRequest, "bad tools"),
        (JSONResponse({"error": {"message": LONG}}, 400), ContextOverflow, "5000"),
        (JSONResponse({"error": "Unauthorized"}, 401), EngineFailed, "refuses the worker's API key"),
        (JSONResponse({"detail": "Not Found"}, 404), EngineFailed, "no such model or route"),
        (Response("busy", 429, {"retry-after": "3"}), TooManyRequests, "busy"),
        (Response(f"{KEY} is odd", 500), EngineFailed, "is odd"),
        (RedirectResponse("http://127.0.0.1:9/", 307), EngineFailed, "307"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_an_error_of_ours(
    response: Response, kind: type[StenoError], said: str, stream: bool
) -> None:
    with pytest.raises(StenoError) as raised:
        await asked(response, stream=stream)
    assert type(raised.value) is kind and said in raised.value.message and KEY not in raised.value.message
    if kind is TooManyRequests:
        assert raised.value.retry_after_s == 3.0


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (events('{"a": 1}'), "ended before the completion did"),
        (events('{"a": 1}', whole=False), "broke off"),
        (events('{"error": {"message": "out of memory", "code": 500}}'), "out of memory"),
        (events("{"), "broke off"),
    ],
)
async def test_a_stream_that_does_not_come_to_its_end_is_an_error(response: Response, said: str) -> None:
    with pytest.raises(EngineFailed, match=said):
        await asked(response, stream=True)


async def test_a_server_that_is_not_there_is_an_error() -> None:
    server = VllmServer("http://127.0.0.1:9/v1", "", 1.0)
    await server.open()
    with pytest.raises(EngineFailed, match="can't be reached"):
        await server.get("/v1/models")
    await server.close()


def test_no_url_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        VllmServer(None, "", 1.0)
    assert refused.value.field == "api_base"
