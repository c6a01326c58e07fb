"""The same random histories in Redis: the ledger balances (I4), and every answer is the memory store's."""

from __future__ import annotations

import pytest

from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.store.redis.store import RedisStore
from tests.support.lease_history import Play, Step, history
from tests.support.redis_server import PATIENT, RedisServer

SETTLED_BY_A_LATE_TURN = [
    Step("group", 0, 0), Step("limit", 0, 0), Step("unsettled", 0, 0), Step("late", 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    "seeds", [range(first, first + 8) for first in (0, 8, 16)], ids=lambda seeds: f"from-{seeds[0]}"
)
async def test_redis_and_memory_tell_the_same(server: RedisServer, seeds: range) -> None:
    for seed in seeds:
        await _same(server, history(seed, 30 + 20 * (seed % 4)))


async def test_a_late_turn_tells_the_run_nothing_else(server: RedisServer) -> None:
    await _same(server, SETTLED_BY_A_LATE_TURN)


async def _same(server: RedisServer, steps: list[Step]) -> None:
    with server.client() as client:
        client.flushall()
    store = RedisStore(server.url, **PATIENT)
    redis, memory = Play(store), Play(MemoryStore())
    try:
        await redis.run(steps)
    finally:
        await store.close()
    await memory.run(steps)
    assert redis.seen == memory.seen
