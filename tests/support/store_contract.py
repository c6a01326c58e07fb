"""What every session store promises: one suite, run against each. Subclass it where there is a fixture `store`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proxy.contracts.errors import BadRequest, Conflict, Gone, NotFound
from proxy.contracts.records import OPEN, ForkReason, Group, Limits, SamplingPolicy, Session, TokenSpan
from proxy.store.base import SessionStore
from tests.support.recordings import conversation, row, session, turn

END: dict[str, Any] = {"reward": 1.0, "end_reason": "harness", "metrics": {"resolved": 1.0}, "now": 50.0}
ALL: dict[str, Any] = {"status": None, "group_id": None, "since": None, "until": None, "cursor": None, "limit": 100}


async def record(store: SessionStore, trial_id: str, turns: int = 3, *, seed: int = 0) -> list[Any]:
    """Register a session and commit a straight conversation. Returns its turns."""
    await store.register(session(trial_id))
    made = conversation(turns, seed=seed)
    for number, (one, its_row) in enumerate(made):
        assert await store.commit(trial_id, one, its_row, now=10.0 + number) == number
    return [one for one, _ in made]


async def listed(store: SessionStore, **filters: Any) -> list[str]:
    return [found.trial_id for found in (await store.list_sessions(**(ALL | filters))).items]


class StoreContract:
    async def test_what_is_kept_first_is_kept(self, store: SessionStore) -> None:
        first = await store.keep("name of this test", b"one")
        assert await store.keep("name of this test", b"two") == first == b"one"
        assert await store.keep("another name of this test", b"two") == b"two"

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
            with pytest.raises(Conflict):
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

    async def test_a_frozen_session_keeps_partial_turns_and_refuses_others(self, store: SessionStore) -> None:
        await record(store, "frozen", 1)
        await store.complete("frozen", status="aborted", **END)
        late, cut = turn(5), turn(6, partial=True, finish_reason="cancelled")
        with pytest.raises(Gone):
            await store.commit("frozen", late, row(late), now=60.0)
        assert await store.commit("frozen", cut, row(cut), now=60.0) == 1
        assert await store.turns("frozen", start=1) == [cut]

    async def test_a_turn_that_was_still_open_is_replaced_by_the_whole_one(self, store: SessionStore) -> None:
        """I3, I5: what was durable when a block closed gives way to the turn; nothing of it is kept beside."""
        await record(store, "open", 1)
        whole = turn(5, constrained=[(3, 9)])
        size = {"completion_ids": whole.completion_ids[:40], "sampling_logprobs": whole.sampling_logprobs[:40]}
        begun = turn(
            5, partial=True, finish_reason=OPEN, reply={"role": "assistant", "content": "so far"}, call_ids={},
            versions=[TokenSpan(version="base/17", start=0, end=10)], constrained=[(3, 9), (9, 10)], **size,
        )  # fmt: skip
        assert await store.commit("open", begun, row(begun), now=60.0) == 1
        assert await store.turns("open", start=1) == [begun]
        later = turn(6)
        assert await store.commit("open", later, row(later), now=61.0) == 2
        before = (await store.session("open")).counts
        assert (before.turns, before.constrained_tokens) == (3, 7)
        assert await store.commit("open", begun, row(begun), now=62.0) == 1
        assert await store.commit("open", whole, row(whole), now=63.0) == 1
        assert await store.commit("open", begun, row(begun), now=64.0) == 1, "too late: the turn is there"
        assert await store.turns("open", start=1) == [whole, later]
        assert (await store.tail("open", 1)).rows == [row(whole), row(later)]
        assert (await store.path("open", [1])).reply == whole.reply
        after = (await store.session("open")).counts
        assert after.completion_tokens - before.completion_tokens == whole.completion_tokens - 10
        assert (after.turns, after.prompt_tokens, after.forks) == (3, before.prompt_tokens, before.forks)
        assert after.constrained_tokens == 6

    async def test_watchers_are_told_of_an_open_turn_when_all_of_it_is_there(self, store: SessionStore) -> None:
        await store.register(session("watched"))
        begun, whole, later = turn(1, partial=True, finish_reason=OPEN), turn(1), turn(2)
        await store.commit("watched", begun, row(begun), now=1.0)
        await store.commit("watched", later, row(later), now=1.0)
        events = store.events("watched")
        first = asyncio.ensure_future(anext(events))
        await store.commit("watched", whole, row(whole), now=2.0)
        seen = [await asyncio.wait_for(first, 10), await anext(events)]
        assert [(event["turn_id"], event["partial"]) for _, event in seen] == [
            (whole.turn_id, False),
            (later.turn_id, False),
        ]
        await store.complete("watched", status="completed", **END)
        assert (await anext(events))[0] == "end"

    async def test_watchers_do_not_wait_for_an_open_turn_that_was_gone_on_from(self, store: SessionStore) -> None:
        """Its proxy died; nothing will replace it."""
        await store.register(session("left-open"))
        left, then = turn(1, partial=True, finish_reason=OPEN), turn(2)
        await store.commit("left-open", left, row(left), now=1.0)
        await store.commit("left-open", then, row(then, parent=0), now=1.0)
        events = store.events("left-open")
        seen = [(await asyncio.wait_for(anext(events), 10))[1] for _ in range(2)]
        assert [event["finish_reason"] for event in seen] == [OPEN, "tool_calls"]

    async def test_a_frozen_session_takes_the_rest_of_an_open_turn_as_partial_only(self, store: SessionStore) -> None:
        await store.register(session("frozen-open"))
        begun, whole, cut = (
            turn(1, partial=True, finish_reason=OPEN), turn(1), turn(1, partial=True, finish_reason="cancelled"),
        )  # fmt: skip
        await store.commit("frozen-open", begun, row(begun), now=1.0)
        await store.complete("frozen-open", status="completed", **END)
        with pytest.raises(Gone):
            await store.commit("frozen-open", whole, row(whole), now=60.0)
        assert await store.commit("frozen-open", cut, row(cut), now=61.0) == 0
        assert await store.turns("frozen-open") == [cut]

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

    # -- the recording

    async def test_turns_come_back_exactly(self, store: SessionStore) -> None:
        made = await record(store, "exact", 5)
        assert await store.turns("exact") == made
        assert await store.turns("exact", start=2, limit=2) == made[2:4]
        assert await store.turns("exact", start=5) == []
        assert await store.turns("exact", limit=0) == []

    async def test_every_field_of_a_turn_survives(self, store: SessionStore) -> None:
        odd = turn(
            3, parent_id="not-hex", fork_reason=ForkReason.DIVERGED, dialect="messages", attempt=2, policy="critic",
            versions=[TokenSpan(version="a/1", start=0, end=2), TokenSpan(version="a/2", start=2, end=9)],
            constrained=[(0, 2), (5, 6)], partial=True, error="the engine gave up", delivered=0,
            asked={"seed": None, "max_completion_tokens": 5, "x": {"y": [1.5, True]}}, law={"logit_bias": {"5": -1.0}},
            messages=[{"role": "user", "content": "lone \ud800 surrogate, \u0000, 😀"}], reply={}, tools=[],
            call_ids={"toolu_x": "own", "other": ""}, options={"template_kwargs": {"enable_thinking": False}},
            thinking_kept=False, completion_ids=b"", sampling_logprobs=b"", timings={"queued": 0.1, "last_token": 0.30000004},
        )  # fmt: skip
        await store.register(session("odd"))
        await store.commit("odd", odd, row(odd), now=1.0)
        assert await store.turns("odd") == [odd]

    async def test_a_repeated_commit_changes_nothing(self, store: SessionStore) -> None:
        made = await record(store, "twice", 3)
        before = await store.tail("twice", 0)
        assert await store.commit("twice", made[1], row(made[1], parent=0), now=99.0) == 1
        assert await store.tail("twice", 0) == before
        await store.complete("twice", status="completed", **END)
        assert await store.commit("twice", made[1], row(made[1], parent=0), now=99.0) == 1

    async def test_counts_and_times_follow_the_turns(self, store: SessionStore) -> None:
        made = await record(store, "counted", 3)
        fork = turn(8, fork_reason=ForkReason.NEW_CONVERSATION, constrained=[(0, 4), (6, 7)])
        await store.commit("counted", fork, row(fork), now=33.5)
        recorded = await store.session("counted")
        assert recorded.counts.model_dump() == {
            "turns": 4,
            "prompt_tokens": sum(len(one.new_prompt_ids) // 4 for one in [*made, fork]),
            "completion_tokens": sum(one.completion_tokens for one in [*made, fork]),
            "constrained_tokens": 5,
            "forks": 1,
        }
        assert (recorded.first_turn_at, recorded.updated_at) == (made[0].timings.queued, 33.5)

    async def test_tail_gives_the_rows_not_seen_yet(self, store: SessionStore) -> None:
        made = await record(store, "tail", 4)
        rows = [row(one, parent=number - 1) for number, one in enumerate(made)]
        assert (await store.tail("tail", 0)).rows == rows
        assert (await store.tail("tail", 3)).rows == rows[3:]
        assert (await store.tail("tail", 4)).rows == []
        assert (await store.tail("tail", 4)).session == await store.session("tail")

    async def test_path_is_the_tokens_of_the_named_turns(self, store: SessionStore) -> None:
        made = await record(store, "path", 5)
        found = await store.path("path", [0, 1, 4])
        assert found.ids == b"".join(made[number].new_prompt_ids + made[number].completion_ids for number in (0, 1, 4))
        assert found.reply == made[4].reply
        assert (await store.path("path", [])).ids == b""
        with pytest.raises(NotFound):
            await store.path("path", [0, 5])

    async def test_what_was_delivered_can_be_said_later(self, store: SessionStore) -> None:
        made = await record(store, "said", 3)
        await store.mark_delivered("said", made[1].turn_id, 17)
        await store.mark_delivered("said", made[1].turn_id, 0)
        await store.mark_delivered("said", "000000000000", 5)
        await store.mark_delivered("nobody", "000000000000", 5)
        assert [one.delivered for one in await store.turns("said")] == [None, 0, None]
        assert await store.commit("said", made[1], row(made[1], parent=0), now=99.0) == 1

    async def test_the_turn_whose_place_another_took_says_so(self, store: SessionStore) -> None:
        made = await record(store, "again", 2)
        for number, fields in enumerate(({"partial": True, "finish_reason": OPEN}, {}), start=2):
            again = turn(2, retry_of=made[1].turn_id, answer_id=made[0].turn_id, choice=number, **fields)
            assert await store.commit("again", again, row(again, parent=0), now=9.0) == 2
        one, two, three = await store.turns("again")
        assert (one.superseded_by, two.superseded_by, three.superseded_by) == (None, again.turn_id, None)
        assert (three.retry_of, three.answer_id, three.choice) == (two.turn_id, one.turn_id, 3)
        assert [found.superseded_by for found in await store.turns("again", start=1, limit=1)] == [again.turn_id]
        await store.mark_delivered("again", two.turn_id, 1)
        assert (await store.turns("again"))[1].superseded_by == again.turn_id

    async def test_the_messages_of_turns_can_be_read_alone(self, store: SessionStore) -> None:
        made = await record(store, "talk", 4)
        expected = [[*one.messages, one.reply] for one in (made[0], made[1], made[3])]
        assert await store.conversation("talk", [0, 1, 3]) == expected
        assert await store.conversation("talk", []) == []
        with pytest.raises(NotFound):
            await store.conversation("talk", [0, 4])

    async def test_an_image_is_kept_once_and_comes_back_wherever_it_was_shown(self, store: SessionStore) -> None:
        """I5: a screenshot that is shown again costs nothing more."""
        await store.register(session("seen"))
        url = "data:image/png;base64," + "iVBORw0K" * 4000

        def shown(*parts: dict[str, Any]) -> list[dict[str, Any]]:
            return [
                {"role": "user", "content": [{"type": "text", "text": "look"}, *parts]},
                {"role": "tool", "content": "x"},
            ]

        inline, closer = {"url": url}, {"url": url, "detail": "high"}
        linked = {"url": "https://example.com/cat.png"}
        kinds: list[list[dict[str, Any]]] = [[inline], [inline, closer, linked], [linked], [closer]]
        made = []
        for number, images in enumerate(kinds):
            messages = shown(*({"type": "image_url", "image_url": image} for image in images))
            made.append(turn(number, parent=made[-1] if made else None, messages=messages))
            its_row = row(made[-1], parent=number - 1)
            assert await store.commit("seen", made[-1], its_row, now=float(number)) == number
        assert await store.turns("seen") == made
        assert await store.conversation("seen", [1]) == [[*made[1].messages, made[1].reply]]
        assert (await store.path("seen", [0, 1])).reply == made[1].reply

    async def test_a_hidden_answer_stays_on_record(self, store: SessionStore) -> None:
        made = await record(store, "shy", 2)
        await store.hide("shy", made[0].turn_id)
        await store.hide("shy", made[0].turn_id)
        await store.hide("shy", "000000000000")
        assert [await store.hidden("shy", one.turn_id) for one in made] == [True, False]
        assert not await store.hidden("shy", "000000000000")
        assert len(await store.turns("shy")) == 2

    async def test_commits_at_once_get_consecutive_numbers(self, store: SessionStore) -> None:
        await store.register(session("rush"))
        made = [turn(number, seed=5) for number in range(24)]
        numbers = await asyncio.gather(*(store.commit("rush", one, row(one), now=1.0) for one in made))
        assert sorted(numbers) == list(range(24))
        assert [one.turn_id for one in await store.turns("rush")] == [
            one.turn_id for one in sorted(made, key=lambda one: one.index)
        ]

    async def test_many_turns_are_read_whole(self, store: SessionStore) -> None:
        await store.register(session("long"))
        made = [turn(number, seed=9, text_bytes=50) for number in range(150)]
        for one in made:
            await store.commit("long", one, row(one), now=1.0)
        assert await store.turns("long") == made
        assert await store.turns("long", start=60, limit=80) == made[60:140]

    # -- groups and lists

    async def test_a_group_is_created_with_its_sessions(self, store: SessionStore) -> None:
        group, sessions = make_group("g1", 4)
        assert await store.create_group(group, sessions) == group
        assert await store.group("g1") == group
        assert await listed(store, group_id="g1") == group.trial_ids

    async def test_the_same_group_again_returns_the_recorded_one(self, store: SessionStore) -> None:
        group, sessions = make_group("g1", 3)
        await store.create_group(group, sessions)
        again, others = make_group("g1", 3, prefix="other", created_at=99.0)
        assert await store.create_group(again, others) == group
        assert await listed(store) == group.trial_ids
        with pytest.raises(Conflict):
            await store.create_group(group.model_copy(update={"size": 5}), sessions)

    async def test_an_interrupted_creation_of_a_group_can_be_repeated(self, store: SessionStore) -> None:
        group, sessions = make_group("g1", 4)
        await store.create_group(group, sessions)
        await store.complete("g1-0", status="completed", **END)
        await store.expire(now=100.0, retention_s=1.0)  # one of them is not there (any more)
        await store.create_group(group, sessions)
        assert await listed(store, group_id="g1", status="open") == group.trial_ids

    async def test_a_group_goes_with_the_last_of_its_sessions(self, store: SessionStore) -> None:
        group, sessions = make_group("g1", 2)
        await store.create_group(group, sessions)
        await store.delete("g1-0", now=1.0, tombstone_s=60.0)
        assert await store.group("g1") == group
        await store.delete("g1-1", now=1.0, tombstone_s=60.0)
        with pytest.raises(NotFound):
            await store.group("g1")

    async def test_lists_are_in_order_of_creation_and_filtered(self, store: SessionStore) -> None:
        for number, trial_id in enumerate(("c", "a", "b")):
            await store.register(
                session(trial_id, created_at=100.0 + number, group_id="g" if trial_id != "a" else None)
            )
        await store.complete("c", status="completed", **END)
        await store.complete("a", status="aborted", **END)
        assert await listed(store) == ["c", "a", "b"]
        assert await listed(store, status="open") == ["b"]
        assert await listed(store, status="completed", group_id="g") == ["c"]
        assert await listed(store, group_id="g") == ["c", "b"]
        assert await listed(store, since=101.0) == ["a", "b"]
        assert await listed(store, until=102.0) == ["c", "a"]
        assert await listed(store, since=101.0, until=102.0) == ["a"]
        assert (await store.stats())["sessions"] == {"open": 1, "completed": 1, "aborted": 1}

    async def test_pages_neither_skip_nor_repeat_under_inserts(self, store: SessionStore) -> None:
        for number in range(0, 60, 2):
            await store.register(session(f"t{number:03}", created_at=1.0 + number // 20))
        seen: list[str] = []
        cursor = None
        for page in range(100):
            found = await store.list_sessions(**(ALL | {"cursor": cursor, "limit": 7}))
            seen += [one.trial_id for one in found.items]
            await store.register(session(f"early{page:03}", created_at=0.5))
            await store.register(session(f"t{2 * page + 1:03}", created_at=1.0 + (2 * page + 1) // 20))
            if found.items:
                await store.complete(found.items[0].trial_id, status="completed", **END)
            cursor = found.next_cursor
            if cursor is None:
                break
        assert seen == sorted(set(seen))
        assert {f"t{number:03}" for number in range(0, 60, 2)} <= set(seen)

    async def test_many_sessions_of_one_instant_are_paged_through(self, store: SessionStore) -> None:
        names = [f"t{number:03}" for number in range(230)]
        await asyncio.gather(*(store.register(session(name, created_at=5.0)) for name in names))
        first = await store.list_sessions(**(ALL | {"limit": 120}))
        rest = await store.list_sessions(**(ALL | {"limit": 120, "cursor": first.next_cursor}))
        assert [one.trial_id for one in [*first.items, *rest.items]] == names
        assert rest.next_cursor is None

    @pytest.mark.parametrize("cursor", ["", "!", "AAAA", "zzzzzzzzzz", "é", "kqFhoWI"])
    async def test_a_bad_cursor_is_a_bad_request(self, store: SessionStore, cursor: str) -> None:
        with pytest.raises(BadRequest):
            await store.list_sessions(**(ALL | {"cursor": cursor}))

    # -- events

    async def test_events_replay_then_follow_until_the_end(self, store: SessionStore) -> None:
        made = await record(store, "watched", 2)
        events = store.events("watched")
        assert [(await anext(events))[1]["turn_id"] for _ in range(2)] == [one.turn_id for one in made]
        following = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        third = turn(2, parent=made[1])
        await store.commit("watched", third, row(third, parent=1), now=1.0)
        cursor, event = await asyncio.wait_for(following, 3)
        assert (event["type"], event["index"], event["turn_id"]) == ("turn", 2, third.turn_id)
        assert event["completion_tokens"] == third.completion_tokens
        last = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        await store.complete("watched", status="completed", **END)
        end, event = await asyncio.wait_for(last, 3)
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
        assert (await asyncio.wait_for(last, 3))[1]["type"] == "deleted"


def make_group(group_id: str, size: int, *, prefix: str = "", created_at: float = 7.0) -> tuple[Group, list[Session]]:
    names = [f"{prefix or group_id}-{number}" for number in range(size)]
    group = Group(group_id=group_id, run_id="r", task={"repo": "x"}, size=size, trial_ids=names, created_at=created_at)
    return group, [session(name, created_at=created_at, group_id=group_id, run_id="r") for name in names]


async def rest_of(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]
