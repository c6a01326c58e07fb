"""A recording of turns that the store had confirmed and has lost since: noticed, and read anew, whatever runs meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from steno.contracts.chat import CanonicalRequest, Job
from steno.contracts.records import ForkReason
from steno_proxy.pace import Pace
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.session_state import Recording
from steno_proxy.store.interface import ParentLost
from steno_proxy.turns import retry_matching
from steno_proxy.turns.continuation import fork_reason_now, plan
from steno_proxy.turns.retry_matching import RequestIdentity
from tests.support.records.losing import LosingStore
from tests.unit.proxy.session_cache.test_recorder import USER, open_turn, recorder, turn_and_row


def name(number: int) -> str:
    return turn_and_row(number)[0].turn_id


async def spoken(turns: int, *, kept: int) -> tuple[LosingStore, Recorder, Recording]:
    """A trial of so many turns, of which the store is to lose all but the first `kept`."""
    store = LosingStore()
    here = recorder(store)
    recording = await here.enter("t")
    for number in range(turns):
        if number == kept:
            store.mark("t")
        await here.commit(recording, *turn_and_row(number))
    return store, here, recording


@pytest.mark.parametrize("kept", [0, 1, 2])
async def test_turns_that_the_store_has_lost_are_forgotten(kept: int) -> None:
    store, here, _ = await spoken(3, kept=kept)
    store.lose("t")
    again = await here.enter("t")
    assert again.tree.ids == [name(number) for number in range(kept)]
    await here.commit(again, *turn_and_row(3))
    assert (await here.enter("t")) is again and again.tree.ids[kept:] == [name(3)]


async def test_as_many_turns_as_before_may_be_others() -> None:
    store, here, _ = await spoken(2, kept=1)
    store.lose("t")
    there = recorder(store)
    await there.commit(await there.enter("t"), *turn_and_row(7))
    assert (await here.enter("t")).tree.ids == [name(0), name(7)]


async def test_an_open_turn_of_another_replica_may_be_another_by_now() -> None:
    """As long as the one that was lost, and open as well: its id alone tells."""
    store = LosingStore()
    one, two = recorder(store), recorder(store)
    here = await one.enter("t")
    await one.commit(here, *turn_and_row(0))
    store.mark("t")
    await one.commit(here, *open_turn(1))
    await one.commit(here, *turn_and_row(2))
    assert (await two.enter("t")).open_elsewhere.keys() == {1}
    store.lose("t")
    again = await one.enter("t")
    assert again.tree.ids == [name(0)]
    await one.commit(again, *open_turn(7))
    there = await two.enter("t")
    assert there.tree.ids == [name(0), name(7)] and there.open_elsewhere.keys() == {1}


async def test_requests_that_run_stay_known_where_turns_are_forgotten() -> None:
    """Whoever ends the session must find them. Nobody needs the rest of what was known."""
    store, here, recording = await spoken(2, kept=1)
    recording.replaying.add("a turn of its origin")
    recording.entering += 1
    store.lose("t")
    assert await here.enter("t") is recording and recording.turns == 1 and recording.replaying
    recording.entering -= 1
    store.mark("t")
    await here.commit(recording, *turn_and_row(2))
    store.lose("t")
    again = await here.enter("t")
    assert again is not recording and (again.turns, again.replaying) == (1, set())
    assert here.trees() == (1, again.cost_bytes)


async def test_a_commit_that_gets_a_lower_number_than_turns_are_known_says_that_some_are_lost() -> None:
    store, here, recording = await spoken(3, kept=1)
    store.lose("t")
    recording.entering += 1
    assert await here.commit(recording, *turn_and_row(7)) == 1
    assert recording.turns == 0, "to be read anew"
    assert (await here.enter("t")).tree.ids == [name(0), name(7)]


async def test_an_open_turn_that_was_lost_and_comes_on_record_under_another_number() -> None:
    store, here, recording = await spoken(1, kept=1)
    store.mark("t")
    recording.entering += 1
    await here.commit(recording, *open_turn(1))
    store.lose("t")
    there = recorder(store)
    await there.commit(await there.enter("t"), *turn_and_row(7))
    assert await here.commit(recording, *turn_and_row(1)) == 2
    assert (recording.open_here, recording.turns) == ({}, 0)
    again = await here.enter("t")
    assert (again.tree.ids, again.tree.finishes) == ([name(0), name(7), name(1)], ["stop"] * 3)


async def test_a_turn_whose_parent_is_lost_is_not_recorded_and_its_tree_is_read_anew() -> None:
    store, here, recording = await spoken(2, kept=1)
    recording.entering += 1
    turn, row = turn_and_row(7)
    turn, row = turn.model_copy(update={"parent_id": name(1)}), msgspec.structs.replace(row, parent=1)
    store.lose("t")
    with pytest.raises(ParentLost) as told:
        await here.commit(recording, turn, row)
    assert told.value.retryable and told.value.code == "store_unavailable"
    assert recording.turns == 0 and len(await store.turns("t")) == 1
    assert (await here.enter("t")).tree.ids == [name(0)]


async def test_what_was_lost_before_it_could_be_sealed_is_not_sealed() -> None:
    """Nor is another turn that has its number by now."""
    store = LosingStore()
    one, two = recorder(store), recorder(store)
    here = await one.enter("t")
    store.mark("t")
    await one.commit(here, *open_turn(0))
    for taken in (False, True):
        there = await two.enter("t")
        there.entering += 1
        store.lose("t")
        if taken:
            await one.commit(await one.enter("t"), *open_turn(7))
        await two.seal(there, 0)
        assert there.tree.ids == [name(7)][: int(taken)]
        assert [turn.finish_reason for turn in await store.turns("t")] == ["open"][: int(taken)]
        if not taken:
            await one.commit(await one.enter("t"), *open_turn(0))


async def test_a_retry_is_not_answered_with_the_turn_that_has_the_number_of_its_own_by_now() -> None:
    """Lost since the tree was read."""
    store = LosingStore()
    here = recorder(store)
    recording = await here.enter("t")
    store.mark("t")
    asked = CanonicalRequest("chat", "", Job(messages=[USER]), asked={})
    found = await plan(here, recording, asked.job, Pace())
    turn, row = turn_and_row(1)
    await here.commit(recording, turn, msgspec.structs.replace(row, tools=found.tools, options=found.options))
    sought = RequestIdentity(asked, found)
    on_record = await retry_matching.on_record(here, recording, sought, 1.0)
    assert on_record is not None and on_record.turns[0].turn_id == name(1)
    store.lose("t")
    elsewhere = recorder(store)
    await elsewhere.commit(await elsewhere.enter("t"), *turn_and_row(2))
    assert await retry_matching.on_record(here, recording, sought, 1.0) is None


async def test_a_tree_that_is_about_to_be_read_anew_does_not_change_why_a_turn_forked() -> None:
    _, here, recording = await spoken(1, kept=1)
    other = Job(messages=[{"role": "user", "content": "something else"}])
    found = await plan(here, recording, other, Pace())
    assert found.fork_reason is ForkReason.NEW_CONVERSATION
    recording.reset()
    assert fork_reason_now(recording, found) is ForkReason.NEW_CONVERSATION
