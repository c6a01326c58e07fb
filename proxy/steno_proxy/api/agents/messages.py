"""What Anthropic's clients ask for besides turns: `POST /{trial_id}/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from steno.contracts.records import TRIAL_ID
from steno_proxy.api.agents.counting import CountEndpoint
from steno_proxy.auth.keys import Keyring
from steno_proxy.dialects.anthropic.dialect import MessagesCount, MessagesDialect
from steno_proxy.workers.hub import Hub

_PATHS = [f"{path}/count_tokens" for path in MessagesDialect.paths]


def routes(hub: Hub, keys: Keyring, **bounds: Any) -> list[Route]:
    endpoint = CountEndpoint(MessagesCount(), hub, keys, **bounds)
    return [Route(f"/{{trial_id}}{path}", endpoint, methods=["POST"]) for path in _PATHS]


def openapi_paths() -> dict[str, Any]:
    """What these routes add to `/openapi.json`."""
    trial = {"name": "trial_id", "in": "path", "required": True, "schema": {"type": "string", "pattern": TRIAL_ID}}
    return {f"/{{trial_id}}{path}": {"post": MessagesCount().openapi() | {"parameters": [trial]}} for path in _PATHS}
