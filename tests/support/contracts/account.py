"""What every store promises of a run's trials and tokens (I4): which get ready, what is left out and booked, what comes too late.
One suite, run against each."""

from __future__ import annotations

import asyncio
import sys

import pytest

from steno.contracts.errors import Conflict, Gone, NotFound
from steno.contracts.records import OPEN
from steno.contracts.runs.leases import RunView
from steno.contracts.runs.training_steps import TrainingStep
from steno_proxy.store.borrowing import borrow_turns
from steno_proxy.store.interface import RecordedOtherwise, SessionStore
from tests.support.records.groups import RUN, again, end, finished, group, lease, speak, unaccounted
from tests.support.records.recordings import session


async def delete_both(store: SessionStore) -> None:
    """Sessions of the group g. Their tombstones are over at once."""
    for trial_id in ("g.0", "g.1"):
        await store.delete(trial_id, now=21.0, tombstone_s=0.001)


class AccountContract:
    # -- trials that score recorded ones anew

    async def test_borrowed_tokens_are_counted_apart_and_the_origins_run_does_not_change(
        self, store: SessionStore
    ) -> None:
        await group(store, "g", 3)
        await speak(store, "g.0", 4, version="l/1")
        await speak(store, "g.0", 2, version="l/2", number=1)
        await speak(store, "g.1", 5)
        await end(store, "g.0", 0.0)
        await end(store, "g.1", 1.0)
        await end(store, "g.2", None, status="aborted")
        before = await store.runs.view(RUN, now=20.0)
        names = await again(store, "h", "g", 3, run_id="again")
        for name, reward in zip(names[:2], (1.0, None), strict=True):
            found = await store.session(name)
            assert found.rescore_of == f"g.{name[-1]}"
            await borrow_turns(store, found, now=21.0)
            await borrow_turns(store, found, now=22.0)
            await end(store, name, reward, now=23.0)
        assert await lease(store, 24.0, run_id="again") == []
        await end(store, "h.2", None, status="aborted", now=23.0)
        [one] = await lease(store, 24.0, run_id="again")
        assert one.tokens == {"h.0": {"l/1": 4, "l/2": 2}}
        assert [(found.trial_id, found.reward) for found in one.trials] == [("h.0", 1.0)]
        view = await store.runs.view("again", now=24.0)
        assert (view.sampled, view.borrowed) == ({}, {"l/1": 9, "l/2": 2})
        assert view.not_trained == {"unscored": {"l/1": 5}} and view.known
        assert unaccounted(view, one) == {}
        assert await store.runs.view(RUN, now=20.0) == before

    async def test_what_was_borrowed_outlives_its_origin_and_is_lost_with_its_own_session_only(
        self, store: SessionStore
    ) -> None:
        await finished(store, "g", tokens=5)
        await again(store, "h", "g", 2, run_id="again")
        found = await store.session("h.0")
        await borrow_turns(store, found, now=21.0)
        turns = await store.turns("g.0")
        for trial_id in ("g.0", "g.1"):
            await store.delete(trial_id, now=22.0, tombstone_s=60.0)
        with pytest.raises(Conflict, match=r"trial g\.1, which h\.1 scores anew, is not on record any more"):
            await borrow_turns(store, await store.session("h.1"), now=22.0)
        await end(store, "h.0", now=23.0)
        await end(store, "h.1", None, status="aborted", now=23.0)
        assert await store.turns("h.0") == turns
        await store.delete("h.0", now=24.0, tombstone_s=60.0)
        view = await store.runs.view("again", now=25.0)
        assert (view.groups.empty, view.borrowed, view.not_trained) == (1, {"l/1": 5}, {"deleted": {"l/1": 5}})

    # -- what a trainer tells of its steps

    async def test_steps_are_kept_in_order_and_values_of_the_same_name_replaced(self, store: SessionStore) -> None:
        runs = store.runs
        for number in (3, 1, 10):
            await runs.keep_step(RUN, TrainingStep(step=number, version=f"a/{number}", values={"loss": number / 10}))
        await runs.keep_step(RUN, TrainingStep(step=3, values={"eval/reward": 0.1 + 0.2, "loss": None}))
        assert [(found.step, found.values) for found in await runs.steps(RUN, start=0, limit=9)] == [
            (1, {"loss": 0.1}), (3, {"loss": None, "eval/reward": 0.1 + 0.2}), (10, {"loss": 1.0}),
        ]  # fmt: skip
        [of_three] = await runs.steps(RUN, start=2, limit=1)
        assert (of_three.step, of_three.version) == (3, "a/3"), "what the second post left out stays"
        again = await runs.keep_step(
            RUN, TrainingStep(step=3, version="b/3", values={"loss": 0.5}, ledger={"sampled": 7})
        )
        assert (again.version, again.values["loss"], again.ledger) == ("b/3", 0.5, {"sampled": 7})
        assert await runs.steps(RUN, start=11, limit=9) == await runs.steps("another", start=0, limit=9) == []

    async def test_posts_of_one_step_at_the_same_time_lose_nothing(self, store: SessionStore) -> None:
        posts = [TrainingStep(step=1, values={f"v{number}": float(number)}) for number in range(8)]
        await asyncio.gather(*(store.runs.keep_step(RUN, post) for post in posts))
        [kept] = await store.runs.steps(RUN, start=0, limit=9)
        assert kept.values == {f"v{number}": float(number) for number in range(8)}

    async def test_of_a_run_only_the_newest_steps_are_kept(
        self, store: SessionStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = sys.modules[type(store.runs).__module__]
        monkeypatch.setattr(module, "MOST_STEPS", 3)
        for number in range(5):
            await store.runs.keep_step(RUN, TrainingStep(step=number))
        assert [found.step for found in await store.runs.steps(RUN, start=0, limit=9)] == [2, 3, 4]

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

    async def test_a_group_that_is_made_again_after_it_was_deleted_while_leased_is_leased_again(
        self, store: SessionStore
    ) -> None:
        await finished(store, "g")
        [first] = await lease(store)
        await delete_both(store)
        await store.runs.acknowledge(first.lease_id, now=22.0)
        await asyncio.sleep(0.01)
        await store.expire(now=25.0, retention_s=1e9)
        made = await group(store, "g", created_at=30.0, deadline_s=10.0)
        await speak(store, "g.1", 7)
        await end(store, "g.1", now=35.0)
        assert await store.runs.acknowledge(first.lease_id, now=36.0) is None, "repeated"
        [again] = await lease(store, 41.0)
        assert (again.group, again.tokens, again.left_out) == (made, {"g.1": {"l/1": 7}}, {"g.0": "late"})
        assert unaccounted(await store.runs.view(RUN, now=42.0), first, again) == {}
        await store.runs.acknowledge(again.lease_id, now=43.0)

    async def test_a_group_that_is_made_again_while_it_is_leased_belongs_to_that_lease(
        self, store: SessionStore
    ) -> None:
        await finished(store, "g")
        [first] = await lease(store)
        await delete_both(store)
        await asyncio.sleep(0.01)
        await store.expire(now=25.0, retention_s=1e9)
        await group(store, "g", created_at=30.0)
        await speak(store, "g.0", 7)
        await end(store, "g.0", now=35.0)
        await store.runs.acknowledge(first.lease_id, now=36.0)
        await group(store, "g", created_at=30.0)  # its launcher starts again
        await speak(store, "g.1", 7)
        await end(store, "g.1", now=37.0)
        assert (await store.runs.view(RUN, now=38.0)).groups.running == 0
        assert await lease(store, 39.0) == []

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
        async def finish(trial_id: str) -> None:
            await speak(store, trial_id, 5)
            await end(store, trial_id)

        kept = await group(store, "kept", 120)  # more than are looked at together
        await asyncio.gather(*map(finish, kept.trial_ids))
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

    async def test_what_a_turn_samples_after_it_was_gone_on_from_elsewhere_is_late(self, store: SessionStore) -> None:
        """Its trial goes on; what is on record of the turn is what a trainer gets of it."""
        await group(store, "g", 1)
        cut = {"partial": True, "finish_reason": "cancelled"}
        for tokens in (2, 4):
            await speak(store, "g.0", tokens, partial=True, finish_reason=OPEN)
        with pytest.raises(RecordedOtherwise):  # the proxy that ends it read it before it grew
            await speak(store, "g.0", 2, **cut)
        await speak(store, "g.0", 4, **cut)
        for tokens, state in ((5, {"partial": True, "finish_reason": OPEN}), (7, {}), (7, cut)):
            with pytest.raises(RecordedOtherwise):
                await speak(store, "g.0", tokens, **state)
        view = await store.runs.view(RUN, now=9.0)
        assert (view.sampled, view.not_trained) == ({"l/1": 3}, {"late": {"l/1": 3}}), "once"
        await end(store, "g.0")
        [one] = await lease(store)
        assert one.tokens == {"g.0": {"l/1": 4}}
        assert unaccounted(await store.runs.view(RUN, now=20.0), one) == {}
        await store.register(session("alone"))  # nobody accounts for it
        await speak(store, "alone", 2, **cut)
        with pytest.raises(RecordedOtherwise):
            await speak(store, "alone", 3)
        alone = await store.runs.view(None, now=20.0)
        assert (alone.sampled, alone.not_trained) == ({}, {})

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
