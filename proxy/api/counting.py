"""Endpoints that count a prompt's tokens (`countTokens`, `count_tokens`): asked of a worker, never recorded.

Needs no session: a trial's key opens it, and it leaves no trace in the trial. The prompt is rendered whole.
"""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar, Protocol

from starlette.types import Receive, Scope, Send

from proxy import logs, metrics
from proxy.api.agent_http import ID_HEADERS, HttpClient, check_trial_id, read_body, refusal_headers
from proxy.contracts.canonical import Job
from proxy.contracts.errors import StenoError
from proxy.hub import Hub
from proxy.keys import Keyring, key_of
from proxy.rates import Rates

log = logging.getLogger(__name__)


class Counter(Protocol):
    """What of a wire format counting needs. `name`: the dialect's."""

    name: ClassVar[str]

    def parse_count(self, body: bytes) -> Job:
        """Raises: BadRequest with the dotted path of the field to blame."""
        ...

    def count_answer(self, tokens: int) -> bytes: ...
    def error(self, error: StenoError, request_id: str = "") -> bytes: ...
    def openapi(self) -> dict[str, Any]: ...


class Counting:
    """The ASGI endpoint of one counter."""

    def __init__(
        self, counter: Counter, hub: Hub, keys: Keyring, *, max_body_bytes: int, body_timeout_s: float, rates: Rates
    ) -> None:
        self._counter = counter
        self._hub = hub
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trial_id = scope["path_params"]["trial_id"]
        request_id = os.urandom(8).hex()
        logs.bind(trial_id, request_id)
        named = ID_HEADERS.get(self._counter.name, (b"x-request-id",))
        client = HttpClient(send, request_id.encode(), named=named)
        try:
            await client.answer(await self._count(trial_id, scope, receive))
        except StenoError as error:
            await self._refuse(client, error, request_id)
        except Exception:
            log.exception("a count failed in a way that was not foreseen")
            await self._refuse(client, StenoError(f"internal error; the log has request {request_id}"), request_id)
        finally:
            metrics.REQUESTS.labels(f"{self._counter.name}_count", str(client.status)).inc()

    async def _count(self, trial_id: str, scope: Scope, receive: Receive) -> bytes:
        check_trial_id(trial_id)
        await self._keys.check_current(key_of(scope["headers"]), trial_id)
        self._rates.enter(trial_id)
        try:
            return await self._answer(trial_id, scope, receive)
        finally:
            self._rates.leave(trial_id)

    async def _answer(self, trial_id: str, scope: Scope, receive: Receive) -> bytes:
        body = await read_body(scope, receive, max_bytes=self._max_body_bytes, timeout_s=self._body_timeout_s)
        job = self._counter.parse_count(body)
        return self._counter.count_answer(await self._hub.count(trial_id, job))

    async def _refuse(self, client: HttpClient, error: StenoError, request_id: str) -> None:
        await client.respond(error.status, self._counter.error(error, request_id), refusal_headers(error))
