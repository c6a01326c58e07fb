"""What every session store promises of turns: whole, open, and as they are read back. Part of `store_contract`."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from steno.contracts.errors import Gone, NotFound
from steno.contracts.records import OPEN, ForkReason, TokenSpan, TurnAnnotation, halves_to_bytes
from steno_proxy.store.borrowing import borrow_turns
from steno_proxy.store.interface import ParentLost, RecordedOtherwise, SessionStore
from tests.support.records.recordings import conversation, row, session, turn

END: dict[str, Any] = {"reward": 1.0, "end_reason": "harness", "metrics": {"resolved": 1.0}, "now": 50.0}


async def record(store: SessionStore, trial_id: str, turns: int = 3, *, seed: int = 0) -> list[Any]:
    """Register a session and commit a straight conversation. Returns its turns."""
    await store.register(session(trial_id))
    made = conversation(turns, seed=seed)
    for number, (one, its_row) in enumerate(made):
        assert await store.commit(trial_id, one, its_row, now=10.0 + number) == number
    return [one for one, _ in made]


class RecordingContract:
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
            replayed=7, tokenizer="00ff" * 4,
        )  # fmt: skip
        await store.register(session("odd"))
        await store.commit("odd", odd, row(odd), now=1.0)
        assert await store.turns("odd") == [odd]

    async def test_what_a_trainer_saw_is_read_with_the_turns_and_goes_with_them(self, store: SessionStore) -> None:
        made = await record(store, "seen", 3)
        first = TurnAnnotation(step=4, version="a/4", advantage=-0.5, differences=halves_to_bytes([0.25, math.nan]))
        newer = TurnAnnotation(step=5, differences=halves_to_bytes([-1.5, 0.0]))
        await store.annotate("seen", {made[0].turn_id: first, made[2].turn_id: first})
        await store.annotate("seen", {made[2].turn_id: newer})
        assert [turn.annotation for turn in await store.turns("seen")] == [first, None, newer]
        assert [turn.annotation for turn in await store.turns("seen", start=1)] == [None, newer]
        await store.complete("seen", status="completed", **END)
        await store.annotate("seen", {made[1].turn_id: first})
        assert [turn.annotation for turn in await store.turns("seen")] == [first, first, newer]
        await store.delete("seen", now=60.0, tombstone_s=60.0)
        with pytest.raises(Gone):
            await store.annotate("seen", {made[1].turn_id: first})
        with pytest.raises(NotFound):
            await store.annotate("never", {made[1].turn_id: first})

    async def test_borrowed_turns_are_the_same_turns(self, store: SessionStore) -> None:
        await record(store, "origin", 4)
        odd = turn(
            9,
            parent_id="not-hex",
            partial=True,
            completion_ids=b"",
            sampling_logprobs=b"",
            call_ids={"toolu_x": "own", "o": ""},
        )
        await store.commit("origin", odd, row(odd), now=1.0)
        taken = [turn(20 + number, seed=4) for number in range(3)]
        for one in taken:
            await store.commit("origin", one, row(one), now=2.0)
        for earlier in taken[:2]:
            await store.supersede("origin", earlier.turn_id, taken[2].turn_id)
        await store.supersede("origin", taken[0].turn_id, odd.turn_id)
        await store.supersede("origin", "0123456789ab", odd.turn_id)
        await store.complete("origin", status="completed", **END)
        made = await store.turns("origin")
        assert [one.superseded_by for one in made[5:]] == [taken[2].turn_id, taken[2].turn_id, None]
        assert (made[7].retry_of, made[4].retry_of) == (taken[0].turn_id, taken[0].turn_id)
        later = session("again", created_at=1_800_000_000.0, rescore_of="origin")
        await store.register(later)
        await store.commit("again", made[0], row(made[0]), now=3.0)  # as one that was interrupted
        for _ in range(2):
            await borrow_turns(store, await store.session("again"), now=4.0)
            assert await store.turns("again") == made
        counts = (await store.session("again")).counts
        assert counts == (await store.session("origin")).counts
        assert len((await store.tail("again", 0)).rows) == len(made)

    async def test_a_repeated_commit_changes_nothing(self, store: SessionStore) -> None:
        made = await record(store, "twice", 3)
        before = await store.tail("twice", 0)
        assert await store.commit("twice", made[1], row(made[1], parent=0), now=99.0) == 1
        assert await store.tail("twice", 0) == before
        await store.complete("twice", status="completed", **END)
        assert await store.commit("twice", made[1], row(made[1], parent=0), now=99.0) == 1

    async def test_a_turn_is_refused_whose_parent_is_not_on_record_under_its_number(self, store: SessionStore) -> None:
        """I2: the store has lost a parent that it had confirmed. Its number may be another turn's by now, or this turn's own."""
        made = await record(store, "orphan", 2)
        before = await store.session("orphan"), await store.turns("orphan")
        lost = turn(7, seed=1)
        for parent, number in ((lost, 2), (lost, 1), (made[0], 1), (made[1], 0)):
            for state in ({}, {"partial": True, "finish_reason": OPEN}):
                child = turn(8, parent=parent, **state)
                with pytest.raises(ParentLost, match=f"turn {parent.turn_id}, number {number}, .* is not on record"):
                    await store.commit("orphan", child, row(child, parent=number), now=99.0)
        assert (await store.session("orphan"), await store.turns("orphan")) == before
        assert await store.commit("orphan", child, row(child), now=99.0) == 2, "a root has none"
        ended = turn(8, parent=made[1])
        assert await store.commit("orphan", ended, row(ended, parent=1), now=99.0) == 2

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

    # -- turns that are open

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
        with pytest.raises(RecordedOtherwise):  # too late: the turn is there
            await store.commit("open", begun, row(begun), now=64.0)
        assert await store.turns("open", start=1) == [whole, later]
        assert (await store.tail("open", 1)).rows == [row(whole), row(later)]
        assert (await store.path("open", [1])).reply == whole.reply
        after = (await store.session("open")).counts
        assert after.completion_tokens - before.completion_tokens == whole.completion_tokens - 10
        assert (after.turns, after.prompt_tokens, after.forks) == (3, before.prompt_tokens, before.forks)
        assert after.constrained_tokens == 6

    async def test_what_is_on_record_of_a_turn_that_was_ended_elsewhere_stays_and_its_own_proxy_is_told(
        self, store: SessionStore
    ) -> None:
        """I1 to I4: a request at another replica has gone on from what was there of it."""
        await store.register(session("left"))
        cut = {
            "completion_ids": bytes(40),
            "sampling_logprobs": bytes(40),
            "versions": [TokenSpan(version="a", start=0, end=10)],
        }
        begun, sealed, whole, longer = (
            turn(1, partial=True, finish_reason=OPEN, **cut), turn(1, partial=True, finish_reason="cancelled", **cut),
            turn(1), turn(1, partial=True, finish_reason="cancelled"),
        )  # fmt: skip
        for one in (begun, sealed, sealed):
            assert await store.commit("left", one, row(one), now=1.0) == 0, "said again, it has succeeded"
        before = await store.session("left")
        for late in (whole, longer, begun, turn(1, partial=True, finish_reason=OPEN)):
            with pytest.raises(RecordedOtherwise, match=f"turn {whole.turn_id} ends on record after 10 tokens") as told:
                await store.commit("left", late, row(late), now=2.0)
            assert told.value.recorded_tokens == 10
        assert (await store.session("left"), await store.turns("left")) == (before, [sealed])

    async def test_what_is_on_record_of_an_open_turn_gets_no_shorter(self, store: SessionStore) -> None:
        """I3, I4: the proxy that ends it read it before it grew."""
        await store.register(session("grown"))
        grown = turn(1, partial=True, finish_reason=OPEN)
        shorter = turn(1, partial=True, finish_reason="cancelled", completion_ids=bytes(8), sampling_logprobs=bytes(8))
        await store.commit("grown", grown, row(grown), now=1.0)
        with pytest.raises(RecordedOtherwise):
            await store.commit("grown", shorter, row(shorter), now=2.0)
        assert await store.turns("grown") == [grown]

    async def test_watchers_are_told_of_an_open_turn_when_all_of_it_is_there(self, store: SessionStore) -> None:
        await store.register(session("watched"))
        begun, whole, later = turn(1, partial=True, finish_reason=OPEN), turn(1), turn(2)
        await store.commit("watched", begun, row(begun), now=1.0)
        await store.commit("watched", later, row(later), now=1.0)
        events = store.events("watched")
        first = asyncio.ensure_future(anext(events))
        await store.commit("watched", whole, row(whole), now=2.0)
        seen = [await asyncio.wait_for(first, 60), await anext(events)]
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
        seen = [(await asyncio.wait_for(anext(events), 60))[1] for _ in range(2)]
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
