"""Writes that replicas have as well before anybody is told of them (I3), so that a failover loses none: Redis's WAIT.

WAIT counts the replicas that have what its own connection wrote last. So it follows the write on the same connection, to the same
node. A repeated write changes nothing, and since Redis 7.2 WAIT would then wait for nothing. So a mark is always written before
WAIT: a replica that has the mark also has all that the primary wrote before it.

If too few replicas answer in time, the primary has the write, and too few replicas have it: a retry may repeat the write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.asyncio import RedisCluster
from redis.asyncio.cluster import PipelineCommand
from redis.exceptions import AskError, ConnectionError, RedisError, TimeoutError, TryAgainError

from steno_proxy.store.redis.schema import WAITED, waited_key

MARK_MS = 1000
"""How long the mark is kept. It holds no data."""
_MARK = "#!lua flags=allow-oom\nreturn redis.call('SET', KEYS[1], '', 'PX', ARGV[1])"
"""A script, since a full Redis refuses SET, and what makes room there is waited for as well."""
ATTEMPTS = 3
"""Enough for a dead connection and then a slot that has moved. A repeated write changes nothing."""


class NotReplicated(RedisError):
    """A write is on fewer replicas than asked for."""


class ReplicaWait(NamedTuple):
    """How each write waits for replicas. replicas: how many must have each write. timeout_s: the longest wait for them."""

    replicas: int
    timeout_s: float

    def commands(self, key: str | None = None) -> list[tuple[Any, ...]]:
        """The commands to send after the writes. key: in a cluster, the key of a write: the mark goes to its slot."""
        mark = WAITED if key is None else waited_key(key)
        return [("EVAL", _MARK, 1, mark, MARK_MS), ("WAIT", self.replicas, max(1, round(self.timeout_s * 1000)))]

    def short_of(self, replies: Sequence[Any]) -> NotReplicated | None:
        """The error if too few replicas have the writes, else None. The last replies are those to `commands`."""
        marked, have = replies[-2:]
        for reply in (marked, have):
            if isinstance(reply, Exception):
                return NotReplicated(f"WAIT failed: {reply}")
        if have < self.replicas:
            return NotReplicated(f"{have} replicas have the write, {self.replicas} are required (redis_wait_replicas)")
        return None


async def write_and_wait(client: RedisCluster, key: str, command: tuple[Any, ...], wait: ReplicaWait) -> Any:
    """One write in a cluster, on one connection to one node, so that WAIT speaks of it: redis-py's pipeline sends what was
    redirected again, each command by itself, and WAIT might then count at another node than the write's.

    Returns: the command's reply, once replicas have what it wrote.
    Raises: RedisError: the command's own, NotReplicated.
    """
    for attempt in range(ATTEMPTS):
        await client.initialize()
        sent = [PipelineCommand(number, *one) for number, one in enumerate([command, *wait.commands(key)])]
        try:
            node = client.get_node_from_key(key)
            assert node is not None  # of a slot that nobody has, it raises
            await node.execute_pipeline(sent)
            reply = sent[0].result
        except ConnectionError as error:
            reply = error
        if isinstance(reply, TimeoutError):
            await client.aclose()  # it may be another node's by now: the next call asks who has it
        if isinstance(reply, (AskError, TryAgainError, ConnectionError)) and attempt + 1 < ATTEMPTS:
            await client.exists(key)  # is sent where the slot is now, and the client remembers
            continue
        if isinstance(reply, Exception):
            raise reply
        short = wait.short_of([one.result for one in sent])
        if short is not None:
            raise short
        return reply
    raise AssertionError("the last attempt returns or raises")
