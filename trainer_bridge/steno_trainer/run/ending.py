"""How a trainer ends in good time, whatever it waits for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any

logger = logging.getLogger(__name__)

ENDING_S = 10.0
"""Longest time for all last calls to the proxy once the trainer is to end: the operator waits, and a proxy that is away learns
the rest from the next start."""


class Ending:
    """The end of a trainer. wanted: set once the trainer is to end, after the step that runs."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self._failure: BaseException | None = None
        self._left_s = ENDING_S

    def fail(self, error: BaseException) -> None:
        """End the trainer with this error, unless it is to end with another one already."""
        self._failure = self._failure or error
        self.wanted.set()

    def ended(self, task: asyncio.Task[Any]) -> None:
        """For a task that works beside the loop: if it has failed, so has the loop."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def check(self) -> None:
        """Raises: what it is to end with."""
        if self._failure is not None:
            raise self._failure

    async def unless_ending(self, wait: Awaitable[Any]) -> Any:
        """Returns: what is awaited; None once the trainer is to end: what was waited for is cancelled then."""
        waiting = asyncio.ensure_future(wait)
        stopping = asyncio.create_task(self.wanted.wait())
        try:
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            waiting.cancel()
            await self._while_ending(waiting)
            return None
        finally:
            for task in (waiting, stopping):
                task.cancel()

    async def patiently(self, told: Awaitable[Any]) -> None:
        """Await a call to the proxy or to workers: to its end, or for what is left of `ENDING_S` once the trainer is to end."""
        telling = asyncio.ensure_future(told)
        stopping = asyncio.create_task(self.wanted.wait())
        try:
            await asyncio.wait({telling, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await self._while_ending(telling)
            if telling.done():
                telling.result()
            else:
                logger.warning("the proxy does not answer, and this trainer stops: its next start will report the rest")
        finally:
            for task in (telling, stopping):
                task.cancel()

    async def _while_ending(self, task: asyncio.Future[Any]) -> None:
        """Wait until the task is done, for as long as is left of `ENDING_S`."""
        if not task.done():
            since = time.monotonic()
            await asyncio.wait({task}, timeout=self._left_s)
            self._left_s = max(0.0, self._left_s - (time.monotonic() - since))
