"""Endpoints that ask a worker of a prompt's tokens, and record nothing: how many (`countTokens`, `count_tokens`), or which
(vLLM's `/tokenize`, `/detokenize`).

They begin no session and leave no trace in the trial; the trial's key opens them. The prompt is rendered whole.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from steno.contracts.chat import CanonicalRequest, Job
from steno.contracts.errors import StenoError
from steno.contracts.records import TRIAL_ID
from steno_proxy import logs, metrics
from steno_proxy.api.agent_http import ID_HEADERS, BodyReader, HttpClient, check_trial_id, refusal_headers
from steno_proxy.auth.keys import Keyring, key_of
from steno_proxy.auth.rate_limit import RateLimiter
from steno_proxy.dialects.openai.tokenize import Detokenize, Tokenize, TokenizeFormat
from steno_proxy.pace import LARGE_BYTES
from steno_proxy.workers.hub import Hub

log = logging.getLogger(__name__)
T = TypeVar("T")


class ErrorFormat(Protocol):
    """name: of the dialect, or of the call."""

    name: ClassVar[str]

    def error(self, error: StenoError, request_id: str = "") -> bytes: ...


class CountFormat(ErrorFormat, Protocol):
    """The part of a wire format that counting needs."""

    def parse_count(self, body: bytes) -> CanonicalRequest:
        """The request; only its job and model are used. Raises: BadRequest with the dotted path of the field to blame."""
        ...

    def count_answer(self, tokens: int) -> bytes: ...
    def openapi(self) -> dict[str, Any]: ...


class TokenEndpoint(ABC):
    """An ASGI endpoint. Args: label: of it, in metrics."""

    def __init__(
        self, format: ErrorFormat, label: str, hub: Hub, keys: Keyring, *, bodies: BodyReader, rates: RateLimiter
    ) -> None:
        self._format = format
        self._label = label
        self._hub = hub
        self._keys = keys
        self._bodies = bodies
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trial_id = scope["path_params"].get("trial_id", "")
        request_id = os.urandom(8).hex()
        logs.bind(trial_id, request_id)
        named = ID_HEADERS.get(self._format.name, (b"x-request-id",))
        client = HttpClient(send, request_id.encode(), named=named)
        try:
            await client.answer(await self._ask(trial_id, scope, receive))
        except StenoError as error:
            await self._refuse(client, error, request_id)
        except Exception:
            log.exception("unhandled exception while answering a request about tokens")
            await self._refuse(
                client,
                StenoError(f"internal error; the proxy's log has the details under request {request_id}"),
                request_id,
            )
        finally:
            metrics.REQUESTS.labels(self._label, str(client.status)).inc()

    async def _ask(self, trial_id: str, scope: Scope, receive: Receive) -> bytes:
        await self._admit(trial_id, scope)
        self._rates.enter(trial_id)
        share = self._bodies.inflight.hold(trial_id)
        try:
            body = await self._bodies.read(scope, self._bodies.incoming(receive), share)
            return await self._answer(trial_id, body, scope["path_params"].get("model"))
        finally:
            share.close()
            self._rates.leave(trial_id)

    async def _admit(self, trial_id: str, scope: Scope) -> None:
        """Raises: NotFound, Unauthorized, Forbidden: without the trial's key."""
        check_trial_id(trial_id)
        await self._keys.check_current(key_of(scope["headers"]), trial_id)

    @abstractmethod
    async def _answer(self, trial_id: str, body: bytes, model: str | None) -> bytes:
        """model: where a format has it in the path."""
        ...

    async def _parsed(self, parse: Callable[[bytes], T], body: bytes, job_of: Callable[[T], Job]) -> T:
        found = await self._bodies.parsed(parse, body, job_of)
        if len(body) >= LARGE_BYTES:
            await self._bodies.pace.turn()  # it goes to a worker next
        return found

    async def _refuse(self, client: HttpClient, error: StenoError, request_id: str) -> None:
        await client.respond(error.status, self._format.error(error, request_id), refusal_headers(error))


class CountEndpoint(TokenEndpoint):
    """Answers how many tokens a prompt has."""

    def __init__(self, counter: CountFormat, hub: Hub, keys: Keyring, **bounds: Any) -> None:
        super().__init__(counter, f"{counter.name}_count", hub, keys, **bounds)
        self._counter = counter

    async def _answer(self, trial_id: str, body: bytes, model: str | None) -> bytes:
        asked = await self._parsed(self._counter.parse_count, body, lambda asked: asked.job)
        named = asked.model if model is None else model
        return self._counter.count_answer(await self._hub.count(trial_id, asked.job, named))


class TokenizeEndpoint(TokenEndpoint):
    """Answers which token ids a prompt has, or which text token ids stand for."""

    def __init__(self, question: TokenizeFormat, hub: Hub, keys: Keyring, **bounds: Any) -> None:
        super().__init__(question, question.name, hub, keys, **bounds)
        self._question = question

    async def _answer(self, trial_id: str, body: bytes, model: str | None) -> bytes:
        request = await self._parsed(self._question.parse, body, lambda request: request.frame.job)
        counted, card = await self._hub.tokenize(trial_id, request.frame, request.model)
        pieces: list[bytes] = []
        await self._bodies.pace.steps(map(pieces.append, self._question.answer(request, counted, card)))
        return b"".join(pieces)


class RootTokenizeEndpoint(TokenizeEndpoint):
    """The same at the root, where vLLM has it; the admin key opens it."""

    async def _admit(self, trial_id: str, scope: Scope) -> None:
        """Raises: Unauthorized, Forbidden."""
        self._keys.check_admin(key_of(scope["headers"]))


def routes(hub: Hub, keys: Keyring, **bounds: Any) -> list[Route]:
    """vLLM's two, at the root and under a trial. To be looked at last: `/sessions/tokenize` is a session."""
    found = []
    for question in (Tokenize(), Detokenize()):
        at_root, in_trial = (
            RootTokenizeEndpoint(question, hub, keys, **bounds),
            TokenizeEndpoint(question, hub, keys, **bounds),
        )
        found.append(Route(f"/{question.name}", at_root, methods=["POST"]))
        found.append(Route(f"/{{trial_id}}/{question.name}", in_trial, methods=["POST"]))
    return found


def openapi_paths() -> dict[str, Any]:
    """What these routes add to `/openapi.json`."""
    trial = {"name": "trial_id", "in": "path", "required": True, "schema": {"type": "string", "pattern": TRIAL_ID}}
    found: dict[str, Any] = {}
    for question in (Tokenize(), Detokenize()):
        at_root = {"operationId": f"{question.name}_at_root", "tags": ["operations"]}
        found[f"/{question.name}"] = {"post": question.openapi() | at_root}
        found[f"/{{trial_id}}/{question.name}"] = {"post": question.openapi() | {"parameters": [trial]}}
    return found
