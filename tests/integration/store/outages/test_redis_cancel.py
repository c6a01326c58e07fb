"""Who is cancelled while Redis answers ends: a proxy that is told to stop waits for all who speak to it."""

from __future__ import annotations

import asyncio
import random

import uvloop

from steno_proxy.store.redis.store import RedisStore
from tests.support.machine.redis_server import PATIENT, RedisServer


def test_a_cancellation_is_never_lost(server: RedisServer) -> None:
    """On the proxy's own event loop. Of a thousand some came in the one moment in which it was."""

    async def ask_on(store: RedisStore) -> None:
        while True:
            await store.expire(now=1.0, retention_s=1e9)

    async def run() -> None:
        store = RedisStore(server.url, **PATIENT)
        await store.open()
        dice = random.Random(1)
        for _ in range(1000):
            asking = asyncio.create_task(ask_on(store))
            await asyncio.sleep(dice.random() * 0.003)
            asking.cancel()
            _, left = await asyncio.wait({asking}, timeout=30)
            for task in left:
                task.cancel()
            assert not left
        await store.close()

    uvloop.run(run())
