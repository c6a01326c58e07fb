"""The crash windows between a trial's slot and the index's, each opened by stopping after one step and no sooner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from steno.contracts.errors import NotFound
from steno_proxy.store.encoding.head import head_of
from steno_proxy.store.redis.index import GRACE_S
from steno_proxy.store.redis.schema import PENDING, group_index_key, group_key
from steno_proxy.store.redis.store import RedisStore
from tests.support.contracts.list import listed, make_group
from tests.support.contracts.recording import END, record
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.recordings import session

LATER_THAN_ANY = 4_000_000_000.0
"""Unix seconds: what these clocks say counts, and not what Redis's says."""


class Crash(BaseException):  # nothing may outlive it
    pass


class Clock:
    def __init__(self) -> None:
        self.now = LATER_THAN_ANY

    def __call__(self) -> float:
        return self.now


class Windows:
    """A replica that dies in a window, and a healthy one. `later`: time passes, the healthy one sweeps."""

    def __init__(self, url: str) -> None:
        self.clock = Clock()
        self.healthy = RedisStore(url, clock=self.clock, **PATIENT)
        self.dying = RedisStore(url, clock=self.clock, **PATIENT)

    def dies_before_publishing(self) -> None:
        self.dying._index.publish = self._crash  # type: ignore[method-assign]

    async def _crash(self, *args: Any, **options: Any) -> Any:
        raise Crash

    async def later(self) -> int:
        self.clock.now += GRACE_S + 1
        return await self.healthy.sweep(now=self.clock.now)


@pytest.fixture
async def windows(server: RedisServer) -> AsyncIterator[Windows]:
    windows = Windows(server.url)
    yield windows
    await windows.healthy.close()
    await windows.dying.close()


def pending(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.zcard(PENDING))


async def test_a_session_registered_but_not_published_is_listed_after_a_sweep(
    server: RedisServer, windows: Windows
) -> None:
    windows.dies_before_publishing()
    with pytest.raises(Crash):
        await windows.dying.register(session("lost", group_id="g"))
    assert (await windows.healthy.session("lost")).status == "open"  # the truth is there
    assert await listed(windows.healthy) == []  # the list does not know yet
    assert await windows.healthy.sweep(now=windows.clock.now) == 0  # it may be in the middle of it
    assert await windows.later() == 1
    assert await listed(windows.healthy, status="open", group_id="g") == ["lost"]
    assert pending(server) == 0


async def test_an_announcement_of_nothing_is_withdrawn(server: RedisServer, windows: Windows) -> None:
    real = windows.dying._run

    async def crash_on_register(name: str, *args: Any) -> Any:
        if name == "register":
            raise Crash
        return await real(name, *args)

    windows.dying._run = crash_on_register  # type: ignore[method-assign, assignment]
    with pytest.raises(Crash):
        await windows.dying.register(session("never"))
    assert pending(server) == 1
    assert await windows.later() == 1
    assert pending(server) == 0
    assert await listed(windows.healthy) == []


async def test_an_end_that_was_not_published_is_never_shown_wrongly(server: RedisServer, windows: Windows) -> None:
    await record(windows.healthy, "ended", 1)
    windows.dies_before_publishing()
    with pytest.raises(Crash):
        await windows.dying.complete("ended", status="completed", **END)
    assert await listed(windows.healthy, status="open") == []
    assert await listed(windows.healthy, status="completed") == []
    assert await listed(windows.healthy) == ["ended"]
    await windows.later()
    assert await listed(windows.healthy, status="completed") == ["ended"]
    assert await windows.healthy.expire(now=END["now"] + 10, retention_s=1.0) == 1


async def test_completing_again_repairs_it_as_well(server: RedisServer, windows: Windows) -> None:
    await record(windows.healthy, "ended", 1)
    windows.dies_before_publishing()
    with pytest.raises(Crash):
        await windows.dying.complete("ended", status="completed", **END)
    await windows.healthy.complete("ended", status="completed", **END)
    assert await listed(windows.healthy, status="completed") == ["ended"]


async def test_a_deletion_that_was_not_published_leaves_no_ghost(server: RedisServer, windows: Windows) -> None:
    await record(windows.healthy, "removed", 1)
    windows.dies_before_publishing()
    with pytest.raises(Crash):
        await windows.dying.delete("removed", now=1.0, tombstone_s=3600.0)
    assert await listed(windows.healthy) == []
    await windows.later()
    assert (await windows.healthy.stats())["sessions"] == {"open": 0, "completed": 0, "aborted": 0}


async def test_an_expiry_that_was_not_published_is_finished_by_the_next(server: RedisServer, windows: Windows) -> None:
    await record(windows.healthy, "old", 1)
    await windows.healthy.complete("old", status="completed", **END)
    windows.dies_before_publishing()
    with pytest.raises(Crash):
        await windows.dying.expire(now=100.0, retention_s=1.0)
    assert await windows.healthy.expire(now=100.0, retention_s=1.0) == 0
    assert (await windows.healthy.stats())["sessions"]["completed"] == 0
    with pytest.raises(NotFound):
        await windows.healthy.session("old")


@pytest.mark.parametrize("dies", ["publish", "_group_gone"])
@pytest.mark.parametrize("how", ["expire", "delete"])
async def test_a_group_whose_last_session_goes_in_a_crash_goes_too(
    server: RedisServer, windows: Windows, dies: str, how: str
) -> None:
    """It stayed among its run's groups for ever, or its session in the group's list."""
    group, sessions = make_group("g", 1)
    await windows.healthy.create_group(group, sessions)
    await windows.healthy.complete("g-0", status="aborted", **(END | {"reward": None}))
    await windows.healthy.settle("g-0", now=END["now"])
    setattr(windows.dying._index, dies, windows._crash)
    with pytest.raises(Crash):
        if how == "expire":
            await windows.dying.expire(now=END["now"] + 10.0, retention_s=1.0)
        else:
            await windows.dying.delete("g-0", now=END["now"] + 10.0, tombstone_s=0.001)
    await asyncio.sleep(0.01)
    assert await windows.later() == 1
    with pytest.raises(NotFound):
        await windows.healthy.group("g")
    assert await windows.healthy.runs.groups("r") == []
    with server.client() as client:
        assert not client.exists(group_index_key("g")) and not client.exists(group_key("g"))
    assert pending(server) == 0


async def test_a_group_cut_short_is_finished_by_repeating_it(server: RedisServer, windows: Windows) -> None:
    group, sessions = make_group("g", 4)
    await windows.dying._link.call(windows.dying._link.client.set("steno:group:{g}", group.model_dump_json()))
    await windows.dying.register(sessions[0])
    assert await windows.healthy.create_group(group, sessions) == group
    assert await listed(windows.healthy, group_id="g") == group.trial_ids


async def test_what_was_read_earlier_never_undoes_what_was_read_later(server: RedisServer, windows: Windows) -> None:
    store = windows.healthy
    await record(store, "raced", 1)
    stale = head_of(await store.session("raced"))  # what a slow replica read before the end
    await store.complete("raced", status="completed", **END)
    await store._index.publish("raced", stale)
    assert await listed(store, status="completed") == ["raced"]
    await store.delete("raced", now=1.0, tombstone_s=3600.0)
    await store._index.publish("raced", stale)
    assert (await store.stats())["sessions"] == {"open": 0, "completed": 0, "aborted": 0}


async def test_a_completion_that_is_published_late_undoes_no_giving_up(server: RedisServer, windows: Windows) -> None:
    store, unscored = windows.healthy, END | {"reward": None}
    await record(store, "raced", 1)
    await store.complete("raced", status="completed", final=False, **unscored)
    stale = head_of(await store.session("raced"))
    await store.complete("raced", status="aborted", **unscored)
    await store._index.publish("raced", stale)
    assert await listed(store, status="aborted") == ["raced"]
    assert (await store.stats())["sessions"] == {"open": 0, "completed": 0, "aborted": 1}


async def test_any_number_of_replicas_may_sweep_at_once(server: RedisServer, windows: Windows) -> None:
    windows.dies_before_publishing()
    for number in range(5):
        with pytest.raises(Crash):
            await windows.dying.register(session(f"t{number}"))
    windows.clock.now += GRACE_S + 1
    await asyncio.gather(*(windows.healthy.sweep(now=windows.clock.now) for _ in range(4)))
    assert await listed(windows.healthy) == [f"t{number}" for number in range(5)]
    assert pending(server) == 0
