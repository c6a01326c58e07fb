"""Endpoints that count a prompt's tokens (`countTokens`, `count_tokens`): asked of a worker, never recorded.

Needs no session: a trial's key opens it, and it leaves no trace in the trial. The prompt is rendered whole.
"""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar, Protocol

from starlette.types import Receive, Scope, Send

from proxy import logs, metrics
from proxy.api.agent_http import ID_HEADERS, Bodies, HttpClient, check_trial_id, refusal_headers
from proxy.contracts.canonical import Job
from proxy.contracts.errors import StenoError
from proxy.hub import Hub
from proxy.inflight import Hold
from proxy.keys import Keyring, key_of
from proxy.pace import LARGE_BYTES
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

    def __init__(self, counter: Counter, hub: Hub, keys: Keyring, *, bodies: Bodies, rates: Rates) -> None:
        self._counter = counter
        self._hub = hub
        self._keys = keys
        self._bodies = bodies
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
        hold = self._bodies.inflight.hold(trial_id)
        try:
            job = await self._job(scope, receive, hold)
            return self._counter.count_answer(await self._hub.count(trial_id, job))
        finally:
            hold.close()
            self._rates.leave(trial_id)

    async def _job(self, scope: Scope, receive: Receive, hold: Hold) -> Job:
        body = await self._bodies.read(scope, receive, hold)
        job = await self._bodies.parsed(self._counter.parse_count, body, lambda job: job)
        if len(body) >= LARGE_BYTES:
            await self._bodies.pace.turn()  # it goes to a worker next
        return job

    async def _refuse(self, client: HttpClient, error: StenoError, request_id: str) -> None:
        await client.respond(error.status, self._counter.error(error, request_id), refusal_headers(error))
