"""What every store promises of groups, leases and the proxy's side of the ledger (I4): one suite, run against each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.contracts.errors import Conflict, Gone, NotFound
from proxy.contracts.leases import Lease, LeaseRequest, RunView
from proxy.contracts.records import OPEN, Group, TokenSpan, ids_to_bytes
from proxy.store.base import SessionStore
from tests.support.recordings import row, session, turn

RUN = "run {1}/π"
"""Any text is a run id: also one that would end a hash tag."""


async def group(store: SessionStore, group_id: str, size: int = 2, *, run_id: str | None = RUN, **fields: Any) -> Group:
    names = [f"{group_id}.{number}" for number in range(size)]
    values = {"created_at": 7.0} | fields
    made = Group(group_id=group_id, run_id=run_id, size=size, trial_ids=names, **values)
    sessions = [session(name, created_at=values["created_at"], group_id=group_id, run_id=run_id) for name in names]
    return await store.create_group(made, sessions)


async def speak(
    store: SessionStore, trial_id: str, tokens: int, *, version: str = "l/1", number: int = 0, **fields: Any
) -> Any:
    """One turn of so many sampled tokens. Returns the turn."""
    values: dict[str, Any] = {
        "completion_ids": ids_to_bytes(list(range(tokens))), "sampling_logprobs": bytes(4 * tokens),
        "versions": [TokenSpan(version=version, start=0, end=tokens)] if tokens else [], "call_ids": {},
    }  # fmt: skip
    one = turn(number, seed=sum(trial_id.encode()), text_bytes=20, **(values | fields))
    await store.commit(trial_id, one, row(one), now=8.0)
    return one


async def end(
    store: SessionStore, trial_id: str, reward: float | None = 1.0, *, status: str = "completed", now: float = 10.0,
    final: bool = True,
) -> None:  # fmt: skip
    await store.complete(trial_id, status=status, reward=reward, end_reason="harness", metrics={}, now=now, final=final)
    await store.settle(trial_id, now=now)


async def finished(
    store: SessionStore, group_id: str, size: int = 2, *, tokens: int = 5, now: float = 10.0, **fields: Any
) -> Group:
    """A group of which every trial said something and got a reward."""
    made = await group(store, group_id, size, **fields)
    for trial_id in made.trial_ids:
        await speak(store, trial_id, tokens)
        await end(store, trial_id, now=now)
    return made


async def lease(
    store: SessionStore, now: float = 20.0, *, most: int = 1, ttl_s: float = 100.0, consumer: str = "trainer",
    run_id: str | None = RUN, request_id: str | None = None, at_least: int = 1,
) -> list[Lease]:  # fmt: skip
    asked = LeaseRequest(run_id=run_id, consumer=consumer, max_groups=most, ttl_s=ttl_s, request_id=request_id)
    return (await store.runs.lease(asked, at_least=at_least, now=now)).leases


def unaccounted(view: RunView, *leases: Lease) -> dict[str, int]:
    """Sampled tokens that are neither given up nor brought by these leases, by version: {} is balance (I4)."""
    left = dict(view.sampled)
    for tokens in [*view.not_trained.values(), *(found for one in leases for found in one.tokens.values())]:
        for version, count in tokens.items():
            left[version] = left.get(version, 0) - count
    return {version: count for version, count in left.items() if count}


class LeaseContract:
    # -- getting ready

    async def test_a_group_is_ready_when_all_its_trials_have_ended(self, store: SessionStore) -> None:
        made = await group(store, "g")
        await speak(store, "g.0", 3, version="l/1")
        await speak(store, "g.0", 4, version="l/2", number=1)
        await speak(store, "g.1", 5)
        await end(store, "g.0", 0.25)
        assert await lease(store) == []
        assert (await store.runs.view(RUN, now=20.0)).groups.model_dump() == {
            "running": 1, "ready": 0, "leased": 0, "used": 0, "acknowledged": 0, "empty": 0,
        }  # fmt: skip
        await end(store, "g.1", 0.0)
        [one] = await lease(store)
        assert one.group == made
        assert [(found.trial_id, found.reward) for found in one.trials] == [("g.0", 0.25), ("g.1", 0.0)]
        assert one.tokens == {"g.0": {"l/1": 3, "l/2": 4}, "g.1": {"l/1": 5}}
        assert (one.left_out, one.grants, one.expires_at) == ({}, 1, 120.0)
        view = await store.runs.view(RUN, now=20.0)
        assert view.groups.leased == view.groups.in_hand == 1
        assert view.sampled == {"l/1": 8, "l/2": 4}
        assert unaccounted(view, one) == {}
        assert await lease(store) == []

    async def test_at_the_deadline_it_is_served_with_those_that_have_ended(self, store: SessionStore) -> None:
        await group(store, "g", 3, deadline_s=30.0)
        for trial_id in ("g.0", "g.1"):
            await speak(store, trial_id, 5)
            await end(store, trial_id)
        await speak(store, "g.2", 7)
        assert await lease(store, 36.9) == []
        [one] = await lease(store, 37.0)
        assert ([found.trial_id for found in one.trials], one.left_out) == (["g.0", "g.1"], {"g.2": "late"})
        await end(store, "g.2", now=38.0)
        view = await store.runs.view(RUN, now=40.0)
        assert view.not_trained == {"late": {"l/1": 7}}
        assert unaccounted(view, one) == {}

    async def test_what_cannot_be_trained_is_left_out_and_accounted_for(self, store: SessionStore) -> None:
        await group(store, "g", 6)
        for number in range(6):
            if number != 4:
                await speak(store, f"g.{number}", 10 + number)
        await store.add_marks("g.3", ["synthetic"])
        await store.add_marks("g.4", ["text_only"])
        await speak(store, "g.4", 0, upstream_tokens=9)
        await end(store, "g.0")
        await end(store, "g.1", None)
        await end(store, "g.2", 1.0, status="aborted")
        await end(store, "g.3")
        await end(store, "g.4")
        await store.delete("g.5", now=10.0, tombstone_s=60.0)
        [one] = await lease(store)
        assert [found.trial_id for found in one.trials] == ["g.0"]
        assert one.left_out == {
            "g.1": "unscored", "g.2": "aborted", "g.3": "synthetic", "g.4": "text_only", "g.5": "deleted",
        }  # fmt: skip
        view = await store.runs.view(RUN, now=20.0)
        assert view.not_trained == {
            "unscored": {"l/1": 11}, "aborted": {"l/1": 12}, "synthetic": {"l/1": 13}, "deleted": {"l/1": 15},
        }  # fmt: skip
        assert unaccounted(view, one) == {}

    async def test_a_group_with_nothing_to_train_is_counted_and_never_leased(self, store: SessionStore) -> None:
        await group(store, "unscored", 1)
        await speak(store, "unscored.0", 5)
        await end(store, "unscored.0", None)
        await group(store, "silent", 2)
        await end(store, "silent.0")
        await end(store, "silent.1")
        assert await lease(store) == []
        view = await store.runs.view(RUN, now=20.0)
        assert (view.groups.empty, view.groups.in_hand) == (2, 0)
        assert view.not_trained == {"unscored": {"l/1": 5}}

    async def test_a_trial_that_said_nothing_still_counts_with_its_reward(self, store: SessionStore) -> None:
        await group(store, "g")
        await speak(store, "g.0", 5)
        await end(store, "g.0", 1.0)
        await end(store, "g.1", 0.0)
        [one] = await lease(store)
        assert ([found.trial_id for found in one.trials], one.tokens["g.1"]) == (["g.0", "g.1"], {})

    async def test_evaluation_is_never_leased(self, store: SessionStore) -> None:
        await finished(store, "e", purpose="eval")
        await group(store, "e2", purpose="eval", deadline_s=5.0)
        await speak(store, "e2.0", 3)
        await store.delete("e2.0", now=9.0, tombstone_s=60.0)
        assert await lease(store, 50.0) == []
        view = await store.runs.view(RUN, now=50.0)
        assert view.eval_groups.model_dump() == {"running": 0, "ended": 2}
        assert view.groups.in_hand == view.groups.empty == 0
        assert (view.sampled, view.not_trained) == ({"l/1": 13}, {"evaluation": {"l/1": 13}})

    async def test_trials_in_no_group_are_accounted_for_in_their_run(self, store: SessionStore) -> None:
        await store.register(session("alone", run_id=RUN))
        await speak(store, "alone", 6)
        await end(store, "alone")
        await end(store, "alone")
        view = await store.runs.view(RUN, now=20.0)
        assert (view.sampled, view.not_trained) == ({"l/1": 6}, {"ungrouped": {"l/1": 6}})

    async def test_a_run_that_nobody_knows_has_nothing(self, store: SessionStore) -> None:
        assert await store.runs.view("nobody", now=1.0) == RunView(run_id="nobody")

    async def test_a_trial_that_its_own_limit_ended_waits_for_its_reward(self, store: SessionStore) -> None:
        await group(store, "g", 2, deadline_s=100.0)
        for trial_id in ("g.0", "g.1"):
            await speak(store, trial_id, 5)
        await end(store, "g.0")
        await end(store, "g.1", None, final=False)
        assert await lease(store) == []
        await end(store, "g.1", 0.5)
        [one] = await lease(store)
        assert [found.reward for found in one.trials] == [1.0, 0.5]
        await group(store, "h", 2, deadline_s=100.0)
        for trial_id in ("h.0", "h.1"):
            await speak(store, trial_id, 5)
        await end(store, "h.0")
        await end(store, "h.1", None, final=False)
        [late] = await lease(store, 107.0)
        assert late.left_out == {"h.1": "unscored"}
        await end(store, "h.1", 0.5, now=110.0)
        assert unaccounted(await store.runs.view(RUN, now=110.0), one, late) == {}

    async def test_a_trial_that_its_own_limit_ended_may_be_given_up(self, store: SessionStore) -> None:
        await group(store, "g", 1)
        await speak(store, "g.0", 5)
        await end(store, "g.0", None, final=False)
        await end(store, "g.0", None, status="aborted")
        assert (await store.session("g.0")).status == "aborted"
        view = await store.runs.view(RUN, now=20.0)
        assert (view.groups.empty, view.not_trained) == (1, {"aborted": {"l/1": 5}})
        await group(store, "h", 1)
        await end(store, "h.0", None)
        with pytest.raises(Conflict):
            await end(store, "h.0", None, status="aborted")

    # -- leases

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
        assert (granted.leases, granted.next_at) == ([], 57.0)
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

    # -- deleting and expiring

    async def test_a_trial_deleted_while_its_group_waits_is_left_out(self, store: SessionStore) -> None:
        await finished(store, "g", 3)
        await store.delete("g.1", now=15.0, tombstone_s=60.0)
        [one] = await lease(store)
        assert ([found.trial_id for found in one.trials], one.left_out) == (["g.0", "g.2"], {"g.1": "deleted"})
        view = await store.runs.view(RUN, now=20.0)
        assert view.not_trained == {"deleted": {"l/1": 5}}
        assert unaccounted(view, one) == {}

    async def test_a_group_whose_trials_are_all_deleted_while_it_waits_is_empty(self, store: SessionStore) -> None:
        await finished(store, "g")
        for trial_id in ("g.0", "g.1"):
            await store.delete(trial_id, now=15.0, tombstone_s=60.0)
        assert await lease(store) == []
        view = await store.runs.view(RUN, now=20.0)
        assert (view.groups.empty, view.groups.in_hand) == (1, 0)
        assert unaccounted(view) == {}

    async def test_a_trial_deleted_after_the_first_grant_is_the_trainers_to_account_for(
        self, store: SessionStore
    ) -> None:
        await finished(store, "g")
        [first] = await lease(store, 20.0, ttl_s=10.0)
        await store.delete("g.1", now=21.0, tombstone_s=60.0)
        [second] = await lease(store, 31.0)
        assert [found.trial_id for found in second.trials] == ["g.0"]
        assert second.tokens == first.tokens, "what a lease brings is settled with the first grant"
        assert unaccounted(await store.runs.view(RUN, now=32.0), second) == {}
        await store.delete("g.0", now=33.0, tombstone_s=60.0)
        [third] = await lease(store, 200.0)
        assert (third.trials, third.tokens) == ([], first.tokens)
        await store.runs.acknowledge(third.lease_id, now=201.0)
        view = await store.runs.view(RUN, now=202.0)
        assert (view.groups.acknowledged, view.groups.in_hand) == (1, 0)

    async def test_retention_keeps_what_waits_for_a_lease_or_is_leased(self, store: SessionStore) -> None:
        await finished(store, "g")
        assert await store.expire(now=1_000.0, retention_s=100.0) == 0
        [one] = await lease(store, 1_000.0)
        assert len(one.trials) == 2
        assert await store.expire(now=1_050.0, retention_s=100.0) == 0
        await store.runs.acknowledge(one.lease_id, now=1_060.0)
        assert await store.expire(now=1_070.0, retention_s=100.0) == 2
        with pytest.raises(NotFound):
            await store.group("g")
        assert unaccounted(await store.runs.view(RUN, now=1_080.0), one) == {}

    async def test_what_is_kept_holds_up_nothing_behind_it(self, store: SessionStore) -> None:
        await finished(store, "kept", 120)
        await store.register(session("behind"))
        await end(store, "behind", now=11.0)
        assert await store.expire(now=1_000.0, retention_s=100.0) == 1

    async def test_a_group_that_runs_past_its_retention_is_served_as_it_is(self, store: SessionStore) -> None:
        await group(store, "g", 2)
        await speak(store, "g.0", 5)
        await end(store, "g.0")
        assert await store.expire(now=1_000.0, retention_s=100.0) == 0
        [one] = await lease(store, 1_001.0)
        assert ([found.trial_id for found in one.trials], one.left_out) == (["g.0"], {"g.1": "late"})

    # -- what comes too late for its record

    async def test_a_settled_record_takes_no_turn_and_its_tokens_are_late(self, store: SessionStore) -> None:
        await group(store, "g", 1)
        await speak(store, "g.0", 5)
        begun = await speak(store, "g.0", 2, number=1, partial=True, finish_reason=OPEN)
        await store.complete("g.0", status="completed", reward=1.0, end_reason="x", metrics={}, now=10.0)
        cut = await speak(store, "g.0", 3, number=2, partial=True, finish_reason="cancelled")
        await store.settle("g.0", now=10.0)
        for number, tokens in ((1, 6), (3, 4)):
            for _ in range(2):
                with pytest.raises(Gone):
                    await speak(store, "g.0", tokens, number=number, partial=True, finish_reason="cancelled")
        with pytest.raises(Gone):
            await speak(store, "g.0", 40, number=4)
        assert [found.turn_id for found in await store.turns("g.0")][1:] == [begun.turn_id, cut.turn_id]
        await speak(store, "g.0", 3, number=2, partial=True, finish_reason="cancelled")
        [one] = await lease(store)
        assert one.tokens == {"g.0": {"l/1": 10}}
        view = await store.runs.view(RUN, now=20.0)
        assert view.not_trained == {"late": {"l/1": 4 + 4}}
        assert unaccounted(view, one) == {}

    async def test_a_turn_for_a_deleted_trial_is_booked_as_deleted(self, store: SessionStore) -> None:
        await group(store, "g", 1)
        await speak(store, "g.0", 2, partial=True, finish_reason=OPEN)
        await store.delete("g.0", now=9.0, tombstone_s=60.0)
        for _ in range(2):
            with pytest.raises(Gone):
                await speak(store, "g.0", 6, partial=True, finish_reason="cancelled")
        view = await store.runs.view(RUN, now=20.0)
        assert (view.sampled, view.not_trained) == ({"l/1": 6}, {"deleted": {"l/1": 6}})

    async def test_settling_again_and_completing_again_change_nothing(self, store: SessionStore) -> None:
        await finished(store, "g")
        before = await store.runs.view(RUN, now=20.0)
        for _ in range(2):
            await end(store, "g.0", now=11.0)
            await store.settle("nobody", now=12.0)
        assert await store.runs.view(RUN, now=20.0) == before

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
