"""Environments of verifiers' while they serve: tool servers that tasks share, and what takes in agents' requests.

verifiers keeps an HTTP client for each address that it was ever given, until the environment stops serving, and each trial has
an address of its own. So an environment serves a number of trials, and then another one takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

log = logging.getLogger(__name__)

MOST_TRIALS = 256
"""Of one environment: 0.9 MB for each."""
LINGER_S = 10.0
"""For another trial, before an environment without one stops serving: tool servers take seconds to start."""


class Environments:
    """Lends environments that serve. Args: make: a new one; called in a thread."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._newest: _Serving | None = None
        self._one = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[Any]:
        """One, for a trial. Raises: whatever stopped it from serving."""
        async with self._one:
            if self._newest is None or not self._newest.takes_more:
                self._newest = _Serving(await asyncio.to_thread(self._make))
            serving = self._newest
        async with serving.used() as environment:
            yield environment


class _Serving:
    """One environment. An asyncio task of its own enters and exits its `serving()`: verifiers wants both in the same task."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._begun = self._running = 0
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # seen, if nobody waits
        self._over = asyncio.Event()
        self._closing: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._serve(), name="steno-verifiers")

    @property
    def takes_more(self) -> bool:
        return self._begun < MOST_TRIALS and not self._over.is_set() and not self._task.done()

    @contextlib.asynccontextmanager
    async def used(self) -> AsyncIterator[Any]:
        self._begun, self._running = self._begun + 1, self._running + 1
        if self._closing is not None:
            self._closing.cancel()
        try:
            await asyncio.shield(self._ready)
            yield self._environment
        finally:
            self._running -= 1
            if not self._running:
                linger_s = LINGER_S if self.takes_more else 0.0
                self._closing = self._loop.call_later(linger_s, self._over.set)

    async def _serve(self) -> None:
        try:
            async with self._environment.serving():
                self._ready.set_result(None)
                await self._over.wait()
        except (Exception, SystemExit) as error:  # verifiers leaves so where a login is missing
            if self._ready.done():
                log.warning("verifiers: an environment did not stop serving in order: %s", error, exc_info=True)
            else:
                self._ready.set_exception(OSError(str(error)) if isinstance(error, SystemExit) else error)
        finally:
            if not self._ready.done():  # these rollouts are being ended
                self._ready.cancel()
