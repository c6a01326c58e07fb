"""Gemini's routes: `/{trial_id}/v1beta/models/{model}:{action}` and the list of models.

What is peculiar to it and no dialect's business: the model and the action in the path, the form of a stream in the query
(`alt=sse`, else a JSON array), and a key that may come in the query (`?key=…`). Nothing here logs a query, and a
reverse proxy should not either: clients that can send `x-goog-api-key` should.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steno.contracts.records import TRIAL_ID
from steno.contracts.wire.frames import ModelCard
from steno_proxy.api.agents import generation
from steno_proxy.api.agents.counting import CountEndpoint
from steno_proxy.api.agents.generation import GenerationEndpoint
from steno_proxy.api.agents.lookup import look_up
from steno_proxy.api.agents.models import ModelListEndpoint, served_as
from steno_proxy.auth.keys import Keyring, key_of
from steno_proxy.dialects.gemini.dialect import GeminiCount, GeminiDialect
from steno_proxy.dialects.gemini.openapi import MODELS
from steno_proxy.dialects.openai.common import to_json
from steno_proxy.turns.service import TurnService
from steno_proxy.workers.hub import Hub

METHODS = ["generateContent", "streamGenerateContent", "countTokens"]
"""What can be done with each model, in Google's words."""


BROKEN = to_json(
    {"error": {"code": 503, "message": "the stream ended before the answer was complete", "status": "UNAVAILABLE"}}
)
"""The last bytes of a stream that breaks; then its connection breaks too. Google's SDK for JavaScript reads them as a retryable
error, and Gemini CLI retries; a broken connection alone would end its work. Other clients see the connection break."""
ALONE_S = 0.05
"""Seconds between the last event and BROKEN: that SDK finds an error only if one read returns it alone, not after an event."""


class QueryKeyEndpoint:
    """The endpoint, with a key of the query in the header where the others look for it. A header's own key wins."""

    def __init__(self, endpoint: ASGIApp) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if b"key=" in scope["query_string"] and key_of(scope["headers"]) is None:
            key = _query(scope, "key").encode("latin-1", "ignore")
            scope = {**scope, "headers": [*scope["headers"], (b"x-goog-api-key", key)]}
        await self._endpoint(scope, receive, send)


class GeminiStreamEndpoint:
    """`:streamGenerateContent`, as the query asks for it."""

    def __init__(self, endpoint: Callable[[GeminiDialect], GenerationEndpoint]) -> None:
        self._events = endpoint(GeminiDialect(stream=True, sse=True))
        self._array = endpoint(GeminiDialect(stream=True))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _query(scope, "alt") != "sse":
            await self._array(scope, receive, _as_json(send))
            return
        unfinished = False

        async def sending(message: Message) -> None:
            nonlocal unfinished
            unfinished = bool(message.get("more_body", message["type"] == "http.response.start"))
            await send(message)

        await self._events(scope, receive, sending)
        if unfinished:
            await asyncio.sleep(ALONE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(generation.LAST_WORDS_S):
                    await send({"type": "http.response.body", "body": BROKEN, "more_body": True})


def _query(scope: Scope, name: str) -> str:
    values = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=50).get(name)
    return values[-1] if values else ""


def _as_json(send: Send) -> Send:
    """A stream's head says that it is events; this one is JSON from its first byte to its last."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [(name, value) for name, value in message["headers"] if name != b"content-type"]
            message["headers"] = [(b"content-type", b"application/json; charset=utf-8"), *kept]
        await send(message)

    return sending


class GeminiModels:
    """`GET …/v1beta/models` and one of them by name: what the workers serve, in Google's shape."""

    def __init__(self, hub: Hub, keys: Keyring) -> None:
        self._hub = hub
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def find(trial_id: str) -> bytes:
            name = scope["path_params"].get("model")
            return msgspec.json.encode(self._list() if name is None else self._one(name))

        await look_up(scope, send, self._keys, find)

    def _list(self) -> dict[str, Any]:
        return {"models": [_model(card.name, card) for card in self._hub.cards()]}

    def _one(self, name: str) -> dict[str, Any]:
        return _model(name, served_as(self._hub, name))


class ModelListByClient:
    """`GET …/v1/models`, which OpenAI's clients ask for and Google's newer ones too: theirs say so in a header."""

    def __init__(self, google: ASGIApp, others: ASGIApp) -> None:
        self._google = google
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        google = any(name in (b"x-goog-api-client", b"x-goog-api-key") for name, _ in scope["headers"])
        await (self._google if google else self._others)(scope, receive, send)


def _model(name: str, card: ModelCard | None) -> dict[str, Any]:
    """card: None where nothing is known of it now."""
    known = {}
    if card is not None:
        known = {
            "version": card.policy_version,
            "inputTokenLimit": card.context_tokens,
            "outputTokenLimit": card.context_tokens,
        }
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": METHODS, **known}


def actions(turns: TurnService, hub: Hub, keys: Keyring, **limits: Any) -> dict[tuple[str, str], ASGIApp]:
    """For `front.Application`. limits: as for `generation.routes`."""

    def endpoint(dialect: GeminiDialect) -> GenerationEndpoint:
        return GenerationEndpoint(dialect, turns, keys, **limits)

    bounds = {name: limits[name] for name in ("bodies", "rates")}
    return {
        ("POST", "generateContent"): QueryKeyEndpoint(endpoint(GeminiDialect())),
        ("POST", "streamGenerateContent"): QueryKeyEndpoint(GeminiStreamEndpoint(endpoint)),
        ("POST", "countTokens"): QueryKeyEndpoint(CountEndpoint(GeminiCount(), hub, keys, **bounds)),
    }


def routes(hub: Hub, keys: Keyring) -> list[Route]:
    """To be looked at before `generation.routes`, which have `/v1/models` too."""
    models = QueryKeyEndpoint(GeminiModels(hub, keys))
    shared = ModelListByClient(models, ModelListEndpoint(hub, keys))
    found = []
    for prefix, endpoint in (("/v1beta", models), ("/v1alpha", models), ("/v1", shared)):
        found.append(Route(f"/{{trial_id}}{prefix}/models", endpoint, methods=["GET"]))
        found.append(Route(f"/{{trial_id}}{prefix}/models/{{model:path}}", endpoint, methods=["GET"]))
    return found


def openapi_paths() -> dict[str, Any]:
    """What these routes add to `/openapi.json`."""

    def parameter(name: str, pattern: str) -> dict[str, Any]:
        return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": pattern}}

    trial, model = parameter("trial_id", TRIAL_ID), parameter("model", "^[A-Za-z0-9._-]{1,64}$")
    alt = {"name": "alt", "in": "query", "schema": {"enum": ["sse", "json"]}}
    root = "/{trial_id}/v1beta/models"
    return {
        root: {"get": MODELS | {"parameters": [trial]}},
        f"{root}/{{model}}:generateContent": {"post": GeminiDialect().openapi() | {"parameters": [trial, model]}},
        f"{root}/{{model}}:streamGenerateContent": {
            "post": GeminiDialect(stream=True).openapi() | {"parameters": [trial, model, alt]}
        },
        f"{root}/{{model}}:countTokens": {"post": GeminiCount().openapi() | {"parameters": [trial, model]}},
    }
