"""A clock that a test sets forward, in the place of the module `time`."""

from __future__ import annotations

import time


class ClockAhead:
    """by_s: seconds that it is ahead of the real one."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.by_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.by_s
