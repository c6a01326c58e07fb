"""Small routes of an agent's that look something up: nothing comes in but the path, nothing is generated."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope, Send

from steno.contracts.errors import StenoError
from steno_proxy import logs
from steno_proxy.api.agent_http import HttpClient, check_trial_id, refusal_headers
from steno_proxy.auth.keys import Keyring, key_of
from steno_proxy.dialects.anthropic.dialect import MessagesDialect
from steno_proxy.dialects.gemini.dialect import GeminiDialect
from steno_proxy.dialects.openai.chat import ChatDialect


class HealthProbes:
    """`/{trial_id}/health`, `/ping` and `/version`, where clients of vLLM look for them beside its `/v1`."""

    def __init__(self, keys: Keyring, version: str) -> None:
        self._keys = keys
        self._version = msgspec.json.encode({"version": version})

    def routes(self) -> list[Route]:
        """To be looked at last: `/sessions/health` is a session."""
        return [
            Route("/{trial_id}/health", self.health, methods=["GET"]),
            Route("/{trial_id}/ping", self.health, methods=["GET", "POST"]),
            Route("/{trial_id}/version", self.version, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        """200, as `/health` at the root: the process answers. It asks for no key and says nothing of the trial."""
        check_trial_id(request.path_params["trial_id"])
        return Response()

    async def version(self, request: Request) -> Response:
        """Raises: Unauthorized, Forbidden: without the trial's key."""
        trial_id = request.path_params["trial_id"]
        check_trial_id(trial_id)
        await self._keys.check_current(key_of(request.scope["headers"]), trial_id)
        return Response(self._version, media_type="application/json")


async def look_up(
    scope: Scope,
    send: Send,
    keys: Keyring,
    find: Callable[[str], Awaitable[bytes]],
) -> None:
    """Answer with what `find` says for the trial in the path, if the request has its key (I8).

    A refusal, be it a key's or one that `find` raises, is in the words of the client's dialect.
    """
    trial_id = scope["path_params"]["trial_id"]
    request_id = os.urandom(8).hex()
    logs.bind(trial_id, request_id)
    client = HttpClient(send, request_id.encode())
    try:
        check_trial_id(trial_id)
        await keys.check_current(key_of(scope["headers"]), trial_id)
        body = await find(trial_id)
    except StenoError as error:
        await client.respond(error.status, error_words(scope)(error, request_id), refusal_headers(error))
        return
    await client.respond(200, body, [])


def error_words(scope: Scope) -> Callable[[StenoError, str], bytes]:
    """How the client reads an error, where the path alone does not say which dialect it speaks: by what only its SDK sends.

    Returns: (error, request id) -> the body of the refusal.
    """
    names = {name for name, _ in scope["headers"]}
    words = scope["path"].split("/")[2:]
    if not names.isdisjoint((b"x-goog-api-client", b"x-goog-api-key")) or words[:1] in (["v1beta"], ["v1alpha"]):
        return GeminiDialect().error
    if b"anthropic-version" in names or "messages" in words:
        return MessagesDialect().error
    return ChatDialect().error
