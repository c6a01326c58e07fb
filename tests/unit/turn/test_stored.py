"""Requests that refer to what is on record, made whole."""

from __future__ import annotations

import pytest

from steno.contracts.chat import RECORDED, CanonicalRequest, Job, Message
from steno.contracts.errors import BadRequest
from steno.contracts.records import IndexRow, Timings, Turn
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.sessions.messages.normalise import message_digest
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.turns.stored_responses import whole

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
