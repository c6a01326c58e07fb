"""One write in a cluster, on one connection to one node, so that WAIT speaks of it.

redis-py's pipeline sends what was redirected again, each command by itself: WAIT might then
count at another node than the write's.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import RedisCluster
from redis.asyncio.cluster import PipelineCommand
from redis.exceptions import AskError, ConnectionError, TimeoutError, TryAgainError

from proxy.store.redis_wait import Wait

ATTEMPTS = 3
"""A dead connection, then a slot that has moved; what is said twice changes nothing more."""


async def write_and_wait(client: RedisCluster, key: str, command: tuple[Any, ...], wait: Wait) -> Any:
    """The command's reply, once replicas have what it wrote.

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
