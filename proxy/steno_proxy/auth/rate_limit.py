"""Limits the request rate and the concurrent requests of a trial, in this process. Replicas do not share counts.

Two numbers per trial and no timer: the time at which its bucket will be full again (GCRA, as in ATM's traffic contracts), and how
many of its requests run. Trials that ask for nothing are forgotten, so memory follows those that are at work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b

from steno.contracts.errors import TooManyRequests

SWEEP_AT = 1024
"""Trials held before the idle ones among them are looked for; then again at twice what was left."""

MOST_REFUSED = 64
"""The most refused requests remembered per trial. With so many, the body of a further refused request is not read."""
MOST_TRIALS = 4096
"""Trials of which refused requests are remembered; the one that began first is forgotten for another."""
REFUSED_S = 900.0
"""How long they are remembered. Seconds; as long as a turn can be what a marked retry repeats."""


class _Trial:
    __slots__ = ("full_at", "running")

    def __init__(self) -> None:
        self.full_at = 0.0
        self.running = 0


class RateLimiter:
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
        self.refused = RefusedRequests(clock)

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
            raise TooManyRequests(f"this trial has {self._streams} requests in flight, the maximum (trial_streams)")
        if self._interval_s:
            now = self._clock()
            full_at = max(trial.full_at, now) + self._interval_s
            if full_at - now > self._burst_s + 1e-9:  # of rounding
                wait_s = full_at - now - self._burst_s
                raise TooManyRequests(
                    f"this trial sends more than {1 / self._interval_s:g} requests a second (trial_requests_per_s)",
                    retry_after_s=wait_s,
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


class RefusedRequests:
    """Digests of requests that were refused before they were parsed. An SDK sends such a request again, marked as a retry, but it
    repeats no recorded one: it must not get the answer of an identical sibling. Each digest counts for one retry."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trials: dict[str, deque[tuple[float, bytes]]] = {}

    def has_room(self, trial_id: str) -> bool:
        return len(self._noted(trial_id)) < MOST_REFUSED

    def note(self, trial_id: str, digest: bytes) -> None:
        """digest: of its body (`body_digest`)."""
        if trial_id not in self._trials and len(self._trials) >= MOST_TRIALS:
            del self._trials[next(iter(self._trials))]
        noted = self._trials.setdefault(trial_id, deque(maxlen=MOST_REFUSED))
        noted.append((self._clock() + REFUSED_S, digest))

    def take(self, trial_id: str, body: bytes) -> bool:
        """Whether a refused request with this body is remembered; forgets one such."""
        noted, wanted = self._noted(trial_id), body_digest(body).digest()
        found = next((one for one in noted if one[1] == wanted), None)
        if found is None:
            return False
        noted.remove(found)
        if not noted:
            del self._trials[trial_id]
        return True

    def _noted(self, trial_id: str) -> deque[tuple[float, bytes]]:
        """What is remembered of a trial, without what has had its time."""
        noted, now = self._trials.get(trial_id), self._clock()
        while noted and noted[0][0] <= now:
            noted.popleft()
        if not noted:
            self._trials.pop(trial_id, None)
        return noted or deque()


def body_digest(body: bytes = b"") -> blake2b:
    return blake2b(body, digest_size=16)
