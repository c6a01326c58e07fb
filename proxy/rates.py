"""How often, and how many times at once, a trial may ask. Of this process: replicas do not tell each other.

Two numbers per trial and no timer: the time at which its bucket will be full again (GCRA, as in ATM's traffic contracts), and how
many of its requests run. Trials that ask for nothing are forgotten, so memory follows those that are at work.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from proxy.contracts.errors import TooManyRequests

SWEEP_AT = 1024
"""Trials held before the idle ones among them are looked for; then again at twice what was left."""


class _Trial:
    __slots__ = ("full_at", "running")

    def __init__(self) -> None:
        self.full_at = 0.0
        self.running = 0


class Rates:
    """Args:
    per_s: requests a second that a trial may go on with; None: any.
    burst: requests that it may be ahead of that, at least 1.
    streams: of its requests that may be in flight at the same time; None: any.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        per_s: float | None = None,
        burst: int = 1,
        streams: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s = 1.0 / per_s if per_s else 0.0
        self._burst_s = burst * self._interval_s
        self._streams = streams
        self._clock = clock
        self._asked_for = per_s is not None or streams is not None
        self._trials: dict[str, _Trial] = {}
        self._sweep_at = SWEEP_AT

    def __len__(self) -> int:
        return len(self._trials)

    def enter(self, trial_id: str) -> None:
        """One more request, which `leave` ends. One that is refused counts for nothing.

        Raises: TooManyRequests, with the seconds after which it would be let in; of streams, which end when they end, the least.
        """
        if not self._asked_for:
            return
        trial = self._trials.get(trial_id)
        if trial is None:
            if len(self._trials) >= self._sweep_at:
                self._sweep()
            trial = self._trials[trial_id] = _Trial()
        if self._streams is not None and trial.running >= self._streams:
            raise TooManyRequests(f"this trial has {self._streams} requests in flight, as many as it may")
        if self._interval_s:
            now = self._clock()
            full_at = max(trial.full_at, now) + self._interval_s
            if full_at - now > self._burst_s + 1e-9:  # of rounding
                wait_s = full_at - now - self._burst_s
                raise TooManyRequests(
                    f"this trial asks more often than {1 / self._interval_s:g} times a second", retry_after_s=wait_s
                )
            trial.full_at = full_at
        trial.running += 1

    def leave(self, trial_id: str) -> None:
        if self._asked_for:
            self._trials[trial_id].running -= 1

    def _sweep(self) -> None:
        now = self._clock()
        self._trials = {name: trial for name, trial in self._trials.items() if trial.running or trial.full_at > now}
        self._sweep_at = max(SWEEP_AT, 2 * len(self._trials))
