"""Requests that clients send again, as a store in this process remembers them. `lua/again.lua` and `commit.lua` do so in Redis.

What a retry repeats may run at another replica with nothing on record. So a retry is noted when it comes, before anybody looks
for what it repeats: a turn that is on record by then is found there, and one that comes on record later finds the note. Whichever
of the two turns is recorded second sees the first, and the earlier request's is superseded by the retry's.

A place is one choice of one request: equal requests of a trial have equal places. Times are Unix seconds; entries and
refusals are dropped with their session, or RETRY_MEMORY_S after the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from steno_proxy.store.interface import RetryKey

REFUSED_S = 900.0
"""How long after a refusal a request can be its retry. Seconds; as `retry_matching.WINDOW_S`."""
RETRY_MEMORY_S = 3600.0
"""How long after the last retry of a trial any of them is remembered: no attempt runs longer beside its retry. Seconds."""
MOST_REFUSALS = 4096
"""Per trial, within RETRY_MEMORY_S of each other. Those that come after are not remembered: what a hostile agent can have written
here is bounded."""
MOST_RETRIES = 16
"""Per place; the oldest go first. SDKs try three times or so."""
MOST_PLACES = 16384
"""About how many places of a trial have their retries noted. Retries of further places are not noted: for other replicas each
is a sibling. A hostile agent marks everything as a retry; an honest one does not come near."""


def place(retry_key: RetryKey, choice: int) -> bytes:
    """The key of one choice of a request: 17 bytes."""
    return retry_key.key + bytes((choice,))


@dataclass(slots=True)
class _WaitingRetry:
    """A turn on record that a retry which is not on record yet may supersede. again: it is a retry itself."""

    turn_id: str
    partial: bool
    again: bool


@dataclass(slots=True)
class _Retry:
    """began: when it was received, which tells it from others. count: how often its client had asked before. turn_id: once it is
    on record. found: what it repeats was on record when it came; then only earlier retries can have run beside it.
    took: another turn has been found to be what it repeats."""

    began: float
    count: int
    turn_id: str = ""
    found: bool = False
    took: bool = False
    waiting: list[_WaitingRetry] = field(default_factory=list)


class TrialRetries:
    """The retries and the refused requests of one trial."""

    __slots__ = ("_refusals", "_refused", "_retries", "_until")

    def __init__(self) -> None:
        self._refused: dict[bytes, list[float]] = {}
        self._refusals = 0
        self._retries: dict[bytes, list[_Retry]] = {}
        self._until = 0.0

    def refused(self, key: bytes, *, began: float, now: float) -> None:
        """See `SessionStore.refused`."""
        self._expire(now)
        if any(retry.began > began for retry in self._retries.get(key + b"\0", ())):
            return
        self._refusals += 1
        if self._refusals <= MOST_REFUSALS:
            self._refused.setdefault(key, []).append(now)

    def came(self, key: bytes, *, began: float, count: int, n: int, now: float) -> bool:
        """See `SessionStore.asked_again`."""
        self._expire(now)
        if times := self._refused.get(key):
            refused_at = times.pop()
            if not times:
                del self._refused[key]
            if now - refused_at < REFUSED_S:
                return True
        if key + b"\0" not in self._retries and len(self._retries) + n > MOST_PLACES:
            return False
        for choice in range(n):
            retries = self._retries.setdefault(key + bytes((choice,)), [])
            retries.append(_Retry(began, count))
            del retries[:-MOST_RETRIES]
        return False

    def recorded(
        self, retry_key: RetryKey, choice: int, turn_id: str, began: float, *, partial: bool, superseded: dict[str, str]
    ) -> list[tuple[str, str]]:
        """A turn comes on record. Returns which turn is superseded by which from now on: (earlier, later).

        Args: superseded: those that are already.
        """
        retries = self._retries.get(place(retry_key, choice), [])
        mine = next((retry for retry in retries if retry.began == began), None)
        found: list[tuple[str, str]] = []
        if mine is not None:
            mine.turn_id, mine.found = turn_id, retry_key.found
            waiting = [
                one for one in mine.waiting if one.turn_id not in superseded and (one.again or not retry_key.found)
            ]
            earlier = [one for one in waiting if one.again]
            first = [one for one in waiting if not one.again and one.partial] or [o for o in waiting if not o.again]
            mine.took, mine.waiting = bool(first), []
            found += [(one.turn_id, turn_id) for one in [*earlier, *first[:1]]]
        by = self._later(retries, mine, turn_id, began, partial)
        return [*found, (turn_id, by)] if by else found

    def _later(self, retries: list[_Retry], mine: _Retry | None, turn_id: str, began: float, partial: bool) -> str:
        """The recorded turn of a later retry that supersedes this turn; "": there is none. Later retries that are not on record
        yet note this turn in `waiting`."""
        by = ""
        for retry in retries:
            if retry is mine or retry.began <= began or (mine is not None and retry.count <= mine.count):
                continue
            if not retry.turn_id:
                retry.waiting.append(_WaitingRetry(turn_id, partial, mine is not None))
            elif not by and (mine is not None or not (retry.took or retry.found)):
                by = retry.turn_id
                retry.took = retry.took or mine is None
        return by

    def _expire(self, now: float) -> None:
        if self._until < now:
            self._refused.clear()
            self._refusals = 0
            self._retries.clear()
        self._until = now + RETRY_MEMORY_S
