"""One worker in one update: how far it is, and which bytes it lacks. No I/O; time is an argument, in seconds.

A worker says where it stands (`Progress`); this side alone knows what was sent to it and is not
confirmed yet. Both meet in `ShardCursor`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

MemberState = Literal["waiting", "receiving", "ready", "loading", "served", "failed"]
FINAL = ("served", "failed")
FIRST_RETRY_S = 5.0
MOST_RETRY_S = 300.0
"""Seconds between attempts of one worker: FIRST_RETRY_S, doubled each time up to MOST_RETRY_S. A worker that has refused weights
mostly refuses them again, and each attempt reads them all."""
RESEND_S = 10.0
"""Seconds after which bytes that a worker has not confirmed are sent to it again. A loaded disk may take seconds."""


@dataclass(slots=True)
class ShardCursor:
    """Bytes of the one shard that a worker asks for (`stream`).

    confirmed: the next byte it lacks, as it said. sent: the next byte to send. limit: the first byte beyond its credit.
    ends: where each chunk between `confirmed` and `sent` ends.
    """

    shard: str
    confirmed: int
    sent: int
    limit: int
    moved_at: float
    ends: deque[int] = field(default_factory=deque)

    def report(self, offset: int, credit: int, now: float) -> None:
        """Take in the worker's new position on the same shard. If it is below the last one, the worker has lost bytes. If no
        chunk of ours ends there, another proxy sent bytes too, and the worker left out our chunk that overlaps their end."""
        end = self.confirmed
        while self.ends and self.ends[0] <= offset:
            end = self.ends.popleft()
        if offset != end:
            self.sent = offset
            self.ends.clear()
        if offset != self.confirmed:
            self.moved_at = now
        self.confirmed, self.limit = offset, offset + credit

    def advance(self, sent: int, now: float) -> None:
        self.sent, self.moved_at = sent, now
        self.ends.append(sent)

    @property
    def unconfirmed(self) -> bool:
        return self.sent > self.confirmed

    def rewind(self, now: float) -> bool:
        """Send again what was not confirmed in time. Returns whether there is something."""
        if self.unconfirmed and now >= self.moved_at + RESEND_S:
            self.sent, self.moved_at = self.confirmed, now
            self.ends.clear()
            return True
        return False

    def room(self, size: int) -> int:
        """How many bytes of the shard may be sent now. size: of the shard."""
        return max(0, min(self.limit, size) - self.sent)


@dataclass(slots=True)
class UpdateMember:
    """One worker in one update: how far it is, and when it is asked again.

    awaited: the others are not told to load before this one is ready, or has failed, or the deadline has passed.
    lost: it failed because it went away. attempts: failed ones. retry_at: when it is asked again.
    """

    worker_id: str
    awaited: bool
    state: MemberState = "waiting"
    received: int = 0
    cursor: ShardCursor | None = None
    pause_s: float | None = None
    load_s: float | None = None
    error: str | None = None
    lost: bool = False
    attempts: int = 0
    retry_at: float | None = None
    applied_at: float = field(default=0.0)

    @property
    def settled(self) -> bool:
        """Whether the update need not wait for it: it serves the update, or has failed at least once and is not loading now."""
        return self.state in FINAL or (self.attempts > 0 and self.state != "loading")

    def fail(self, error: str, now: float, *, lost: bool = False) -> None:
        self.state, self.error, self.lost, self.cursor, self.retry_at = "failed", error, lost, None, None
        if not lost:
            self.awaited = False
            self.retry_at = now + min(FIRST_RETRY_S * 2**self.attempts, MOST_RETRY_S)
            self.attempts += 1

    def serve(self) -> None:
        self.state, self.error, self.lost, self.cursor = "served", None, False, None
        self.attempts, self.retry_at = 0, None
