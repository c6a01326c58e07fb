"""The launcher's client of the proxy: while the proxy or its store is away, it asks again until they are back, and says so.
Trials that run go on meanwhile, and the end of one that has been scored is not lost.

Once the rollouts are told to stop, a post (`posts.py`) is repeated for half a minute only. So is, at any time, a call that fails
for a reason that waiting may not mend: an archive that can't be read, say. A call that a full store refuses is not repeated: new
groups wait for room (`harness.py`), and trials that run go on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import SecretStr

from steno.client.client import AsyncClient
from steno.client.transport import ClientRequest, repeatable
from steno.contracts.errors import StenoError, StoreFull, StoreUnavailable, TooManyRequests, Unreachable
from steno_rollouts.calls.posts import told_to_stop

T = TypeVar("T")
log = logging.getLogger(__name__)

STOPPING_S = 36.0
"""How long a call is repeated once the rollouts are told to stop, or where waiting may not mend it: eight pauses. Not a number of
attempts: where packets vanish, each of them takes as long."""
AWAY = (Unreachable, StoreUnavailable, TooManyRequests)
"""Of the retryable errors, those that end once somebody is back, or has time."""
PAUSE_S = 8.0
"""The longest between two attempts."""
SAID_AFTER_S = 5.0
"""A call is without an answer for so long before anybody is told."""
SAID_EVERY_S = 60.0


class PatientClient(AsyncClient):
    """An `AsyncClient` whose calls are repeated while the proxy or its store is away, and for half a minute where the same may
    succeed later for another reason."""

    def __init__(
        self,
        base_url: str,
        key: str | SecretStr | None = None,
        *,
        transport: Any = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        patience_s: float = math.inf,
    ) -> None:
        """Args: patience_s: how long a call waits for a proxy or a store that is away; default: without an end."""
        super().__init__(base_url, key, retries=0, transport=transport)
        self._clock = clock
        self._sleep = sleep
        self._patience_s = patience_s
        self._said_at: float | None = None

    async def _send(self, request: ClientRequest[T]) -> T:
        began, failed = self._clock(), 0
        while True:
            try:
                answer = await super()._send(request)
            except StenoError as error:
                failed, lasted_s = failed + 1, self._clock() - began
                if isinstance(error, StoreFull) or not error.retryable or not repeatable(request):
                    raise
                bounded = told_to_stop() or not isinstance(error, AWAY)
                if lasted_s >= (min(STOPPING_S, self._patience_s) if bounded else self._patience_s):
                    raise
                self._say(error, lasted_s)
                await self._sleep(min((error.retry_after_s or 1.0) * failed, PAUSE_S))
                continue
            if self._said_at is not None and failed:
                self._said_at = None
                log.warning("the proxy answers again, after %.0f s", self._clock() - began)
            return answer

    def _say(self, error: StenoError, for_s: float) -> None:
        """Once for all calls that wait, and again each minute."""
        now = self._clock()
        if for_s >= SAID_AFTER_S and (self._said_at is None or now - self._said_at >= SAID_EVERY_S):
            self._said_at = now
            log.warning("asking the proxy again (for %.0f s now): %s", for_s, error.message)
