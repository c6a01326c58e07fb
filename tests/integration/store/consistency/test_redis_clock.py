"""Leases, deadlines and all that is recorded are timed by Redis, which all replicas share: one whose clock is wrong does as the
others do. So is what a call is doing at this moment, which no replica takes for what a crash left."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from steno.contracts.runs.leases import LeaseRequest
from steno_proxy.api import lease_wait
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.store.redis.schema import DEAD, run_keys, trial_keys
from steno_proxy.store.redis.store import RedisStore
from tests.integration.http.conftest import running
from tests.integration.store.conftest import opened
from tests.support.contracts.recording import END
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.groups import RUN, finished, group, speak
from tests.support.records.recordings import session


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


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
async def test_a_trial_at_a_replica_whose_clock_is_wrong_has_the_times_of_the_others(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """Another replica ended it: by its record it had been idle for an hour."""
    right, before = time.time, await store.now()
    with monkeypatch.context() as wrong:
        wrong.setattr(time, "time", lambda: right() + ahead_s)
        async with opened(server, **PATIENT) as theirs, running(store=theirs) as proxy:
            spec = {"run_id": RUN, "limits": {"max_idle_s": 600.0, "max_wall_s": 1200.0}}
            assert (await proxy.http.post("/sessions/t", json=spec)).status_code == 200
            assert (await proxy.chat("t", "hello")).status_code == 200
            [said] = await proxy.turns("t", 1)
            step = {"step": 1, "values": {}, "ledger": {}, "groups": []}
            assert (await proxy.http.post(f"/runs/{RUN}/steps", json=step)).status_code == 200
    recorder = Recorder(store, cache_bytes=10**6, implicit=False)
    assert await recorder.end_timed_out() == 0
    found = await store.complete("t", status="completed", **(END | {"now": await store.now()}))
    [posted] = await store.runs.steps(RUN, start=0, limit=9)
    timed = [found.created_at, found.first_turn_at, posted.at, *said.timings.model_dump().values()]
    after = await store.now()
    assert all(time_s is not None and before - 1 <= time_s <= after + 1 for time_s in timed), timed


@pytest.mark.parametrize(("completes_s", "sweeps_s"), [(0.0, 60.0), (-60.0, 0.0), (-60.0, 60.0)])
async def test_a_sweep_of_a_replica_whose_clock_is_ahead_leaves_what_is_just_being_ended_alone(
    server: RedisServer, completes_s: float, sweeps_s: float
) -> None:
    """It took the announcement for what a crash had left, and turns that were cut off came too late for their record."""

    def off(by_s: float) -> Callable[[], float]:
        return lambda: time.time() + by_s

    async with (
        opened(server, clock=off(completes_s), **PATIENT) as completing,
        opened(server, clock=off(sweeps_s), **PATIENT) as sweeping,
    ):
        await group(completing, "g", 1)
        await speak(completing, "g.0", 5)
        now = time.time()
        await completing.complete("g.0", status="completed", **(END | {"now": now}))
        assert await sweeping.sweep() == 0
        await sweeping.expire(now=min(off(sweeps_s)(), await sweeping.now()), retention_s=1e9)
        with server.client() as client:
            assert client.hget(trial_keys("g.0").session, "sealed") is None
        await speak(completing, "g.0", 3, number=1, partial=True, finish_reason="cancelled")
        await completing.settle("g.0", now=now)
        view = await completing.runs.view(RUN)
        assert (view.sampled, view.not_trained) == ({"l/1": 8}, {})


async def test_nor_does_it_forget_tombstones_that_still_stand(server: RedisServer, store: RedisStore) -> None:
    await store.register(session("t"))
    await store.delete("t", now=time.time(), tombstone_s=600.0)
    async with opened(server, clock=lambda: time.time() + 3600.0, **PATIENT) as ahead:
        await ahead.sweep()
    with server.client() as client:
        assert client.zscore(DEAD, "t") is not None
