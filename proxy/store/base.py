"""What the proxy asks of its memory: the `SessionStore` protocol. `memory.py` and `redis.py` keep it; one suite tests both.

Every method is atomic. A write that returns is durable to the degree the backing store promises (I3). Methods raise
`NotFound`, `Gone`, `Conflict` or `StoreUnavailable` and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, Protocol

from proxy.contracts.records import Counts, Group, Session, Turn


class ChainEntry(NamedTuple):
    """Where a chain hash was recorded. `turn_id`: the turn whose conversation contains this prefix of messages.

    ends_turn: the prefix ends with that turn's own reply (so its tokens can be continued); otherwise it ends inside the
    messages that the turn's request brought.
    """

    turn_id: str
    ends_turn: bool


class Page(NamedTuple):
    items: list[Session]
    next_cursor: str | None


class SessionStore(Protocol):
    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def ping(self) -> None:
        """Raises StoreUnavailable."""

    # -- groups and sessions
    async def create_group(self, group: Group, sessions: Sequence[Session]) -> Group:
        """Create a group and its sessions. The same group again returns the recorded one; a different one is Conflict."""
        ...

    async def group(self, group_id: str) -> Group: ...
    async def register(self, session: Session) -> Session:
        """Create the session if there is none; return the recorded one. Deleted (tombstone): Gone."""
        ...

    async def session(self, trial_id: str) -> Session:
        """NotFound; Gone when deleted."""
        ...

    async def list_sessions(
        self, *, status: str | None, group_id: str | None, since: float | None, until: float | None,
        cursor: str | None, limit: int,
    ) -> Page:
        """By creation time, oldest first. Cursor is opaque and stable under concurrent inserts."""
        ...

    async def complete(
        self, trial_id: str, *, status: str, reward: float | None, end_reason: str, metrics: dict[str, float], now: float
    ) -> Session:
        """Freeze. The same values again change nothing; another reward or status is Conflict. Deleted: Gone."""
        ...

    async def delete(self, trial_id: str, *, now: float, tombstone_s: float) -> None:
        """Remove everything, leave a tombstone. Idempotent. NotFound if there never was one."""
        ...

    async def expire(self, *, now: float, retention_s: float) -> int:
        """Drop ended sessions older than retention_s; returns how many. Safe to call from several replicas."""
        ...

    # -- the recording
    async def find_chain(self, trial_id: str, hashes: Sequence[bytes]) -> list[list[ChainEntry]]:
        """For each chain hash (16 bytes) the turns recorded under it, oldest first; an empty list where none."""
        ...

    async def commit(self, trial_id: str, turn: Turn, chain: Sequence[tuple[bytes, bool]], *, now: float) -> Session:
        """Append a turn, one atomic write (I3): the turn, its messages (stored once each), the chain entries
        (hash, ends_turn) that it adds, the session's counts. Sets `turn.index`. The same turn_id again changes nothing.
        Gone when the session is not open, unless the turn is partial and the session was frozen (then it is kept)."""
        ...

    async def mark_delivered(self, trial_id: str, turn_id: str, delivered: int) -> None: ...
    async def add_marks(self, trial_id: str, marks: Sequence[str]) -> None: ...
    async def turn(self, trial_id: str, turn_id: str) -> Turn: ...
    async def turns(self, trial_id: str, *, start: int = 0, limit: int | None = None) -> list[Turn]:
        """In commit order, whole: messages and tools are put back from where they are stored once."""
        ...

    async def path_ids(self, trial_id: str, turn_id: str) -> bytes:
        """Prompt + completion ids of a turn, ancestors included, int32 LE: what a continuation begins with (I2)."""
        ...

    async def path_replies(self, trial_id: str, turn_id: str) -> list[Turn]:
        """The turns from the root to `turn_id`, token arrays left empty: replies, call ids, message counts."""
        ...

    # -- what watchers see
    def events(self, trial_id: str, *, after: str | None = None) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Live events (cursor, {"type", …}) of a session, from `after` on, until it ends."""
        ...

    async def stats(self) -> dict[str, Any]:
        """For metrics and `steno doctor`: backend, sessions by status, bytes where known."""
        ...


__all__ = ["ChainEntry", "Counts", "Page", "SessionStore"]
