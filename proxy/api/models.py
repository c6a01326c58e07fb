"""`GET /{trial_id}/v1/models`: what the workers serve, in a shape that OpenAI's clients read, and Anthropic's too."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from proxy.api.lookup import look_up
from proxy.contracts.errors import NotFound
from proxy.dialects.openai import error_body
from proxy.hub import Hub
from proxy.keys import Keyring


class Models:
    """`GET /{trial_id}/v1/models` (and one model by name): what the workers serve, in a shape that OpenAI's clients
    read, and Anthropic's too."""

    def __init__(self, hub: Hub, keys: Keyring) -> None:
        self._hub = hub
        self._keys = keys
        self._created = int(time.time())
        self._created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def find(trial_id: str) -> bytes:
            name = scope["path_params"].get("model")
            return msgspec.json.encode(self._list() if name is None else self._one(name))

        await look_up(scope, send, self._keys, find, error_body)

    def _list(self) -> dict[str, Any]:
        models = [self._model(card.name, card.context_tokens) for card in self._hub.cards()]
        ids = [model["id"] for model in models] or [None]
        return {"object": "list", "data": models, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}

    def _one(self, name: str) -> dict[str, Any]:
        for card in self._hub.cards():
            if card.name == name:
                return self._model(card.name, card.context_tokens)
        raise NotFound("no worker serves a model of this name", field="model")

    def _model(self, name: str, context_tokens: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "steno",
            "max_model_len": context_tokens,
            "type": "model",
            "display_name": name,
            "created_at": self._created_at,
        }
