"""Leases and deadlines are timed by Redis, which all replicas share: one whose clock is wrong does as the others do."""

from __future__ import annotations

import time

import pytest

from steno.contracts.runs.leases import LeaseRequest
from steno_proxy.api import lease_wait
from steno_proxy.store.redis.schema import run_keys
from steno_proxy.store.redis.store import RedisStore
from tests.integration.http.conftest import running
from tests.support.machine.redis_server import RedisServer
from tests.support.records.groups import RUN, finished


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
        [one] = await lease_wait.lease(store.runs, request, stays)
        longer = await store.runs.extend(one.lease_id, 900.0)
    assert before + 600.0 <= one.expires_at <= before + 600.0 + 60
    assert before + 900.0 <= longer <= before + 900.0 + 60
    assert await lease_wait.lease(store.runs, request, stays) == [], "it is held, whoever asks"


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
async def test_a_group_made_by_a_replica_whose_clock_is_wrong_is_due_as_by_others(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    right = time.time
    async with running(store=store) as proxy:
        with server.client() as client, monkeypatch.context() as wrong:
            wrong.setattr(time, "time", lambda: right() + ahead_s)
            before = client.time()[0]
            spec = {"group_id": "g", "run_id": RUN, "size": 1, "deadline_s": 300.0}
            assert (await proxy.http.post("/groups", json=spec)).status_code == 200
            due_at = client.zscore(next(key for key in run_keys(RUN) if key.endswith(":due")), "g")
    assert due_at is not None and before + 300.0 <= due_at <= before + 300.0 + 60
