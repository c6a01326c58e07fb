"""What a proxy that dies on the way from a trial to its run leaves behind, window by window (I4); and a Redis that restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from steno.contracts.errors import Gone, StoreUnavailable
from steno_proxy.store.redis.index import GRACE_S
from steno_proxy.store.redis.schema import PENDING, run_keys
from steno_proxy.store.redis.store import RedisStore
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.groups import RUN, end, finished, group, lease, speak, unaccounted


class Crash(BaseException):  # nothing may outlive it
    pass


class Replicas:
    """One that dies, at its next call of something, and a healthy one."""

    def __init__(self, url: str) -> None:
        self.now = 4_000_000_000.0  # later than Redis's clock says
        self.dying = RedisStore(url, clock=lambda: self.now, **PATIENT)
        self.healthy = RedisStore(url, clock=lambda: self.now, **PATIENT)

    def dies_before(self, owner: Any, name: str) -> None:
        async def crash(*args: Any, **options: Any) -> Any:
            raise Crash

        setattr(owner, name, crash)

    def dies_before_script(self, name: str) -> None:
        run = self.dying._link.run

        async def crash(script: Any, *args: Any, **options: Any) -> Any:
            if script is getattr(self.dying._accounts, name):
                raise Crash
            return await run(script, *args, **options)

        self.dying._link.run = crash  # type: ignore[method-assign]

    async def sweep(self) -> None:
        self.now += GRACE_S + 1
        await self.healthy.sweep(now=self.now)


@pytest.fixture
async def replicas(server: RedisServer) -> AsyncIterator[Replicas]:
    replicas = Replicas(server.url)
    yield replicas
    await replicas.dying.close()
    await replicas.healthy.close()


WINDOWS: dict[str, Callable[[Replicas], None]] = {
    "before it settles": lambda r: r.dies_before(r.dying, "settle"),
    "before the seal": lambda r: r.dies_before_script("_seal"),
    "before the run is told": lambda r: r.dies_before(r.dying.runs, "ended"),
    "before the session knows": lambda r: r.dies_before_script("_booked"),
    "before it is noted": lambda r: r.dies_before(r.dying.runs, "settled"),
    "before the index is": lambda r: r.dies_before(r.dying._index, "publish"),
}
"""Where a completion may be cut short."""


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("again", ["swept", "repeated"])
async def test_a_completion_that_was_cut_short_reaches_its_group_once(
    server: RedisServer, replicas: Replicas, window: str, again: str
) -> None:
    store = replicas.healthy
    await group(store, "g")
    for trial_id in ("g.0", "g.1"):
        await speak(store, trial_id, 5)
    await end(store, "g.0")
    WINDOWS[window](replicas)
    with pytest.raises(Crash):
        await end(replicas.dying, "g.1", 0.5)
    if again == "swept":
        await replicas.sweep()
    else:
        await end(store, "g.1", 0.5)
    [one] = await lease(store)
    assert [found.reward for found in one.trials] == [1.0, 0.5]
    view = await store.runs.view(RUN, now=20.0)
    assert (view.sampled, view.not_trained) == ({"l/1": 10}, {})
    await replicas.sweep()
    assert await store.runs.view(RUN, now=20.0) == view
    with server.client() as client:
        assert client.zcard(PENDING) == 0
        assert client.zcount(run_keys(RUN).taken, "+inf", "+inf") == 0


@pytest.mark.parametrize("window", [name for name in WINDOWS if name != "before it settles"])
@pytest.mark.parametrize("again", ["swept", "repeated"])
async def test_a_deletion_that_was_cut_short_is_accounted_for_once(
    server: RedisServer, replicas: Replicas, window: str, again: str
) -> None:
    store = replicas.healthy
    await group(store, "g", 2)
    for trial_id in ("g.0", "g.1"):
        await speak(store, trial_id, 5)
    await end(store, "g.0")
    WINDOWS[window](replicas)
    with pytest.raises(Crash):
        await replicas.dying.delete("g.1", now=10.0, tombstone_s=1e6)
    with pytest.raises(Gone):
        await store.session("g.1")
    with pytest.raises(Gone):  # another replica was in the middle of it
        await speak(store, "g.1", 3, number=7, partial=True, finish_reason="cancelled")
    if again == "swept":
        await replicas.sweep()
    else:
        await store.delete("g.1", now=11.0, tombstone_s=1e6)
    [one] = await lease(store)
    assert one.left_out == {"g.1": "deleted"}
    view = await store.runs.view(RUN, now=20.0)
    assert (view.sampled, view.not_trained) == ({"l/1": 13}, {"deleted": {"l/1": 8}})
    assert unaccounted(view, one) == {}
    with server.client() as client:
        assert not client.exists("steno:{g.1}:turns", "steno:{g.1}:doc")
        await replicas.sweep()
        assert client.zcard(PENDING) == 0


async def test_an_expiry_that_was_cut_short_counts_nothing_twice(replicas: Replicas) -> None:
    store = replicas.healthy
    await finished(store, "g")
    [one] = await lease(store)
    await store.runs.acknowledge(one.lease_id, now=21.0)
    replicas.dies_before(replicas.dying._index, "publish")
    with pytest.raises(Crash):
        await replicas.dying.expire(now=1_000.0, retention_s=1.0)
    await store.expire(now=1_000.0, retention_s=1.0)
    view = await store.runs.view(RUN, now=1_000.0)
    assert (view.groups.acknowledged, unaccounted(view, one)) == (1, {})


async def test_the_names_of_trainers_that_never_come_back_do_not_pile_up(
    server: RedisServer, store: RedisStore
) -> None:
    """Each start of a trainer may have another name."""
    for name in ("a", "b"):
        await finished(store, name)
    for start in range(5):
        assert len(await lease(store, 1000.0 * start, most=2, consumer=f"trainer-{start}")) == 2
    ready = run_keys(RUN).ready
    with server.client() as client:
        assert [(one["name"], one["pending"]) for one in client.xinfo_consumers(ready, "trainers")] == [
            (b"trainer-4", 2)
        ]
        for one in await lease(store, 9000.0, most=2, consumer="trainer-4"):
            await store.runs.acknowledge(one.lease_id, now=9001.0)
        assert client.xinfo_consumers(ready, "trainers") == []


async def test_leases_outlive_a_restart_of_redis() -> None:
    server = RedisServer()
    store = RedisStore(server.url, **PATIENT)

    async def patient(call: Callable[[], Awaitable[Any]]) -> Any:
        for _ in range(20):
            try:
                return await call()
            except StoreUnavailable:
                continue
        return await call()

    try:
        await finished(store, "held")
        await finished(store, "waiting")
        await group(store, "running")
        [one] = await lease(store, request_id="asked")
        before = await store.runs.view(RUN, now=21.0)
        server.kill()
        with pytest.raises(StoreUnavailable):
            await store.runs.acknowledge(one.lease_id, now=22.0)
        server.start()
        assert await patient(lambda: store.runs.view(RUN, now=23.0)) == before
        assert await lease(store, 24.0, request_id="asked") == [one]
        [other] = await lease(store, 24.0, most=5)
        assert other.group.group_id == "waiting"
        await store.runs.acknowledge(one.lease_id, now=25.0)
        [again] = await lease(store, 500.0)
        assert (again.group.group_id, again.grants) == ("waiting", 2)
    finally:
        await store.close()
        server.close()
