"""What every session store promises: one suite, run against each. Subclass it where there is a fixture `store`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from steno.contracts.errors import BadRequest, Conflict, Gone, NotFound
from steno.contracts.notes import MOST_NOTES, Note, Notes, merged
from steno.contracts.records import Limits, SamplingPolicy, Timings
from steno_proxy.store.interface import SessionStore
from steno_proxy.store.token_texts import MOST_BYTES, MOST_TOKENIZERS
from tests.support.contracts.list import ListContract, listed, make_group
from tests.support.contracts.recording import END, RecordingContract, record
from tests.support.records.recordings import row, session, turn


async def due(store: SessionStore, now: float) -> list[str]:
    return sorted([found.trial_id async for found in store.due(now=now)])


class StoreContract(ListContract, RecordingContract):
    async def test_what_is_kept_first_is_kept(self, store: SessionStore) -> None:
        first = await store.keep("name of this test", b"one")
        assert await store.keep("name of this test", b"two") == first == b"one"
        assert await store.keep("another name of this test", b"two") == b"two"
        assert await store.kept("name of this test") == b"one" and await store.kept("no name of this test") is None

    # -- texts of tokens

    async def test_texts_of_tokens_that_were_kept_first_stay(self, store: SessionStore) -> None:
        texts = store.token_texts
        assert await texts.get("first") is None and not await texts.touch("first")
        await texts.keep("first", b"one")
        await texts.keep("first", b"two")
        assert await texts.get("first") == b"one" and await texts.touch("first") and await texts.keys() == ["first"]

    async def test_of_many_tokenizers_those_are_kept_that_a_worker_had_last(self, store: SessionStore) -> None:
        texts = store.token_texts
        await texts.keep("used", b"u")
        for number in range(MOST_TOKENIZERS - 1):
            await texts.keep(f"{number}", b"t")
        assert await texts.touch("used")
        for number in range(MOST_TOKENIZERS, MOST_TOKENIZERS + 3):
            await texts.keep(f"{number}", b"t")
        assert await texts.get("used") == b"u" and await texts.get(f"{MOST_TOKENIZERS + 2}") == b"t"
        assert [await texts.touch(f"{number}") for number in range(4)] == [False, False, False, True]

    async def test_texts_of_tokens_take_so_many_bytes_at_most(self, store: SessionStore) -> None:
        texts = store.token_texts
        await texts.keep("all of it", bytes(MOST_BYTES + 1))
        assert await texts.get("all of it") is None
        for name in ("first", "second", "third"):
            await texts.keep(name, name.encode() + bytes(MOST_BYTES // 2 - 16))
        assert not await texts.touch("first") and await texts.touch("second") and await texts.touch("third")
        await texts.keep("whole", bytes(MOST_BYTES))
        assert await texts.touch("whole") and not await texts.touch("second") and not await texts.touch("third")

    # -- sessions

    async def test_a_session_comes_back_as_it_was_registered(self, store: SessionStore) -> None:
        asked = session(
            "full", created_at=1.5, group_id="g", run_id="r", marks=["synthetic"], metadata={"task": "π", "n": [1, None]},
            sampling=SamplingPolicy(force={"temperature": 1.0}, neutralise=True), limits=Limits(max_turns=3, max_wall_s=0.5),
        )  # fmt: skip
        assert await store.register(asked) == asked
        assert await store.session("full") == asked

    async def test_registering_again_returns_what_is_recorded(self, store: SessionStore) -> None:
        await store.register(session("again", metadata={"a": 1}))
        assert (await store.register(session("again", metadata={"a": 2}))).metadata == {"a": 1}

    async def test_a_group_takes_no_session_that_is_not_its_own(self, store: SessionStore) -> None:
        """It was counted as running for ever: nobody told it of that session's end."""
        await store.register(session("g-0"))
        await store.register(session("h-1", group_id="g"))
        for name, taken in (("g", "trial g-0: a session in no group"), ("h", "trial h-1: a session of group g")):
            with pytest.raises(Conflict, match=taken) as refused:
                await store.create_group(*make_group(name, 2))
            assert refused.value.field == "group_id"
            with pytest.raises(NotFound):
                await store.group(name)
        await store.register(session("i-0"))
        await store.delete("i-0", now=1.0, tombstone_s=60.0)
        with pytest.raises(Gone):
            await store.create_group(*make_group("i", 2))
        assert (await store.runs.view("r")).groups.running == 0
        assert sorted(await listed(store)) == ["g-0", "h-1"]

    async def test_an_unknown_session_is_not_found(self, store: SessionStore) -> None:
        one = turn(0)
        for call in (
            store.session("nobody"), store.tail("nobody", 0), store.turns("nobody"), store.path("nobody", [0]),
            store.commit("nobody", one, row(one), now=1.0), store.add_marks("nobody", ["synthetic"]),
            store.complete("nobody", status="completed", **END), store.delete("nobody", now=1.0, tombstone_s=60.0),
            store.group("nobody"), anext(store.events("nobody")),
        ):  # fmt: skip
            with pytest.raises(NotFound):
                await call

    async def test_marks_are_kept_once_each(self, store: SessionStore) -> None:
        await store.register(session("marked"))
        await store.add_marks("marked", ["text_only"])
        await store.add_marks("marked", ["synthetic", "text_only"])
        assert (await store.session("marked")).marks == ["text_only", "synthetic"]

    async def test_notes_are_merged_and_bounded(self, store: SessionStore) -> None:
        await store.register(session("noted"))
        assert await store.notes("noted") is None and await store.notes("nobody") is None
        first = [Note(kind="invalid_request", text=f"π {n}", times=2, at=float(n)) for n in range(MOST_NOTES)]
        await store.note("noted", first)
        expected = merged(Notes(), first)
        assert await store.notes("noted") == expected
        later = [Note(kind="invalid_request", text="π 0", at=99.5), Note(kind="dropped", text='a"b', at=1763832000.123)]
        await store.note("noted", later)
        found = await store.notes("noted")
        assert found == merged(expected, later) and found is not None
        assert found.counts == {"invalid_request": 2 * MOST_NOTES + 1, "dropped": 1}
        assert [(note.text, note.times) for note in found.newest[-2:]] == [("π 0", 3), ('a"b', 1)]
        assert len(found.newest) == MOST_NOTES and found.newest[0].text == "π 2"
        assert (await store.session("noted")).notes is None  # asked for by itself
        await store.complete("noted", status="completed", **END)
        await store.note("noted", later)
        with pytest.raises(NotFound):
            await store.note("nobody", later)
        await store.delete("noted", now=3.0, tombstone_s=60.0)
        with pytest.raises(Gone):
            await store.note("noted", later)
        assert await store.notes("noted") is None

    async def test_a_key_goes_on_to_later_generations_only(self, store: SessionStore) -> None:
        await store.register(session("rotated"))
        assert (await store.session("rotated")).key_generation == 1
        assert [await store.rotate_key("rotated", wanted) for wanted in (None, 2, 5, 3, None)] == [2, 2, 5, 5, 6]
        await store.register(session("rotated"))
        await record(store, "rotated-too", 1)
        await store.rotate_key("rotated-too", None)
        session_, rows = await store.tail("rotated-too", 0)
        assert (session_.key_generation, len(rows)) == (2, 1)
        assert (await store.session("rotated")).key_generation == 6
        with pytest.raises(NotFound):
            await store.rotate_key("nobody", None)

    async def test_a_step_of_the_task_is_told_to_whoever_reads_after_it(self, store: SessionStore) -> None:
        await store.register(session("stepped"))
        assert (await store.session("stepped")).task_step is None
        long = "a step with a long name, and ÄÖÜ: " + "x" * 200
        for name in ("write", "write", long, None, "read"):
            await store.begin_task_step("stepped", name)
            assert (await store.tail("stepped", 0)).session.task_step == name
        await store.register(session("stepped"))
        await record(store, "stepped", 1)
        ended = await store.complete("stepped", status="completed", **END)
        assert ended.task_step == "read" == (await store.session("stepped")).task_step
        with pytest.raises(Gone):
            await store.begin_task_step("stepped", "late")
        with pytest.raises(NotFound):
            await store.begin_task_step("nobody", "write")
        await store.delete("stepped", now=3.0, tombstone_s=60.0)
        with pytest.raises(Gone):
            await store.begin_task_step("stepped", "write")

    # -- completing

    async def test_complete_freezes_and_again_changes_nothing(self, store: SessionStore) -> None:
        await record(store, "done")
        first = await store.complete("done", status="completed", **END)
        assert (first.status, first.reward, first.ended_at, first.metrics) == (
            "completed",
            1.0,
            50.0,
            {"resolved": 1.0},
        )
        assert first.end_reason == "harness"
        assert await store.complete("done", status="completed", **(END | {"now": 99.0})) == first

    async def test_another_reward_or_status_is_a_conflict(self, store: SessionStore) -> None:
        await store.register(session("done"))
        await store.complete("done", status="completed", **(END | {"reward": 0.1}))
        for status, reward in (("completed", 0.2), ("completed", None), ("aborted", 0.1)):
            with pytest.raises(Conflict, match=r"session done has ended with status completed and reward 0\.1$"):
                await store.complete("done", status=status, **(END | {"reward": reward}))
        assert (await store.session("done")).reward == 0.1

    async def test_a_measured_zero_is_not_an_absent_reward(self, store: SessionStore) -> None:
        await store.register(session("zero"))
        await store.register(session("none"))
        assert (await store.complete("zero", status="completed", **(END | {"reward": 0.0}))).reward == 0.0
        assert (await store.complete("none", status="completed", **(END | {"reward": None}))).reward is None

    async def test_a_reward_may_follow_an_end_without_one(self, store: SessionStore) -> None:
        await store.register(session("late"))
        await store.complete("late", status="completed", **(END | {"reward": None, "end_reason": "limit:max_turns"}))
        late = await store.complete("late", status="completed", **(END | {"now": 60.0}))
        assert (late.reward, late.end_reason, late.ended_at) == (1.0, "limit:max_turns", 50.0)

    async def test_a_trial_may_await_its_reward_and_gets_more_metrics_with_it(self, store: SessionStore) -> None:
        await store.register(session("t"))
        awaits = END | {"reward": None, "metrics": {"own": 0.25, "both": 1.0}}
        for _ in range(2):
            ended = await store.complete("t", status="completed", final=False, **awaits)
            assert ended.awaits_reward and ended.ended_at == 50.0 and ended.metrics == awaits["metrics"]
        scored = END | {"metrics": {"both": 2.0, "rank": 1.5}, "now": 60.0}
        for _ in range(2):
            found = await store.complete("t", status="completed", **scored)
            assert not found.awaits_reward and (found.reward, found.ended_at) == (1.0, 50.0)
            assert found.metrics == {"own": 0.25, "both": 2.0, "rank": 1.5}
        assert found == await store.session("t")

    async def test_a_trial_that_awaits_its_reward_may_get_none_or_be_given_up(self, store: SessionStore) -> None:
        for trial_id, status in (("none", "completed"), ("up", "aborted")):
            await store.register(session(trial_id))
            await store.complete(trial_id, status="completed", final=False, **(END | {"reward": None}))
            left = await store.complete(
                trial_id, status=status, **(END | {"reward": None, "metrics": {"m": 1.0}, "now": 60.0})
            )
            assert left.updated_at == 60.0, "whoever watches it sees that"
            assert (left.status, left.awaits_reward, left.metrics) == (status, False, {"resolved": 1.0, "m": 1.0})
            with pytest.raises(Conflict, match=f"ended with status {status} and reward None$"):
                await store.complete(trial_id, status="aborted" if status == "completed" else "completed", **END)

    async def test_a_frozen_session_keeps_partial_turns_and_refuses_others(self, store: SessionStore) -> None:
        await record(store, "frozen", 1)
        await store.complete("frozen", status="aborted", **END)
        late, cut = turn(5), turn(6, partial=True, finish_reason="cancelled")
        with pytest.raises(Gone):
            await store.commit("frozen", late, row(late), now=60.0)
        assert await store.commit("frozen", cut, row(cut), now=60.0) == 1
        assert await store.turns("frozen", start=1) == [cut]

    # -- deleting

    async def test_deleted_means_gone_for_everything(self, store: SessionStore) -> None:
        (one,) = await record(store, "deleted", 1)
        await store.delete("deleted", now=70.0, tombstone_s=600.0)
        for call in (
            store.session("deleted"), store.tail("deleted", 0), store.turns("deleted"), store.path("deleted", [0]),
            store.register(session("deleted")), store.commit("deleted", one, row(one), now=71.0),
            store.commit("deleted", turn(9, partial=True), row(turn(9, partial=True)), now=71.0),
            store.add_marks("deleted", ["synthetic"]), store.complete("deleted", status="completed", **END),
            anext(store.events("deleted")),
        ):  # fmt: skip
            with pytest.raises(Gone):
                await call
        await store.delete("deleted", now=72.0, tombstone_s=600.0)
        await store.mark_delivered("deleted", one.turn_id, 1)
        assert await listed(store) == []

    async def test_expire_drops_ended_sessions_only(self, store: SessionStore) -> None:
        for trial_id, ended in (("old", 100.0), ("new", 200.0)):
            await record(store, trial_id, 1)
            await store.complete(trial_id, status="completed", **(END | {"now": ended}))
        await store.register(session("open", created_at=1.0))
        assert await store.expire(now=250.0, retention_s=100.0) == 1
        assert await store.expire(now=250.0, retention_s=100.0) == 0
        assert sorted(await listed(store)) == ["new", "open"]
        with pytest.raises(NotFound):
            await store.turns("old")

    async def test_an_expired_name_may_live_again(self, store: SessionStore) -> None:
        await record(store, "phoenix", 2)
        await store.complete("phoenix", status="completed", **END)
        await store.expire(now=1_000.0, retention_s=1.0)
        await record(store, "phoenix", 1, seed=7)
        assert (await store.session("phoenix")).counts.turns == 1
        assert await listed(store, status="open") == ["phoenix"]

    async def test_due_are_open_sessions_with_a_limit_of_time_that_is_spent(self, store: SessionStore) -> None:
        limits = {
            "idle": Limits(max_idle_s=10.0),
            "wall": Limits(max_wall_s=20.0),
            "none": Limits(),
            "ended": Limits(max_idle_s=1.0),
        }
        for trial_id, limit in limits.items():
            await store.register(session(trial_id, created_at=100.0, limits=limit))
        assert await due(store, 1_000.0) == []  # none of them has begun
        for trial_id in limits:
            one = turn(0, timings=Timings(queued=1_000.0))
            await store.commit(trial_id, one, row(one), now=1_005.0)
        await store.complete("ended", status="completed", **END)
        assert await due(store, 1_014.0) == []
        assert await due(store, 1_015.0) == ["idle"]
        assert await due(store, 1_015.0) == ["idle"], "until somebody ends it"
        later = turn(1, timings=Timings(queued=1_016.0))
        await store.commit("idle", later, row(later), now=1_018.0)
        assert await due(store, 1_020.0) == ["wall"]
        await store.complete("wall", status="completed", **END)
        await store.delete("none", now=1_021.0, tombstone_s=60.0)
        assert await due(store, 1_027.0) == []
        assert await due(store, 1_028.0) == ["idle"]

    # -- events

    async def test_events_replay_then_follow_until_the_end(self, store: SessionStore) -> None:
        made = await record(store, "watched", 2)
        events = store.events("watched")
        assert [(await anext(events))[1]["turn_id"] for _ in range(2)] == [one.turn_id for one in made]
        following = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        third = turn(2, parent=made[1])
        await store.commit("watched", third, row(third, parent=1), now=1.0)
        cursor, event = await asyncio.wait_for(following, 30)
        assert (event["type"], event["index"], event["turn_id"]) == ("turn", 2, third.turn_id)
        assert event["completion_tokens"] == third.completion_tokens
        last = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        await store.complete("watched", status="completed", **END)
        end, event = await asyncio.wait_for(last, 30)
        assert (event["type"], event["reward"]) == ("completed", 1.0)
        assert await rest_of(events) == []
        assert [at for at, _ in await rest_of(store.events("watched", after=cursor))] == [end]
        assert await rest_of(store.events("watched", after=end)) == []

    async def test_events_resume_after_a_cursor(self, store: SessionStore) -> None:
        made = await record(store, "resumed", 3)
        await store.complete("resumed", status="aborted", **END)
        everything = await rest_of(store.events("resumed"))
        assert [event["type"] for _, event in everything] == ["turn", "turn", "turn", "aborted"]
        after = everything[1][0]
        assert await rest_of(store.events("resumed", after=after)) == everything[2:]
        assert everything[2][1]["turn_id"] == made[2].turn_id
        with pytest.raises(BadRequest):
            await anext(store.events("resumed", after="-1"))

    async def test_a_watcher_sees_the_deletion(self, store: SessionStore) -> None:
        await record(store, "removed", 1)
        events = store.events("removed")
        await anext(events)
        last = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        await store.delete("removed", now=1.0, tombstone_s=60.0)
        assert (await asyncio.wait_for(last, 30))[1]["type"] == "deleted"


async def rest_of(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]
