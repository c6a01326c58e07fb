"""A Redis that refuses: full, or with fewer replicas than it wants. An error each time, nothing in part, and then all is well."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import closing
from typing import Any

import pytest

from steno.contracts.errors import StoreUnavailable
from steno.contracts.records import Limits
from steno_proxy.store.redis.link.wait import ReplicaWait
from steno_proxy.store.redis.schema import TIMED, trial_keys
from steno_proxy.store.redis.store import RedisStore
from tests.support.contracts.list import listed
from tests.support.contracts.policy import spec
from tests.support.contracts.recording import END, record
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.groups import end, finished, group, lease, speak
from tests.support.records.recordings import row, session, turn

REFUSALS = {
    "full": ({"maxmemory": "1", "maxmemory-policy": "noeviction"}, {"maxmemory": "0"}),
    "alone": ({"min-replicas-to-write": "1"}, {"min-replicas-to-write": "0"}),
}


@pytest.mark.parametrize("how", REFUSALS)
async def test_what_is_refused_is_unavailable_and_leaves_nothing(
    server: RedisServer, store: RedisStore, how: str
) -> None:
    refuse, allow = REFUSALS[how]
    made = await record(store, how, 2)
    late, keys = turn(5), trial_keys(how)
    with server.client() as client:
        before = {key: client.dump(key) for key in keys}
        for name, value in refuse.items():
            client.config_set(name, value)
        try:
            calls: list[Awaitable[Any]] = [
                store.commit(how, late, row(late), now=1.0),
                store.register(session(f"new-{how}")),
            ]
            if how == "alone":
                calls.append(store.complete(how, status="completed", **END))
            for call in calls:
                with pytest.raises(StoreUnavailable):
                    await call
            assert await store.turns(how) == made, "who reads is answered"
            assert {key: client.dump(key) for key in keys} == before
        finally:
            for name, value in allow.items():
                client.config_set(name, value)
    assert await store.commit(how, late, row(late), now=3.0) == 2
    assert [one.turn_id for one in await store.turns(how)] == [one.turn_id for one in [*made, late]]


async def test_a_full_redis_ends_sessions_and_lets_them_go(server: RedisServer, store: RedisStore) -> None:
    """Or nothing but a larger `maxmemory` would ever make room."""
    await finished(store, "trained")
    await group(store, "runs", 1)
    await speak(store, "runs.0", 5)
    await record(store, "alone", 1)
    await store.register(session("timed", limits=Limits(max_wall_s=1e9)))
    with server.client() as client:
        client.config_set("maxmemory", "1")
        try:
            with pytest.raises(StoreUnavailable):
                await store.register(session("new"))
            [leased] = await lease(store)
            await store.runs.acknowledge(leased.lease_id, now=21.0)
            await end(store, "runs.0")
            await store.complete("alone", status="completed", **END)
            client.zrem(TIMED, "timed")
            assert [one async for one in store.due(now=30.0)] == [], "and it is not refused"
            for trial_id in ("alone", "trained.0"):
                await store.delete(trial_id, now=30.0, tombstone_s=60.0)
            update = await store.policies.post(spec(1), now=30.0)
            await store.policies.serve(update.update_id)
            await store.policies.end(update.update_id, "done", now=31.0)
            assert await store.expire(now=1e6, retention_s=1.0) >= 1
            await store.sweep(now=1e9)
            assert await listed(store) == ["runs.0", "timed"], "its group waits for a trainer, and an open one"
        finally:
            client.config_set("maxmemory", "0")


async def test_a_full_redis_ends_sessions_also_where_replicas_are_waited_for() -> None:
    with closing(RedisServer()) as primary, closing(RedisServer()) as replica:
        replica.follow(primary.port)
        store = RedisStore(primary.url, wait=ReplicaWait(1, 60.0), **PATIENT)
        await record(store, "a", 1)
        with primary.client() as client:
            client.config_set("maxmemory", "1")
        await store.complete("a", status="completed", **END)
        await store.delete("a", now=30.0, tombstone_s=60.0)
        assert await listed(store) == []
        await store.close()


async def test_a_full_redis_takes_nothing_of_a_new_group(server: RedisServer, store: RedisStore) -> None:
    with server.client() as client:
        client.config_set("maxmemory", "1")
        try:
            with pytest.raises(StoreUnavailable):
                await group(store, "new")
        finally:
            client.config_set("maxmemory", "0")
        assert not client.keys("*new*") and not client.keys("*:run:*")
