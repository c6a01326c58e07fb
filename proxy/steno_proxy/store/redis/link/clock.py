"""What time it is by Redis's clock, without a call for each time that is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable

from steno_proxy.store.redis.link.redis_link import RedisLink

_STEADY = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
"""A clock of this machine that nobody sets, and that counts the time for which it was suspended. None: Windows, where
`time.monotonic` does."""

DRIFT_S = 1.0
"""A change of less between two answers is no clock that was set: two clocks drift apart by a minute in some weeks."""


def _steady() -> float:
    return time.monotonic() if _STEADY is None else time.clock_gettime(_STEADY)


class RedisClock:
    """Unix seconds by Redis's clock. Replicas stamp by it what they record: one whose own clock is wrong stamps as the others do.
    Between two answers of Redis it goes on by a clock of this machine that nobody sets; before the first, it says what this
    machine's clock said when it was made.

    Args: link: to ask Redis. steady: seconds since any moment.
    """

    def __init__(self, link: RedisLink, steady: Callable[[], float] = _steady) -> None:
        self._link = link
        self._steady = steady
        self._ahead_s = time.time() - steady()  # how far Redis's clock is ahead of `steady`
        self._least_s: float | None = None  # the least that it was, drift left out; None: Redis has not answered

    def now(self) -> float:
        return self._steady() + self._ahead_s

    def earliest(self) -> float:
        """The time by Redis's clock as it was before it was set forward, or before a Redis whose clock is ahead took over: what
        was stamped then is as old by it as it is."""
        return self._steady() + (self._ahead_s if self._least_s is None else self._least_s)

    async def ask(self) -> float:
        """Redis's time. If `now` can't be right, it follows. How long the answer took to come back is unknown, so an answer that
        `now` agrees with changes nothing: else times would jump to and fro.

        Raises: StoreUnavailable."""
        before = self._steady()
        seconds, micros = await self._link.call(self._link.client.time())
        there = float(seconds) + float(micros) / 1e6
        least, most, known = there - self._steady(), there - before, self._ahead_s
        if not least <= known <= most:
            self._ahead_s = (least + most) / 2
        if self._least_s is None:
            self._least_s = self._ahead_s
        elif abs(self._ahead_s - known) < DRIFT_S:
            self._least_s += self._ahead_s - known
        self._least_s = min(self._least_s, self._ahead_s)
        return there
