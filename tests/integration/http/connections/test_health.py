"""Alive and ready: `/healthz` claims only what it has looked at, `/readyz` says what is wrong with the store."""

from __future__ import annotations

from steno_proxy.store.redis.store import RedisStore
from tests.integration.http.conftest import running
from tests.support.machine.redis_server import PATIENT, RedisServer


async def test_a_proxy_without_its_store_is_alive_and_says_why_it_is_not_ready() -> None:
    redis = RedisServer()
    try:
        async with running(store=RedisStore(redis.url, **PATIENT)) as proxy:
            alive, ready = await proxy.http.get("/healthz"), await proxy.http.get("/readyz")
            assert alive.json().keys() == {"status", "time"} and ready.json()["store"] == "ok"
            redis.kill()
            alive, ready = await proxy.http.get("/healthz"), await proxy.http.get("/readyz")
            assert (alive.status_code, alive.json()["status"]) == (200, "ok")
            assert "store" not in alive.json()
            assert (ready.status_code, ready.json()["status"]) == (503, "store")
            assert "does not answer" in ready.json()["store"]
    finally:
        redis.close()
