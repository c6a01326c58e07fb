"""Writes that replicas have as well before anybody is told of them (I3), so that a failover loses none: Redis's WAIT.

WAIT counts the replicas that have what its own connection wrote last. So it follows the write on the same connection, to the same
node. A write that is said again changes nothing, and since Redis 7.2 WAIT would then wait for nothing: hence the mark, which
is always written, and which a replica has only if it has all that the primary did before.

Where too few answer in time, the write is there, on too few: it may be said again, which is what a retry does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from proxy.store.keys import WAITED, waited_key

MARK_MS = 1000
"""How long the mark is kept. It says nothing to anybody."""


class NotReplicated(RedisError):
    """A write is on fewer replicas than asked for."""


class Wait(NamedTuple):
    """replicas: how many must have each write. timeout_s: for as long as that is waited for."""

    replicas: int
    timeout_s: float

    def commands(self, key: str | None = None) -> list[tuple[Any, ...]]:
        """What follows the writes. key: one of theirs, in a cluster: the mark goes to its slot."""
        mark = WAITED if key is None else waited_key(key)
        return [("SET", mark, b"", "PX", MARK_MS), ("WAIT", self.replicas, max(1, round(self.timeout_s * 1000)))]

    def short_of(self, replies: Sequence[Any]) -> NotReplicated | None:
        """Whether the replies, which end with those to `commands`, say too little."""
        marked, have = replies[-2:]
        for reply in (marked, have):
            if isinstance(reply, Exception):
                return NotReplicated(f"replicas could not be waited for: {reply}")
        if have < self.replicas:
            return NotReplicated(f"{have} of {self.replicas} replicas have it")
        return None
