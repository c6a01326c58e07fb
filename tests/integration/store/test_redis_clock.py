"""Leases are timed by Redis, which all replicas share: a replica whose clock is wrong grants what others do."""

from __future__ import annotations

import time

import pytest

from proxy import leasing
from proxy.contracts.leases import LeaseRequest
from proxy.store.redis import RedisStore
from tests.support.groups import RUN, finished
from tests.support.redis_server import RedisServer


async def stays() -> bool:
    return False


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
async def test_a_replica_whose_clock_is_wrong_leases_for_as_long_as_others(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    await finished(store, "g", now=time.time())
    right = time.time
    with server.client() as client, monkeypatch.context() as wrong:
        wrong.setattr(time, "time", lambda: right() + ahead_s)
        before = client.time()[0]
        request = LeaseRequest(run_id=RUN, consumer="t", ttl_s=600.0)
        [one] = await leasing.lease(store.runs, request, stays)
        longer = await store.runs.extend(one.lease_id, 900.0)
    assert before + 600.0 <= one.expires_at <= before + 600.0 + 60
    assert before + 900.0 <= longer <= before + 900.0 + 60
    assert await leasing.lease(store.runs, request, stays) == [], "it is held, whoever asks"
