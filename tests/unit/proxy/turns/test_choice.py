"""What becomes of the writes of a choice when nobody waits for them any more, and of tokens that nobody has looked at."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from steno.contracts.chat import Sampling, ToolCallPiece
from steno.contracts.errors import EngineFailed, Gone, StenoError, StoreUnavailable
from steno.contracts.records import floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import Delta, Finish, Started
from steno_proxy import metrics
from steno_proxy.pace import Pace
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.store.interface import RecordedOtherwise
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.turns.continuation import plan
from steno_proxy.turns.retry_matching import RequestIdentity, on_record
from tests.support.records.choices import TURN, Said, stream


class Slow(MemoryStore):
    """Turns come on record, or fail to, when `go` is set."""

    def __init__(self, failure: Exception | None) -> None:
        super().__init__()
        self.failure, self.entered, self.go = failure, asyncio.Event(), asyncio.Event()

    async def commit(self, *args: Any, **kwargs: Any) -> int:
        self.entered.set()
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        return await super().commit(*args, **kwargs)


async def left(said: Said, store: Slow, waiting: asyncio.Task[None]) -> list[str]:
    """Whoever waits goes away in the middle of the write, which then ends. Returns: what the loop complains of."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(str(about["message"])))
    await store.entered.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    store.go.set()
    write = said.choice.commit or said.choice.saving
    assert write is not None
    await asyncio.wait({write})
    said.choice.commit = said.choice.saving = None
    del write
    await asyncio.sleep(0)
    gc.collect()
    return complaints


@pytest.mark.parametrize("still_open", [True, False])
async def test_a_write_that_fails_when_its_waiter_has_left_is_nobodys_business(still_open: bool) -> None:
    store = Slow(Gone("session trial is closed"))
    said = await spoken(store)
    write = said.choice.saved() if still_open else said.choice.committed(None)
    assert await left(said, store, asyncio.create_task(write)) == []


async def test_a_write_goes_on_to_its_end_when_its_waiter_has_left() -> None:
    store = Slow(None)
    said = await spoken(store)
    assert await left(said, store, asyncio.create_task(said.choice.committed(None))) == []
    assert [turn.completion_tokens for turn in await store.turns("trial")] == [1]


async def test_what_arrived_and_nobody_looked_at_is_of_a_turn_that_has_begun_else_late() -> None:
    """I4."""
    before = metrics.LATE_TOKENS._value.get()
    for looked_at, begun in ((True, True), (True, False), (False, False)):
        said = await Said.begin()
        started = Started(1, 0, ids_to_bytes([1]), 1, b"", Sampling())
        said.choice.stream.deliver(started)
        for token in (7, 8):
            said.choice.stream.deliver(Delta(1, ids_to_bytes([token]), floats_to_bytes([-0.5]), "run/1", "x"))
        if looked_at:
            first, *untaken = await said.choice.stream.next()
            said.choice.transcript.take(first)
            said.choice.stream.put_back(untaken)
            said.choice.facts.started = 1.0 if begun else None
        said.choice.cut_off("left")
        turns = await said.turns(EngineFailed("gone"))
        assert [(turn.partial, turn.completion_tokens) for turn in turns] == ([(True, 2)] if begun else [])
    assert metrics.LATE_TOKENS._value.get() - before == 4


async def test_a_break_keeps_the_blocks_that_were_closed_and_all_that_was_sampled() -> None:
    """I3, I4: the reply on record is what the client has, and the path is as long as its tokens."""
    said = await Said.begin()
    said.hear(delta(7, content="a"), delta(8, tool_calls=[ToolCallPiece(0, "{", "", "look")]))
    await said.choice.saved()
    [turn] = await said.turns(EngineFailed("gone"))
    assert turn.reply == {"role": "assistant", "content": "a"}
    assert turn.completion_tokens == 2
    [row] = (await said.store.tail("trial", 0)).rows
    assert (row.path_tokens, row.completion_tokens) == (3, 2)


@pytest.mark.parametrize("repeats", [None, "aaaaaaaaaaaa"])
async def test_each_attempt_that_begins_again_is_in_place_of_the_one_before(repeats: str | None) -> None:
    """A marked retry then finds the whole answer, and no token of the others trains."""
    said = await Said.begin()
    choice = said.choice
    choice.facts.retry_of = repeats
    for token in (7, 8):
        said.hear(delta(token, content="lost"))
        choice.facts.first_token = choice.facts.last_token = 1.0
        await choice.restart(EngineFailed("gone"), choice.plan)
        choice.moved(choice.order, stream())
        assert (choice.facts.first_token, choice.facts.last_token, choice.begun_again) == (None, None, True)
    said.hear(delta(9, content="whole"), Finish(1, "stop", 1))
    first, second, whole = await said.turns()
    assert [turn.retry_of for turn in (first, second, whole)] == [repeats, first.turn_id, second.turn_id]
    assert [turn.superseded_by for turn in (first, second, whole)] == [second.turn_id, whole.turn_id, None]
    assert (whole.turn_id, [turn.partial for turn in (first, second, whole)]) == (TURN, [True, True, False])
    recording = await choice._recorder.enter("trial", again=True)
    found = RequestIdentity(choice.facts.asked, await plan(choice._recorder, recording, choice.order.job, Pace()))
    earlier = await on_record(choice._recorder, recording, found, now=2.0)
    assert earlier is not None
    assert (earlier.turns, earlier.whole) == ({0: whole}, True)


async def test_an_attempt_that_could_not_be_recorded_leaves_what_the_next_one_repeats() -> None:
    store = Slow(StoreUnavailable("gone"))
    said = await Said.begin(store)
    said.choice.facts.retry_of = "aaaaaaaaaaaa"
    said.hear(delta(7, content="a"))
    store.go.set()
    await said.choice.restart(EngineFailed("gone"), said.choice.plan)
    assert said.choice.facts.retry_of == "aaaaaaaaaaaa" and not said.choice.begun_again


async def test_all_tokens_of_a_turn_that_could_not_be_recorded_are_counted() -> None:
    """I4. However many of them its client had."""
    counter = metrics.UNRECORDED_TOKENS.labels(StoreUnavailable.code)
    before, store = counter._value.get(), Slow(StoreUnavailable("gone"))
    said = await Said.begin(store)
    said.hear(delta(7, content="a"), delta(8, content="b"), Finish(1, "stop", 2))
    said.choice.transcript.delivered = 1
    store.go.set()
    with pytest.raises(StoreUnavailable):
        await said.choice.committed(None)
    assert counter._value.get() - before == 2


@pytest.mark.parametrize("error", [None, EngineFailed("gone")])
async def test_what_comes_after_its_client_went_on_elsewhere_is_late_and_whoever_waits_is_told(
    error: StenoError | None,
) -> None:
    """I3, I4. What is on record of it counts as recorded; the rest is no place to go on from."""
    counters = metrics.COMPLETION_TOKENS._value, metrics.LATE_TOKENS._value
    said = await Said.begin()
    said.hear(delta(7, content="a"), delta(8, tool_calls=[ToolCallPiece(0, "{", "", "look")]))
    await said.choice.saved()
    elsewhere = Recorder(said.store, cache_bytes=2**20, implicit=True)
    await elsewhere.seal(await elsewhere.enter("trial"), 0)
    before = [counter.get() for counter in counters]
    for event in (delta(9, content="b"), Finish(1, "stop", 3)):
        said.choice.transcript.take(event)
    if error is None:
        with pytest.raises(RecordedOtherwise):
            await said.choice.committed(None)
    else:
        await said.choice.committed(error)  # which is what whoever waits is told
    assert [counter.get() - were for counter, were in zip(counters, before, strict=True)] == [2, 1]
    [turn] = await said.store.turns("trial")
    assert (turn.finish_reason, turn.completion_tokens) == ("cancelled", 2)
    here = await said.choice._recorder.enter("trial")
    assert (here.tree.finishes, here.tree.tokens[0], here.open_here) == (["cancelled"], 3, {})
    assert (await said.choice._recorder.path(here, 0, here.tree)).ids == turn.new_prompt_ids + turn.completion_ids


async def test_a_turn_is_committed_after_the_write_of_its_open_state() -> None:
    """The other way round, the store would have the open state last."""
    store = Slow(None)
    said = await Said.begin(store)
    said.hear(delta(7, content="a"), Finish(1, "stop", 1))
    saving = asyncio.create_task(said.choice.saved())
    await store.entered.wait()
    store.entered.clear()
    committing = asyncio.create_task(said.choice.committed(None))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not store.entered.is_set(), "the commit has overtaken the save"
    store.go.set()
    await asyncio.gather(saving, committing)
    [turn] = await store.turns("trial")
    assert (turn.finish_reason, turn.partial) == ("stop", False)


def delta(token: int, **fields: Any) -> Delta:
    return Delta(1, ids_to_bytes([token]), floats_to_bytes([-0.5]), "run/1", **fields)


async def spoken(store: Slow) -> Said:
    said = await Said.begin(store)
    said.hear(Delta(1, ids_to_bytes([7]), floats_to_bytes([-0.5]), "run/1", "x"), Finish(1, "stop", 1))
    return said
