"""What a sweep reads of many open sessions: those whose time may be over, and no others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from steno.contracts.errors import StoreUnavailable
from steno.contracts.records import Limits, Timings
from steno_proxy.store.redis.schema import ENDED, PAST_RUNS, PENDING, RUNS, TIMED, run_keys, trial_keys
from steno_proxy.store.redis.store import RedisStore
from tests.integration.store.conftest import opened
from tests.support.contracts.list import make_group
from tests.support.contracts.store import due
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.recordings import row, session, turn

OPEN = 300


def read_so_far(server: RedisServer) -> int:
    """How many sessions have been read."""
    with server.client() as client:
        found = client.info("commandstats").get("cmdstat_hgetall", {})
        return int(found.get("calls", 0))


async def test_a_sweep_reads_only_the_sessions_whose_time_may_be_over(store: RedisStore, server: RedisServer) -> None:
    """It read all open ones each time: 4.2 s of CPU a minute at 40,000."""
    now = time.time()
    for number in range(OPEN):
        limits = Limits(max_idle_s=600.0) if number % 2 else Limits()
        await store.register(session(f"t{number}", created_at=now, limits=limits))
    one = turn(0, timings=Timings(queued=now))
    await store.commit("t1", one, row(one), now=now)
    before = read_so_far(server)
    assert await due(store, now + 60.0) == []
    assert read_so_far(server) == before
    assert await due(store, now + 600.0) == ["t1"]
    assert read_so_far(server) - before == OPEN // 2
    assert await due(store, now + 660.0) == ["t1"]
    assert read_so_far(server) - before == OPEN // 2 + 1


async def test_what_an_older_release_left_open_is_found(store: RedisStore, server: RedisServer) -> None:
    """It writes no `timed`: its sessions are looked for at the start, and every ten minutes."""
    now = time.time()
    for trial_id in ("before", "meanwhile"):
        await store.register(session(trial_id, created_at=now, limits=Limits(max_idle_s=5.0)))
        one = turn(0, timings=Timings(queued=now))
        await store.commit(trial_id, one, row(one), now=now)
    clock = [now]
    with server.client() as client:
        client.delete(TIMED)
        async with opened(server, clock=lambda: clock[0], **PATIENT) as started:
            assert await due(started, now + 5.0) == ["before", "meanwhile"]
            await started.complete("before", status="completed", reward=None, end_reason="", metrics={}, now=now)
            client.delete(TIMED)
            assert await due(started, now + 5.0) == []
            clock[0] += 600.0
            assert await due(started, now + 600.0) == ["meanwhile"]


async def test_a_session_that_cant_be_read_keeps_no_other_from_ending_by_its_time(
    store: RedisStore, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is looked at again ten minutes later: this release may be about to be replaced by one that can read it."""
    clock = [time.time()]
    now = clock[0]
    for trial_id in ("a", "b", "c"):
        await store.register(session(trial_id, created_at=now, limits=Limits(max_idle_s=5.0)))
        one = turn(0, timings=Timings(queued=now))
        await store.commit(trial_id, one, row(one), now=now)
    with server.client() as client, broken(client, "b"):
        async with opened(server, clock=lambda: clock[0], **PATIENT) as started:
            assert await due(started, now + 5.0) == ["a", "c"]
            assert "trial b" in caplog.text
            caplog.clear()
            assert await due(started, now + 5.0) == ["a", "c"] and not caplog.text
            clock[0] += 600.0
            assert await due(started, now + 600.0) == ["a", "c"] and "trial b" in caplog.text
    async with opened(server, **PATIENT) as started:
        assert await due(started, now + 5.0) == ["a", "b", "c"]


async def test_a_sweep_looks_at_what_its_groups_hold_back_by_the_hundred(
    store: RedisStore, server: RedisServer
) -> None:
    """It settled each of them anew: some fifteen commands a session, one after the other."""
    now = time.time()
    for name, run_id in (("g", "r"), ("h", None)):
        group, sessions = make_group(name, 60, run_id=run_id)
        await store.create_group(group, sessions)
        for trial_id in group.trial_ids:
            one = turn(0)
            await store.commit(trial_id, one, row(one), now=now)
            await store.complete(trial_id, status="completed", reward=1.0, end_reason="", metrics={}, now=now)
            await store.settle(trial_id, now=now)
    await store.register(session("alone", created_at=now))
    await store.complete("alone", status="completed", reward=1.0, end_reason="", metrics={}, now=now + 1.0)
    with server.client() as client:
        client.config_resetstat()
        assert await store.expire(now=now + 60.0, retention_s=1.0) == 1
        stats = client.info("commandstats")
        assert sum(stats[name]["calls"] for name in stats if name.startswith("cmdstat_eval")) < 10
        assert sum(found["calls"] for found in stats.values()) < 300
        assert client.zcard(ENDED) == 120


async def test_nor_from_being_accounted_for_nor_from_leaving(
    store: RedisStore, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.time()
    trials = [f"t{number:03}" for number in range(150)]  # more than are looked at together
    for trial_id in trials:
        await store.register(session(trial_id, created_at=now))
        await store.complete(trial_id, status="completed", reward=1.0, end_reason="", metrics={}, now=now)
    bad = trials[:120]
    with server.client() as client, broken(client, *bad):
        await store._index.announce(trials)  # as a call does that is cut off
        assert await store.sweep(now=time.time() + 60.0) == 30  # they are announced by Redis's clock
        assert [trial_id for trial_id in trials if f"trial {trial_id}" in caplog.text] == bad
        assert client.zcard(PENDING) == 120
        assert await store.expire(now=now + 60.0, retention_s=1.0) == 30
        assert client.zcard(ENDED) == 120
    assert await store.expire(now=now + 60.0, retention_s=1.0) == 120
    assert client.zcard(PENDING) == client.zcard(ENDED) == 0


@contextlib.contextmanager
def broken(client: Any, *trial_ids: str) -> Iterator[None]:
    """Sessions whose document no release can read."""
    keys = [trial_keys(trial_id).doc for trial_id in trial_ids]
    kept = [client.get(key) for key in keys]
    for key in keys:
        client.set(key, b"not a document")
    yield
    for key, doc in zip(keys, kept, strict=True):
        client.set(key, doc)


async def test_a_run_without_groups_leaves_what_sweeps_and_scrapes_walk(store: RedisStore, server: RedisServer) -> None:
    with server.client() as client:

        def walked() -> tuple[list[str], list[str]]:
            keys = [client.zrange(key, 0, -1) for key in (RUNS, PAST_RUNS)]
            here, past = ([tag.decode() for tag in tags] for tags in keys)
            return here, past

        group, sessions = make_group("g", 2, run_id="old")
        await store.create_group(group, sessions)
        await store.create_group(*make_group("h", 1, run_id="live"))
        await store.runs.close_due()
        assert walked() == ([":run:live", ":run:old"], [])
        for one in sessions:
            await store.delete(one.trial_id, now=1.0, tombstone_s=60.0)
        client.config_resetstat()
        await store.runs.close_due()
        assert walked() == ([":run:live"], [":run:old"])
        again, others = make_group("g2", 1, run_id="old", created_at=99.0)
        await store.create_group(again, others)
        await store.runs.close_due()
        assert ":run:old" in walked()[0]
        assert (await store.runs.in_hand()).running == 2
        assert (await store.runs.view("old")).groups.running == 1


async def test_a_scrape_and_a_list_of_runs_read_no_ledger(store: RedisStore, server: RedisServer) -> None:
    """It has a field for each version and reason, and is never cut."""
    await store.create_group(*make_group("g", 1))
    with server.client() as client:
        client.hset(run_keys("r").ledger, mapping={f"s:lineage/{number}": 1 for number in range(5000)})
        await store.runs.in_hand()

        def sent() -> int:
            return int(client.info("stats")["total_net_output_bytes"])

        before = sent()
        own = sent() - before  # of asking for it
        assert (await store.runs.in_hand()).running == 1
        assert (await store.runs.view("r", ledger=False)).groups.running == 1
        assert sent() - before - 2 * own < 4000
    assert len((await store.runs.view("r")).sampled) == 5000


async def test_a_settling_that_failed_is_remembered_by_the_store_alone(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process kept each for as long as it ran, though a sweep had made it good."""
    await store.create_group(*make_group("g", 3))
    now, settle = time.time(), store._accounts.settle

    async def fails(trial_id: str, now: float) -> Any:
        if trial_id == "g-1":
            raise StoreUnavailable("the session store does not answer")
        return await settle(trial_id, now)

    with monkeypatch.context() as patch:
        patch.setattr(store._accounts, "settle", fails)
        for trial_id in ("g-0", "g-1", "g-2"):
            await store.complete(trial_id, status="completed", reward=1.0, end_reason="", metrics={}, now=now)
            with contextlib.suppress(StoreUnavailable):
                await store.settle(trial_id, now=now)
    assert store._unsettled == {}
    assert await store.sweep(now=now + 60.0) == 1
    with server.client() as client:
        assert client.zcard(PENDING) == 0
    [group] = await store.runs.groups("r")
    assert group.ended == 3
