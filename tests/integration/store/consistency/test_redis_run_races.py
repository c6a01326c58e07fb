"""Replicas that change one run at the same time, of this release and of older ones (I4): what is decided on something that
has changed since is decided anew."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import cycle
from typing import Any

import pytest

from steno.contracts.errors import Conflict, NotFound, StoreUnavailable
from steno.contracts.runs.leases import Lease
from steno_proxy.store.redis.link.redis_link import Script
from steno_proxy.store.redis.link.wait import ReplicaWait
from steno_proxy.store.redis.run import changes
from steno_proxy.store.redis.schema import PENDING, run_keys
from steno_proxy.store.redis.store import RedisStore
from steno_proxy.store.runs.settlement import EndedTrial
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.groups import RUN, end, finished, group, lease, speak, unaccounted
from tests.support.records.older_runs import older

Act = Callable[[], Awaitable[Any]]


class Meanwhile:
    """Between a replica's next reading of a run and its writing, somebody else acts. seen: what its writes were answered."""

    def __init__(self, store: RedisStore) -> None:
        self._change = store.runs._change
        self._link = self._change._link
        self._run = self._link.run
        self.acts: list[Act] = []
        self.answers: list[Any] = []
        self.reads = 0
        self._link.run = self._meanwhile  # type: ignore[method-assign]

    async def _meanwhile(self, script: Any, *args: Any, **options: Any) -> Any:
        self.reads += script is self._change._read
        if script is not self._change._write:
            return await self._run(script, *args, **options)
        if self.acts:
            await self.acts.pop(0)()
        answer = await self._run(script, *args, **options)
        self.answers.append(answer)
        return answer


@pytest.fixture(params=["new", "older"])
async def other(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[RedisStore]:
    """Another replica."""
    store = RedisStore(server.url, **PATIENT)
    yield store if request.param == "new" else older(store)
    await store.close()


async def view(store: RedisStore) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    found = await store.runs.view(RUN, now=20.0)
    return found.sampled, found.not_trained


async def test_the_last_two_trials_end_at_two_replicas(store: RedisStore, other: RedisStore) -> None:
    await group(store, "g")
    for trial_id in ("g.0", "g.1"):
        await speak(store, trial_id, 5)
    meanwhile = Meanwhile(store)
    meanwhile.acts.append(lambda: end(other, "g.1", 0.5))
    await end(store, "g.0")
    assert meanwhile.answers[:2] == [0, 1]
    [one] = await lease(store)
    assert sorted(one.tokens) == ["g.0", "g.1"]
    assert await view(store) == ({"l/1": 10}, {})


async def test_one_end_is_told_by_two_replicas(store: RedisStore, other: RedisStore) -> None:
    await group(store, "g")
    await speak(store, "g.0", 5)
    meanwhile = Meanwhile(store)
    meanwhile.acts.append(lambda: other.settle("g.0", now=10.0))
    await end(store, "g.0")
    assert meanwhile.answers[0] == 0
    assert await view(store) == ({"l/1": 5}, {})


async def test_one_group_is_leased_by_two_replicas(store: RedisStore, other: RedisStore) -> None:
    await finished(store, "g1")
    await finished(store, "g2")
    theirs: list[Lease] = []

    async def act() -> None:
        theirs.extend(await lease(other, consumer="theirs"))

    meanwhile = Meanwhile(store)
    meanwhile.acts.append(act)
    [one] = await lease(store)
    assert meanwhile.answers == [0, 1]
    assert [found.group.group_id for found in (*theirs, one)] == ["g1", "g2"]
    await store.runs.acknowledge(theirs[0].lease_id, now=21.0)
    await other.runs.acknowledge(one.lease_id, now=21.0)
    assert await lease(store) == await lease(other) == []


async def test_a_trial_is_deleted_while_its_group_is_leased(store: RedisStore, other: RedisStore) -> None:
    """The group's own record stays the same: one trial of it is left."""
    await finished(store, "g")
    meanwhile = Meanwhile(store)
    meanwhile.acts.append(lambda: other.delete("g.1", now=15.0, tombstone_s=1e6))
    [one] = await lease(store)
    assert meanwhile.answers == [0, 1]
    assert (sorted(one.tokens), one.left_out) == (["g.0"], {"g.1": "deleted"})
    assert unaccounted(await store.runs.view(RUN, now=20.0), one) == {}


async def test_a_group_is_leased_while_a_trial_of_it_is_deleted(store: RedisStore, other: RedisStore) -> None:
    await finished(store, "g")
    theirs: list[Lease] = []

    async def act() -> None:
        theirs.extend(await lease(other))

    meanwhile = Meanwhile(store)
    meanwhile.acts.append(act)
    await store.delete("g.1", now=15.0, tombstone_s=1e6)
    assert meanwhile.answers[0] == 0
    assert sorted(theirs[0].tokens) == ["g.0", "g.1"]
    assert unaccounted(await store.runs.view(RUN, now=20.0), *theirs) == {}


async def test_a_lease_that_ran_out_is_granted_elsewhere_while_it_is_acknowledged(
    store: RedisStore, other: RedisStore
) -> None:
    await finished(store, "g")
    [late] = await lease(store, 20.0, ttl_s=1.0)
    meanwhile = Meanwhile(store)
    meanwhile.acts.append(lambda: lease(other, 30.0))
    with pytest.raises(Conflict):
        await store.runs.acknowledge(late.lease_id, now=30.0)
    assert (await store.runs.view(RUN, now=31.0)).groups.leased == 1


async def test_a_trainer_takes_over_while_another_does(store: RedisStore, other: RedisStore) -> None:
    meanwhile = Meanwhile(store)
    meanwhile.acts.append(lambda: other.runs.take_over(RUN, "theirs", now=100.0))
    tenure = await store.runs.take_over(RUN, "ours", force=True, now=100.0)
    assert (meanwhile.answers, tenure.epoch) == ([0, 1], 2)


async def test_a_group_is_leased_while_another_trainer_takes_over(store: RedisStore, other: RedisStore) -> None:
    await finished(store, "g")
    await store.runs.take_over(RUN, "theirs", now=100.0)
    meanwhile = Meanwhile(store)
    meanwhile.acts.append(lambda: lease(other, 101.0, ttl_s=600.0, epoch=1))
    await store.runs.take_over(RUN, "ours", force=True, now=101.0)
    assert meanwhile.answers == [0, 1]
    assert len(await lease(store, 102.0, epoch=2)) == 1


async def test_a_group_and_a_late_turn_that_are_told_twice_count_once(store: RedisStore, other: RedisStore) -> None:
    """What is taken to be new, and is not."""
    made = await group(store, "g")
    await group(other, "g")
    await store.runs.open_group(made)
    for replica in (other, store):
        await replica.runs.came_late(RUN, "g.0", "t", {"l/1": 3}, "late", 10.0)
    found = await store.runs.view(RUN, now=20.0)
    assert (found.groups.running, found.sampled, found.not_trained) == (1, {"l/1": 3}, {"late": {"l/1": 3}})


def asks_twice(store: RedisStore, what: Script) -> None:
    link = store._link
    run = link.run

    async def twice(script: Any, *args: Any, **options: Any) -> Any:
        answer = await run(script, *args, **options)
        return await run(script, *args, **options) if script is what else answer

    link.run = twice  # type: ignore[method-assign]


async def test_a_write_whose_reply_was_lost_is_found_done(store: RedisStore) -> None:
    """The client library asks again: nothing counts twice, and who leases gets what it was granted."""
    asks_twice(store, store.runs._change._write)
    await finished(store, "g1")
    await finished(store, "g2")
    [one] = await lease(store, request_id="asked")
    assert one.group.group_id == "g1"
    await store.runs.extend(one.lease_id, 50.0, now=21.0)
    await store.runs.acknowledge(one.lease_id, now=22.0)
    [two] = await lease(store, request_id="more")
    await store.runs.release(two.lease_id, now=23.0)
    found = await store.runs.view(RUN, now=24.0)
    assert (found.groups.acknowledged, found.groups.ready, found.sampled) == (1, 1, {"l/1": 20})


async def test_a_deletion_whose_reply_was_lost_is_found_done(server: RedisServer, store: RedisStore) -> None:
    await group(store, "g")
    asks_twice(store, store.departures._delete)
    for trial_id in ("g.0", "g.1", "g.0"):  # and one that was deleted before
        await store.delete(trial_id, now=9.0, tombstone_s=600.0)
    assert (await store.stats())["sessions"] == {"open": 0, "completed": 0, "aborted": 0}
    with pytest.raises(NotFound):
        await store.group("g")
    assert await store.runs.groups(RUN) == []
    with server.client() as client:
        assert not client.exists(PENDING)


async def test_who_is_always_late_is_told(
    store: RedisStore, other: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "PAUSE_S", 0.0)
    await finished(store, "g")
    [one] = await lease(store)
    meanwhile = Meanwhile(store)
    times = iter(range(21, 99))
    meanwhile.acts += [lambda: other.runs.extend(one.lease_id, 60.0, now=next(times))] * changes.ATTEMPTS
    with pytest.raises(StoreUnavailable, match="changes too often"):
        await store.runs.acknowledge(one.lease_id, now=20.0)
    await store.runs.acknowledge(one.lease_id, now=20.0)


async def test_a_group_that_gets_ready_just_before_another_is_closed_and_leased_is_found(
    store: RedisStore, other: RedisStore
) -> None:
    """It stood before the last entry that was claimed, where nobody looks for what was never leased: it was ready for ever."""
    await finished(store, "before", now=8.0)
    await store.runs.acknowledge((await lease(store))[0].lease_id, now=8.0)
    await group(store, "closed", deadline_s=5.0)
    await speak(store, "closed.0", 5)
    await end(store, "closed.0")
    meanwhile = Meanwhile(store)
    meanwhile.acts.append(lambda: finished(other, "ready"))
    first = await lease(store, now=20.0)
    assert meanwhile.answers == [1]
    second, third = await lease(store, now=21.0), await lease(other, now=22.0)
    assert [[one.group.group_id for one in found] for found in (first, second, third)] == [["closed"], ["ready"], []]
    for one in (*first, *second):
        await store.runs.acknowledge(one.lease_id, now=23.0)
    counts = (await store.runs.view(RUN, now=24.0)).groups
    assert (counts.ready, counts.leased, counts.acknowledged) == (0, 0, 3)


async def test_a_group_that_ends_behind_one_that_is_leased_in_the_same_write_is_found(store: RedisStore) -> None:
    """Some ends and a lease that came together: what is written first need not be what is leased."""
    for name, size in (("slow", 2), ("quick", 1), ("first", 1)):
        for trial_id in (await group(store, name, size)).trial_ids:
            await store.complete(trial_id, status="completed", reward=1.0, end_reason="x", metrics={}, now=9.0)

    def ends(name: str, number: int) -> Awaitable[None]:
        return store.runs.ended(RUN, EndedTrial(f"{name}.{number}", name, "7.0", "train", True, {"l/1": 5}), 10.0)

    async def all_come() -> None:  # while the one before is written
        coming.append(asyncio.gather(ends("slow", 0), ends("quick", 0), lease(store, most=2), ends("slow", 1)))
        await asyncio.sleep(0)  # each has begun

    coming: list[asyncio.Future[Any]] = []
    meanwhile = Meanwhile(store)
    meanwhile.acts.append(all_come)
    await ends("first", 0)
    [_, _, leased, _] = await coming[0]
    assert len(meanwhile.answers) == 2
    found = [leased, await lease(store, now=21.0, most=3)]
    assert [[one.group.group_id for one in some] for some in found] == [["first", "quick"], ["slow"]]


async def test_many_trials_end_and_many_groups_are_leased_at_two_replicas(store: RedisStore, other: RedisStore) -> None:
    made = [await group(store, f"g{number}", 8) for number in range(8)]
    trials = [trial_id for one in made for trial_id in one.trial_ids]
    for trial_id in trials:
        await speak(store, trial_id, 5)
    both = cycle([store, other])
    await asyncio.gather(*(end(next(both), trial_id) for trial_id in trials))
    assert await view(store) == ({"l/1": 5 * 64}, {})
    found = await asyncio.gather(*(lease(next(both), consumer=f"t{number}") for number in range(12)))
    names = [one.group.group_id for leases in found for one in leases]
    assert sorted(names) == [one.group_id for one in made]
    await asyncio.gather(*(next(both).runs.acknowledge(one.lease_id, now=21.0) for leases in found for one in leases))
    assert (await store.runs.view(RUN, now=22.0)).groups.acknowledged == 8


async def test_ends_that_come_together_are_written_together(store: RedisStore) -> None:
    made = await group(store, "g", 64)
    for trial_id in made.trial_ids:
        await speak(store, trial_id, 1)
        await store.complete(trial_id, status="completed", reward=1.0, end_reason="x", metrics={}, now=9.0)
    meanwhile = Meanwhile(store)
    await asyncio.gather(*(store.settle(trial_id, now=10.0) for trial_id in made.trial_ids))
    assert len((await lease(store))[0].tokens) == 64
    assert len(meanwhile.answers) <= 24, "of 64 ends and 64 notes of them"


async def test_a_group_whose_sessions_go_before_its_first_lease_is_leased_and_forgotten(
    server: RedisServer, store: RedisStore, other: RedisStore
) -> None:
    made = await finished(store, "g")
    await store.runs.forget(made, 15.0)
    with server.client() as client:
        assert client.zcard(run_keys(RUN).leased) == 0
    [one] = await lease(other)
    await store.runs.acknowledge(one.lease_id, now=21.0)
    with server.client() as client:
        keys = run_keys(RUN)
        assert client.exists(keys.docs, keys.trials, keys.leased, keys.due) == 0
        assert (client.xlen(keys.ready), client.hkeys(keys.groups)) == (0, [b"g"])


async def test_fields_of_a_later_release_stay(server: RedisServer, store: RedisStore) -> None:
    await finished(store, "g")
    keys = run_keys(RUN)
    with server.client() as client:
        for key, name in ((keys.groups, "g"), (keys.trials, "g.0")):
            raw = client.hget(key, name)
            assert isinstance(raw, bytes)
            client.hset(key, name, json.dumps(json.loads(raw) | {"later": {"o": "", "f": [0.1, []]}}))
    [one] = await lease(store)
    await store.runs.release(one.lease_id, now=21.0)
    await store.delete("g.0", now=22.0, tombstone_s=1e6)
    [one] = await lease(store, 23.0)
    await store.runs.acknowledge(one.lease_id, now=24.0)
    with server.client() as client:
        for key, name in ((keys.groups, "g"), (keys.trials, "g.0")):
            raw = client.hget(key, name)
            assert isinstance(raw, bytes)
            assert json.loads(raw)["later"] == {"o": "", "f": [0.1, []]}


@pytest.mark.parametrize("steps", [1, 2])
async def test_who_waits_when_the_store_is_closed_is_told(server: RedisServer, steps: int) -> None:
    store = RedisStore(server.url, **PATIENT)
    asking = [asyncio.create_task(store.runs.take_over(RUN, "trainer", now=100.0)) for _ in range(3)]
    for _ in range(steps):
        await asyncio.sleep(0)
    await store.close()
    told = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 60.0)
    assert [type(one) for one in told] == [StoreUnavailable] * 3


async def test_what_is_found_done_must_be_on_replicas_too(server: RedisServer) -> None:
    """It may have been written by a call that was told that it is not."""
    store = RedisStore(server.url, wait=ReplicaWait(1, 0.05), **PATIENT)  # there is none
    try:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="replicate"):
                await store.runs.take_over(RUN, "trainer", now=100.0)
        assert (await store.runs.view(RUN, now=101.0)).trainer is not None
    finally:
        await store.close()
