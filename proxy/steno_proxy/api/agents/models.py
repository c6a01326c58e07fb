"""`GET /{trial_id}/v1/models`: what the workers serve, in a shape that OpenAI's clients read, and Anthropic's too."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from steno.contracts.errors import BadRequest, NotFound
from steno.contracts.wire.frames import ModelCard
from steno_proxy.api.agent_http import MAX_MODEL_CHARS
from steno_proxy.api.agents.lookup import look_up
from steno_proxy.auth.keys import Keyring
from steno_proxy.workers.hub import Hub
from steno_proxy.workers.routing import DEFAULT_POLICY


class ModelListEndpoint:
    """`GET /{trial_id}/v1/models`, and one model by name: what a turn that asks for this name gets."""

    def __init__(self, hub: Hub, keys: Keyring) -> None:
        self._hub = hub
        self._keys = keys
        self._created = int(time.time())
        self._created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def find(trial_id: str) -> bytes:
            name = scope["path_params"].get("model")
            if name is None:
                return msgspec.json.encode(self._list())
            return msgspec.json.encode(self._model(name, served_as(self._hub, name)))

        await look_up(scope, send, self._keys, find)

    def _list(self) -> dict[str, Any]:
        models = [self._model(card.name, card) for card in self._hub.cards()]
        ids = [model["id"] for model in models] or [None]
        return {"object": "list", "data": models, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}

    def _model(self, name: str, card: ModelCard | None) -> dict[str, Any]:
        context_tokens = card.context_tokens if card else None
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "steno",
            "max_model_len": context_tokens,
            "type": "model",
            "display_name": name,
            "created_at": self._created_at,
            "lifecycle": "active",
            "max_input_tokens": context_tokens,
            "max_tokens": context_tokens,
            "capabilities": None,
            "line": None,
            "deprecated_at": None,
            "retires_at": None,
        }


def served_as(hub: Hub, name: str) -> ModelCard | None:
    """The model that a turn with this model name gets. Any name gets one, as agents name models of their usual provider. None: no
    worker serves it now; a turn would wait for one.

    Raises: BadRequest: the name is too long for a turn. NotFound: it has `.` or `..` between slashes, another path to some.
    """
    if len(name) > MAX_MODEL_CHARS:
        raise BadRequest(f"model: longer than {MAX_MODEL_CHARS} characters", field="model")
    if not {".", ".."}.isdisjoint(name.replace("\\", "/").split("/")):
        raise NotFound("model: no part of a name between slashes may be . or ..", field="model")
    cards = hub.cards()
    exact = next((card for card in cards if card.name == name), None)
    if exact is not None or not cards or hub.is_model(name):
        return exact
    usual = next((card for card in cards if card.policy == DEFAULT_POLICY), None)
    return usual if usual is not None or hub.has_default() else cards[0]
