"""A timeout that counts the time of the other side, not the time that this process's event loop was busy.

A reply that has come lies in its socket until the event loop looks there. While the loop is held (a large request), a timer runs
out all the same, and before sockets are read: a Redis that answered at once would pass for silent, and requests fail.
So the time is counted in steps, and the last of them must be one after which the loop came back on time.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

STEPS = 8
LATE_S = 0.05
"""A timer that is later than this was held up by the loop."""


class LoopTimeout:
    """As `asyncio.timeout(timeout_s)`. Where the loop was held, up to twice as long, and as much longer as it was held.

    Raises TimeoutError on exit. Not to be used twice.
    """

    __slots__ = ("_cancelling", "_due", "_expired", "_left", "_more", "_step_s", "_task", "_timer")

    def __init__(self, timeout_s: float) -> None:
        self._step_s = timeout_s / STEPS
        self._left = STEPS
        self._more = STEPS
        self._due = 0.0
        self._expired = False
        self._cancelling = 0
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._arm()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._expired:
            assert self._task is not None
            if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + self._step_s
        self._timer = loop.call_at(self._due, self._step)

    def _step(self) -> None:
        late = asyncio.get_running_loop().time() - self._due > LATE_S
        self._left -= 1
        if self._left <= 0 and late and self._more:
            self._left, self._more = 1, self._more - 1
        if self._left > 0:
            self._arm()
            return
        self._timer = None
        self._expired = True
        assert self._task is not None
        self._task.cancel()
