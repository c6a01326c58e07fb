"""The same random histories in Redis: the ledger balances (I4), and every answer is the memory store's, also where replicas
of this release and of older ones take turns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.store.redis.store import RedisStore
from tests.support.contracts.lease_history import STEPS, Play, Step, history
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.older_runs import older

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


@pytest.mark.parametrize(
    "seeds", [range(first, first + 5) for first in (100, 200)], ids=lambda seeds: f"from-{seeds[0]}"
)
async def test_replicas_of_both_releases_and_memory_tell_the_same(server: RedisServer, seeds: range) -> None:
    for seed in seeds:
        await _same(server, history(seed, 30 + 20 * (seed % 4)), mixed=True)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
async def test_whatever_happens_they_tell_the_same(server: RedisServer, steps: list[Step]) -> None:
    await _same(server, steps, mixed=True)


async def _same(server: RedisServer, steps: list[Step], *, mixed: bool = False) -> None:
    with server.client() as client:
        client.flushall()
    stores = [RedisStore(server.url, **PATIENT) for _ in range(1 + mixed)]
    if mixed:
        older(stores[1])
    redis, memory = Play(Turns(stores)), Play(MemoryStore())  # type: ignore[arg-type]
    try:
        await redis.run(steps)
    finally:
        for store in stores:
            await store.close()
    await memory.run(steps)
    assert redis.seen == memory.seen


class Turns:
    """Stores that take turns, call by call."""

    def __init__(self, stores: list[RedisStore]) -> None:
        self._stores = cycle(stores)
        self.runs = _Runs(self._stores)

    def __getattr__(self, name: str) -> Any:
        return getattr(next(self._stores), name)


class _Runs:
    def __init__(self, stores: Iterator[RedisStore]) -> None:
        self._stores = stores

    def __getattr__(self, name: str) -> Any:
        return getattr(next(self._stores).runs, name)
