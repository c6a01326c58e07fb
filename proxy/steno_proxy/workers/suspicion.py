"""Decides whether a worker gets new turns after it has sent impossible data (`soundness.py`). Pure; time is an argument.

One bad turn may be its prompt's doing, and so may be all of one trial: a worker is suspect after several turns of several trials.
It does not stay so: while it gets no turns its bad ones are forgotten, a probe of new weights that passes clears it, and a
worker that starts again begins anew.
"""

from __future__ import annotations

from collections import deque

SUSPECT_TURNS = 3
SUSPECT_TRIALS = 2
FORGET_S = 600.0
"""How long a bad turn counts. Seconds."""
_KEPT = 64


class Suspicion:
    """Whether one boot of a worker is suspect at this proxy. reason: what it did last."""

    def __init__(self) -> None:
        self.reason = ""
        self._bad: deque[tuple[float, str]] = deque(maxlen=_KEPT)  # when, and of which trial

    def bad_turn(self, trial_id: str, reason: str, now: float) -> bool:
        """Returns: whether the worker has become suspect by this."""
        before = self.suspect(now)
        self._bad.append((now, trial_id))
        self.reason = reason
        return self.suspect(now) and not before

    def suspect(self, now: float) -> bool:
        bad = self._bad
        while bad and bad[0][0] <= now - FORGET_S:
            bad.popleft()
        return len(bad) >= SUSPECT_TURNS and len({trial_id for _, trial_id in bad}) >= SUSPECT_TRIALS

    def clear(self) -> bool:
        """Returns: whether there was anything to forget."""
        cleared = bool(self._bad)
        self._bad.clear()
        return cleared
