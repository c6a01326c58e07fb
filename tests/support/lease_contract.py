"""What every store promises of leases: who holds a group, for how long, and who is told. One suite, run against each."""

from __future__ import annotations

import asyncio
import time

import pytest

from proxy.contracts.errors import Conflict, NotFound
from proxy.contracts.leases import LeaseRequest
from proxy.store.base import SessionStore
from tests.support.groups import RUN, end, finished, group, lease, speak


class LeaseContract:
    # -- holding

    async def test_the_oldest_ready_group_goes_first_and_runs_are_apart(self, store: SessionStore) -> None:
        for number, group_id in enumerate(("c", "a", "b")):
            await finished(store, group_id, now=10.0 + number)
        await finished(store, "other", run_id="other")
        await finished(store, "none", run_id=None)
        assert [one.group.group_id for one in await lease(store, most=2)] == ["c", "a"]
        assert [one.group.group_id for one in await lease(store, most=5)] == ["b"]
        assert [one.group.group_id for one in await lease(store, most=5, run_id="other")] == ["other"]
        assert [one.group.group_id for one in await lease(store, most=5, run_id=None)] == ["none"]

    async def test_nothing_is_granted_below_what_is_asked_for_at_least(self, store: SessionStore) -> None:
        await finished(store, "a")
        await group(store, "due", deadline_s=50.0)
        asked = LeaseRequest(run_id=RUN, consumer="t", max_groups=2)
        granted = await store.runs.lease(asked, at_least=2, now=20.0)
        assert (granted.leases, granted.next_in_s) == ([], 37.0)
        await finished(store, "b", now=21.0)
        granted = await store.runs.lease(asked, at_least=2, now=25.0)
        assert [one.group.group_id for one in granted.leases] == ["a", "b"]
        assert granted.waited_s == [15.0, 4.0]

    async def test_an_acknowledged_group_is_never_served_again(self, store: SessionStore) -> None:
        await finished(store, "g")
        [one] = await lease(store)
        assert await store.runs.acknowledge(one.lease_id, now=30.0) == 10.0
        assert await store.runs.acknowledge(one.lease_id, now=40.0) is None, "the same again changes nothing"
        assert await lease(store, 1_000.0) == []
        view = await store.runs.view(RUN, now=1_000.0)
        assert (view.groups.acknowledged, view.groups.in_hand) == (1, 0)
        for call in (store.runs.release(one.lease_id, now=41.0), store.runs.extend(one.lease_id, 9.0, now=41.0)):
            with pytest.raises(Conflict):
                await call

    async def test_a_dead_trainers_group_is_served_again_under_a_new_lease(self, store: SessionStore) -> None:
        await finished(store, "old")
        [first] = await lease(store, 20.0, ttl_s=60.0)
        await finished(store, "new", now=30.0)
        [other] = await lease(store, 79.0, most=5)
        assert other.group.group_id == "new"
        assert (await store.runs.view(RUN, now=80.0)).groups.ready == 1
        [second] = await lease(store, 80.0, consumer="another")
        assert (second.group, second.trials, second.tokens, second.grants) == (
            first.group,
            first.trials,
            first.tokens,
            2,
        )
        assert second.lease_id != first.lease_id
        for call in (
            store.runs.acknowledge(first.lease_id, now=81.0), store.runs.release(first.lease_id, now=81.0),
            store.runs.extend(first.lease_id, 60.0, now=81.0),
        ):  # fmt: skip
            with pytest.raises(Conflict):
                await call
        await store.runs.acknowledge(second.lease_id, now=82.0)

    async def test_a_returned_group_goes_before_newer_ones(self, store: SessionStore) -> None:
        await finished(store, "old")
        await lease(store, 20.0, ttl_s=60.0)
        await finished(store, "new", now=30.0)
        assert [one.group.group_id for one in await lease(store, 80.0, most=5)] == ["old", "new"]

    async def test_a_late_trainer_may_still_acknowledge_what_nobody_else_was_given(self, store: SessionStore) -> None:
        await finished(store, "g")
        [one] = await lease(store, 20.0, ttl_s=10.0)
        assert await store.runs.extend(one.lease_id, 50.0, now=60.0) == 110.0
        assert await lease(store, 100.0) == []
        await store.runs.acknowledge(one.lease_id, now=200.0)
        assert await lease(store, 300.0) == []

    async def test_a_group_that_a_step_has_used_is_not_in_hand(self, store: SessionStore) -> None:
        await finished(store, "g")
        [one] = await lease(store, 20.0, ttl_s=10.0)
        await store.runs.extend(one.lease_id, 60.0, used=True, now=21.0)
        await store.runs.extend(one.lease_id, 60.0, now=22.0)  # holding on to it makes it no less used
        groups = (await store.runs.view(RUN, now=23.0)).groups
        assert (groups.leased, groups.used, groups.in_hand) == (0, 1, 0)
        # The trainer died before it was durable: the group is whoever's comes next, and in hand again.
        assert (await store.runs.view(RUN, now=90.0)).groups.in_hand == 1
        [again] = await lease(store, 90.0)
        groups = (await store.runs.view(RUN, now=91.0)).groups
        assert (groups.leased, groups.used, groups.in_hand) == (1, 0, 1)
        await store.runs.extend(again.lease_id, 60.0, used=True, now=92.0)
        await store.runs.acknowledge(again.lease_id, now=93.0)
        groups = (await store.runs.view(RUN, now=94.0)).groups
        assert (groups.used, groups.acknowledged, groups.in_hand) == (0, 1, 0)

    async def test_without_a_time_the_store_knows_it_itself(self, store: SessionStore) -> None:
        await finished(store, "g")
        asked = LeaseRequest(run_id=RUN, consumer="t", max_groups=1, ttl_s=600.0)
        [one] = (await store.runs.lease(asked, at_least=1)).leases
        assert abs(one.expires_at - time.time() - 600.0) < 300.0
        waiting = await store.runs.lease(asked, at_least=1)
        assert waiting.leases == [] and waiting.next_in_s is not None and 0 < waiting.next_in_s <= 600.0
        assert await store.runs.extend(one.lease_id, 1_200.0) > one.expires_at
        assert (await store.runs.view(RUN)).groups.leased == 1
        assert await store.runs.in_hand() == (0, 0, 1)
        assert 0.0 <= (await store.runs.acknowledge(one.lease_id) or 0.0) < 300.0

    async def test_a_released_group_is_served_at_once(self, store: SessionStore) -> None:
        await finished(store, "g")
        [one] = await lease(store)
        await store.runs.release(one.lease_id, now=21.0)
        await store.runs.release(one.lease_id, now=21.5)
        assert (await store.runs.view(RUN, now=22.0)).groups.model_dump() == {
            "running": 0, "ready": 1, "leased": 0, "used": 0, "acknowledged": 0, "empty": 0,
        }  # fmt: skip
        with pytest.raises(Conflict):
            await store.runs.acknowledge(one.lease_id, now=22.0)
        [again] = await lease(store, 22.0)
        assert (again.grants, again.group.group_id) == (2, "g")
        await store.runs.release(one.lease_id, now=23.0)
        assert await lease(store, 24.0) == [], "a release that comes again takes nothing from the next one"

    async def test_a_lost_answer_is_given_again(self, store: SessionStore) -> None:
        for group_id in ("a", "b", "c"):
            await finished(store, group_id)
        first = await lease(store, most=2, request_id="once")
        assert await lease(store, 30.0, most=2, request_id="once") == first
        await store.runs.acknowledge(first[0].lease_id, now=31.0)
        assert await lease(store, 32.0, most=2, request_id="once") == first[1:]
        assert [one.group.group_id for one in await lease(store, 33.0, most=2, request_id="twice")] == ["c"]

    async def test_what_is_no_lease_is_not_found(self, store: SessionStore) -> None:
        await finished(store, "g")
        [one] = await lease(store)
        for lease_id in ("", "x", "é", "k6Fh", one.lease_id + "A" * 8):
            for call in (
                store.runs.acknowledge(lease_id, now=1.0), store.runs.release(lease_id, now=1.0),
                store.runs.extend(lease_id, 1.0, now=1.0),
            ):  # fmt: skip
                with pytest.raises(NotFound):
                    await call

    async def test_two_trainers_never_hold_the_same_group(self, store: SessionStore) -> None:
        for number in range(12):
            await finished(store, f"g{number}", 1)
        granted = await asyncio.gather(*(lease(store, most=2, consumer=f"t{number}") for number in range(9)))
        held = [one.group.group_id for leases in granted for one in leases]
        assert len(held) == len(set(held)) == 12

    # -- waiting

    async def test_who_waits_is_woken(self, store: SessionStore) -> None:
        await group(store, "g", 1)
        await speak(store, "g.0", 5)
        with store.runs.watch(RUN) as woken, store.runs.watch("other") as other:
            await end(store, "g.0")
            await asyncio.wait_for(woken.wait(), 10)
            assert not other.is_set()
            woken.clear()
            [one] = await lease(store)
            await store.runs.release(one.lease_id, now=21.0)
            await asyncio.wait_for(woken.wait(), 10)

    async def test_deadlines_pass_without_a_trainer(self, store: SessionStore) -> None:
        await group(store, "g", 2, deadline_s=5.0)
        await speak(store, "g.0", 5)
        await end(store, "g.0")
        await group(store, "h", 1, run_id=None, deadline_s=50.0)
        await store.runs.close_due(now=20.0)
        assert (await store.runs.view(RUN, now=20.0)).groups.ready == 1
        assert await store.runs.in_hand(now=20.0) == (1, 1, 0)
        await lease(store)
        assert await store.runs.in_hand(now=20.0) == (1, 0, 1)
