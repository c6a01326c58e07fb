"""Lets a thread wait for coroutines of an event loop, in calls that the event loop can cancel.

Owns the link between a call that runs in the thread and the coroutine that it waits for. One thread runs the calls, one at a
time; cancelling a call cancels its coroutine, so that the thread is free for the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class _ThreadCall:
    def __init__(self) -> None:
        self.cancelled = False
        self.waits_for: Future[Any] | None = None

    def cancel(self) -> None:
        self.cancelled = True
        if self.waits_for is not None:
            self.waits_for.cancel()


class Waits:
    """Of one thread, for coroutines in `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._call = _ThreadCall()  # the one that the thread runs

    async def run(self, thread: Executor, function: Callable[..., T], *args: Any) -> T:
        """`function` in the thread, from the event loop. Cancelled, it leaves the thread to others at once."""
        call = _ThreadCall()
        try:
            return await self._loop.run_in_executor(thread, self._run, call, function, args)
        except asyncio.CancelledError:
            call.cancel()
            raise

    def result_of(self, work: Coroutine[Any, Any, T]) -> T:
        """In the thread. Raises: what `work` raises; CancelledError (of `concurrent.futures`): the call was cancelled."""
        call = self._call
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        call.waits_for = future
        if call.cancelled:  # looked at after the future is there for `cancel` to see
            future.cancel()
        return future.result()

    def _run(self, call: _ThreadCall, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        if call.cancelled:
            raise CancelledError
        self._call = call
        try:
            return function(*args)
        finally:
            self._call = _ThreadCall()
