"""What every store promises of leases: who holds a group, for how long, and who is told. One suite, run against each."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from steno.contracts.errors import Conflict, NotFound, Superseded, TrainerAlive
from steno.contracts.runs.leases import LeaseRequest, Tenure
from steno_proxy.store.interface import SessionStore
from tests.support.records.groups import RUN, end, finished, group, lease, speak


class LeaseContract:
    # -- what is where

    async def test_a_runs_groups_are_listed_newest_first_with_where_they_are(self, store: SessionStore) -> None:
        await finished(store, "old", created_at=5.0)
        await group(store, "new", 3, created_at=9.0)
        await end(store, "new.1")
        await group(store, "held-out", created_at=8.0, purpose="eval")
        await finished(store, "other", run_id="other", created_at=50.0)
        await lease(store, 20.0, ttl_s=60.0)

        async def listed(now: float) -> list[tuple[Any, ...]]:
            found = await store.runs.groups(RUN, now=now)
            return [(one.group_id, one.purpose, one.state, one.ended, one.size, one.trainer) for one in found]

        assert await listed(30.0) == [
            ("new", "train", "running", 1, 3, None),
            ("held-out", "eval", "running", 0, 2, None),
            ("old", "train", "leased", 2, 2, "trainer"),
        ]
        assert (await listed(80.0))[-1] == ("old", "train", "ready", 2, 2, None), "its lease is over"
        assert [one.created_at for one in await store.runs.groups(RUN)] == [9.0, 8.0, 5.0]
        assert await store.runs.groups("nobody") == []
        assert (await store.runs.newest(10))[:2] == [("other", 50.0), (RUN, 9.0)]
        assert await store.runs.newest(1) == [("other", 50.0)]

    async def test_a_run_says_which_trainer_it_has_and_when_it_was_heard_of(self, store: SessionStore) -> None:
        assert (await store.runs.view(RUN)).trainer is None and not (await store.runs.view(RUN)).known
        await store.runs.take_over(RUN, "node-1", now=100.0)
        view = await store.runs.view(RUN, now=104.0)
        assert view.known and view.trained and view.trainer is not None
        assert (view.trainer.name, view.trainer.epoch, view.trainer.heard_s) == ("node-1", 1, 4.0)
        assert not (await store.runs.view(RUN, now=200.0)).trained, "heard of long ago"
        await store.runs.heartbeat(RUN, "node-1", 1, leaving=True, now=105.0)
        left = await store.runs.view(RUN, now=106.0)
        assert left.trainer is not None and left.trainer.heard_s is None and not left.trained

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

    async def test_rollouts_are_over_once_that_is_said_and_until_a_group_to_be_trained_comes(
        self, store: SessionStore
    ) -> None:
        async def over(run_id: str | None = RUN) -> bool:
            return (await store.runs.view(run_id)).rollouts_over

        await finished(store, "g")
        assert not await over()
        await store.runs.set_rollouts_over(RUN, True)
        assert await over() and not await over("other")
        await group(store, "g")
        await group(store, "eval", purpose="eval")
        assert await over(), "a group that was there, or is not trained, says nothing"
        await group(store, "new")
        assert not await over()
        await store.runs.set_rollouts_over(RUN, True)
        await store.runs.set_rollouts_over(RUN, False)
        assert not await over()

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

    async def test_a_request_for_no_group_brings_what_its_id_was_granted(self, store: SessionStore) -> None:
        for group_id in ("a", "b"):
            await finished(store, group_id)
        assert await lease(store, most=0, request_id="once") == [], "nothing new"
        [first] = await lease(store, request_id="other")
        assert first.group.group_id == "a"
        assert await lease(store, 30.0, most=0, request_id="other") == [first]
        await store.runs.release(first.lease_id, now=31.0)
        assert await lease(store, 32.0, most=0, request_id="other") == []

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

    # -- taking over

    async def test_who_takes_over_is_served_what_the_dead_trainer_had_first_and_in_its_order(
        self, store: SessionStore
    ) -> None:
        for number, group_id in enumerate("abcd"):
            await finished(store, group_id, now=10.0 + number)
        first = await store.runs.take_over(RUN, "t1", now=20.0)
        assert first == Tenure(run_id=RUN, trainer="t1", epoch=1)
        [a, b, c] = await lease(store, 20.0, most=3, ttl_s=600.0, epoch=1, consumer="t1")
        await store.runs.acknowledge(a.lease_id, now=21.0)
        await store.runs.extend(b.lease_id, 600.0, used=True, now=21.0)
        await store.runs.heartbeat(RUN, "t1", 1, now=22.0)
        second = await store.runs.take_over(RUN, "t2", now=37.0)
        assert second.epoch == 2
        groups = (await store.runs.view(RUN, now=37.0)).groups
        assert (groups.ready, groups.leased, groups.used, groups.acknowledged) == (3, 0, 0, 1)
        again = await lease(store, 37.0, most=9, epoch=2, consumer="t2")
        assert [one.group.group_id for one in again] == ["b", "c", "d"]
        assert [one.grants for one in again] == [2, 2, 1]
        assert [one.tokens for one in again[:2]] == [b.tokens, c.tokens]
        for one in again:
            await store.runs.acknowledge(one.lease_id, now=38.0)

    async def test_who_was_taken_over_from_is_told_whatever_it_asks(self, store: SessionStore) -> None:
        await finished(store, "a")
        await finished(store, "b")
        await store.runs.take_over(RUN, "t1", now=20.0)
        [one] = await lease(store, 20.0, epoch=1, request_id="once")
        await store.runs.take_over(RUN, "t2", now=50.0)
        for again in (False, True):
            for call in (
                store.runs.acknowledge(one.lease_id, now=51.0), store.runs.release(one.lease_id, now=51.0),
                store.runs.extend(one.lease_id, 60.0, now=51.0), lease(store, 51.0, epoch=1),
                lease(store, 51.0, epoch=1, request_id="once"), store.runs.heartbeat(RUN, "t1", 1, now=51.0),
                store.runs.check_epoch(RUN, 1),
            ):  # fmt: skip
                with pytest.raises(Superseded, match="epoch 2"):
                    await call
            if not again:  # and once the other one has its group
                [held] = await lease(store, 51.0, epoch=2)
                assert held.group.group_id == "a"
        await store.runs.check_epoch(RUN, 2)
        await store.runs.acknowledge(held.lease_id, now=52.0)

    async def test_a_trainer_that_lives_is_not_taken_over_from_unless_that_is_insisted_on(
        self, store: SessionStore
    ) -> None:
        await store.runs.take_over(RUN, "t1", now=20.0)
        await store.runs.heartbeat(RUN, "t1", 1, now=30.0)
        with pytest.raises(TrainerAlive, match="t1 was heard of 12 s ago") as refused:
            await store.runs.take_over(RUN, "t2", now=42.0)
        assert refused.value.retry_after_s == pytest.approx(3.0)
        await store.runs.heartbeat(RUN, "t1", 1, now=43.0)
        assert (await store.runs.take_over(RUN, "t1", now=44.0)).epoch == 1, "the same again: its answer was lost"
        with pytest.raises(TrainerAlive):
            await store.runs.take_over(RUN, "t2", now=57.9)
        assert (await store.runs.take_over(RUN, "t2", force=True, now=57.9)).epoch == 2
        assert (await store.runs.take_over(RUN, "t3", now=72.9)).epoch == 3, "15 s after it was last heard of"
        await store.runs.heartbeat(RUN, "t3", 3, leaving=True, now=73.0)
        assert (await store.runs.take_over(RUN, "t4", now=73.0)).epoch == 4, "who has left is not waited for"
        assert (await store.runs.take_over("other", "t5", now=73.0)).epoch == 1

    async def test_trainers_that_never_register_are_neither_superseded_nor_taken_from(
        self, store: SessionStore
    ) -> None:
        for group_id in "abc":
            await finished(store, group_id)
        [a] = await lease(store, 20.0, ttl_s=600.0)
        await store.runs.take_over(RUN, "t1", now=20.0)
        await lease(store, 21.0, ttl_s=600.0, epoch=1)
        await store.runs.take_over(RUN, "t2", now=50.0)
        await store.runs.extend(a.lease_id, 600.0, now=51.0)
        [again] = await lease(store, 52.0, most=1)
        assert again.group.group_id == "b"
        [c] = await lease(store, 52.0, most=9)
        assert c.group.group_id == "c"
        for one in (a, again, c):
            await store.runs.acknowledge(one.lease_id, now=53.0)
        assert (await store.runs.view(RUN, now=54.0)).groups.acknowledged == 3

    async def test_a_store_that_has_forgotten_its_trainer_learns_of_it(self, store: SessionStore) -> None:
        await store.runs.heartbeat(RUN, "t7", 7, now=20.0)
        with pytest.raises(TrainerAlive):
            await store.runs.take_over(RUN, "t8", now=21.0)
        for trainer, epoch in (("t6", 6), ("another", 7)):
            with pytest.raises(Superseded):
                await store.runs.heartbeat(RUN, trainer, epoch, now=22.0)
        assert (await store.runs.take_over(RUN, "t8", now=40.0)).epoch == 8

    async def test_who_waits_is_woken_by_who_takes_over(self, store: SessionStore) -> None:
        await finished(store, "g")
        await store.runs.take_over(RUN, "t1", now=20.0)
        await lease(store, 20.0, epoch=1)
        with store.runs.watch(RUN) as woken:
            await store.runs.take_over(RUN, "t2", now=50.0)
            await asyncio.wait_for(woken.wait(), 60)

    # -- waiting

    async def test_who_waits_is_woken(self, store: SessionStore) -> None:
        await group(store, "g", 1)
        await speak(store, "g.0", 5)
        with store.runs.watch(RUN) as woken, store.runs.watch("other") as other:
            await end(store, "g.0")
            await asyncio.wait_for(woken.wait(), 60)
            assert not other.is_set()
            woken.clear()
            [one] = await lease(store)
            await store.runs.release(one.lease_id, now=21.0)
            await asyncio.wait_for(woken.wait(), 60)

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
