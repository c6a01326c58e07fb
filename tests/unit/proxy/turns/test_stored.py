"""Requests that refer to what is on record, made whole."""

from __future__ import annotations

import pytest

from steno.contracts.chat import RECORDED, CanonicalRequest, Job, Message
from steno.contracts.errors import BadRequest, NotFound, StoreUnavailable
from steno.contracts.records import ForkOf, IndexRow, Timings, Turn
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.fork_origins import ForkOrigins
from steno_proxy.sessions.messages.normalise import message_digest
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.turns.stored_responses import answer_of, whole
from tests.support.records.losing import LosingStore
from tests.unit.proxy.session_cache.test_recorder import recorder, turn_and_row

USER: Message = {"role": "user", "content": "hi"}


async def test_a_reply_is_referred_to_in_one_place() -> None:
    """A reference has forty bytes and the reply any number: a body of references would be gigabytes for a worker."""
    recorder = Recorder(MemoryStore(), cache_bytes=10**9, implicit=True, clock=lambda: 100.0)
    reply: Message = {"role": "assistant", "content": "done"}
    turn = Turn(turn_id="0" * 12, messages=[USER], reply=reply, timings=Timings(queued=1.0))
    row = IndexRow("0" * 12, -1, message_digest(USER) + message_digest(reply), b"\0" * 8, b"\0" * 8, "stop", False, 0)
    recording = await recorder.enter("t")
    await recorder.commit(recording, turn, row)
    named: Message = {"role": "assistant", "content": "", RECORDED: "0" * 12}

    def asked(*messages: Message) -> CanonicalRequest:
        return CanonicalRequest("responses", "m", Job(messages=[*messages]), refers=True)

    assert (await whole(recorder, recording, asked(USER, named, USER))).job.messages == [USER, reply, USER]
    with pytest.raises(BadRequest, match="stand in two places") as caught:
        await whole(recorder, recording, asked(USER, named, USER, named, USER))
    assert caught.value.field == "input"


@pytest.mark.parametrize("taken", [False, True], ids=["gone", "another has its number"])
async def test_a_stored_answer_that_was_lost_is_not_found(taken: bool) -> None:
    store = LosingStore()
    here = recorder(store)
    recording = await here.enter("t")
    store.mark("t")
    for number in (0, 7):
        turn, row = turn_and_row(number)
        turn.options["kept"] = {"of": number}
        if number == 0:
            await here.commit(recording, turn, row)
            assert (await answer_of(here, recording, turn.turn_id))[1] == {"of": 0}
            store.lose("t")
        elif taken:
            there = recorder(store)
            await there.commit(await there.enter("t"), turn, row)
    with pytest.raises(NotFound):
        await answer_of(here, recording, turn_and_row(0)[0].turn_id)


@pytest.mark.parametrize("taken", [False, True], ids=["gone", "another has its number"])
async def test_a_turn_of_an_origin_that_was_lost_is_an_error_that_passes(taken: bool) -> None:
    store = LosingStore()
    here = recorder(store)
    recording = await here.enter("t")
    store.mark("t")
    await here.commit(recording, *turn_and_row(0))
    origins, fork = ForkOrigins(store), ForkOf(trial_id="t", turn_id=turn_and_row(0)[0].turn_id)
    origin = await origins.of(None, fork)
    assert (await origins.turn(fork, origin.forked)).turn_id == fork.turn_id
    store.lose("t")
    if taken:
        there = recorder(store)
        await there.commit(await there.enter("t"), *turn_and_row(7))
    with pytest.raises(StoreUnavailable) as told:
        await origins.turn(fork, origin.forked)
    assert told.value.retryable
