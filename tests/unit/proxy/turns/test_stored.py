"""Requests that refer to what is on record, made whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from steno.contracts.chat import RECORDED, CanonicalRequest, Job, Message
from steno.contracts.errors import BadRequest, NotFound, StoreUnavailable
from steno.contracts.records import ForkOf, IndexRow, Timings, Turn
from steno_proxy.dialects.responses.dialect import ResponsesDialect
from steno_proxy.dialects.responses.output import ResponsesRequest
from steno_proxy.dialects.responses.tools import ClientTool
from steno_proxy.pace import Pace
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.fork_origins import ForkOrigins
from steno_proxy.sessions.messages.normalise import message_digest
from steno_proxy.sessions.origin import ForkOrigin
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.turns import forked
from steno_proxy.turns.continuation import plan
from steno_proxy.turns.stored_responses import answer_of, complete
from tests.support.records.losing import LosingStore
from tests.unit.proxy.session_cache.test_recorder import recorder, turn_and_row

USER: Message = {"role": "user", "content": "hi"}
F = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CREW = {"type": "namespace", "name": "crew", "description": "Agents.", "tools": [F, {**F, "name": "g"}]}
FREE = {
    "type": "custom",
    "name": "exec",
    "description": "Runs.",
    "format": {"type": "grammar", "definition": "start: x"},
}


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

    referring = asked(USER, named, USER)
    await complete(recorder, recording, referring)
    assert referring.job.messages == [USER, reply, USER]
    with pytest.raises(BadRequest, match="are referred to in two places") as caught:
        await complete(recorder, recording, asked(USER, named, USER, named, USER))
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


def added(*tools: Any) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": [*tools]}


class Conversation:
    """A trial whose requests each go on from the answer before. stored: or else on one socket."""

    def __init__(self, stored: bool = True) -> None:
        self.recorder = recorder(MemoryStore())
        self._stored = stored
        self._last: ResponsesRequest | None = None
        self._turn_id = ""

    async def asked(self, *items: Any, lacking: Sequence[str] = (), **body: Any) -> ResponsesRequest:
        """The request, as its turn is recorded. lacking: what an older release would not have kept of it."""
        recording = await self.recorder.enter("t")
        if self._last is not None:
            body["previous_response_id"] = f"resp_{self._turn_id}"
        body |= {"input": [*items, USER], "store": self._stored}
        request = ResponsesDialect().parse(json.dumps(body).encode())
        assert isinstance(request, ResponsesRequest)
        if self._last is not None:
            request.local = None if self._stored else self._last.carried
            await complete(self.recorder, recording, request)
        self._last, self._turn_id = request, f"{len(recording.tree.ids):012x}"
        turn = Turn(
            turn_id=self._turn_id, messages=request.job.messages, reply={"role": "assistant", "content": "done"},
            tools=request.job.tools, options={"kept": {k: v for k, v in request.kept.items() if k not in lacking}},
            timings=Timings(queued=1.0),
        )  # fmt: skip
        digests = b"".join(map(message_digest, [*turn.messages, turn.reply]))
        row = IndexRow(self._turn_id, -1, digests, b"\0" * 8, b"\0" * 8, "stop", False, 0)
        await self.recorder.commit(recording, turn, row)
        return request

    async def offered(self, *items: Any, **body: Any) -> list[str]:
        return [tool["function"]["name"] for tool in (await self.asked(*items, **body)).job.tools]


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "on a socket"])
async def test_tools_among_the_items_belong_to_the_conversation(stored: bool) -> None:
    """As if the client had sent all of its items again: the request's own tools are those of that request alone."""
    talk, own = Conversation(stored), {**F, "name": "own"}
    first = await talk.asked(added(F, CREW, FREE), tools=[own])
    again = await talk.asked(tools=[own])
    assert again.job.tools == first.job.tools and again.places == first.places
    assert await talk.offered(added({**F, "name": "late"})) == ["f", "crew__f", "crew__g", "exec", "late"]
    assert (await talk.asked(tool_choice={"type": "custom", "name": "exec"})).job.tool_choice == "function:exec"
    last = await talk.asked(
        added({**F, "description": "new"}, {**CREW, "tools": [F]}), tools=[own, {"type": "web_search"}]
    )
    names = [tool["function"]["name"] for tool in last.job.tools]
    assert names == ["own", "crew__g", "exec", "late", "f", "crew__f"]
    assert last.job.tools[4]["function"]["description"] == "new"
    assert last.places["crew__g"] == ClientTool("crew", "g") and last.places["exec"].custom
    assert [tool["function"]["name"] for tool in first.job.tools] == ["own", "f", "crew__f", "crew__g", "exec"]


async def test_tools_that_a_choice_left_out_are_there_again() -> None:
    talk = Conversation()
    only = {"type": "allowed_tools", "tools": [{"type": "function", "name": "own"}, {"type": "function", "name": "f"}]}
    own = [{**F, "name": "own"}, {**F, "name": "other"}]
    assert await talk.offered(added(CREW, F), tools=own, tool_choice=only) == ["own", "f"]
    assert await talk.offered() == ["f", "crew__f", "crew__g"]
    assert await talk.offered(tool_choice={"type": "function", "name": "g", "namespace": "crew"}) == [
        "f", "crew__f", "crew__g",
    ]  # fmt: skip


async def test_the_tools_of_a_conversation_do_not_grow_without_bound() -> None:
    """A model need not be offered what is carried along, and its prompt bounds that no more than one body does."""
    talk = Conversation()
    none = {
        "tools": [{**F, "name": "own"}],
        "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "own"}]},
    }
    assert await talk.offered(added({**F, "description": "x" * 2**19}), **none) == ["own"]
    assert await talk.offered(added({**F, "name": "g", "description": "x" * 2**19}), **none) == ["own"]
    with pytest.raises(BadRequest, match="at most 1048576") as caught:
        await talk.asked(**none)
    assert caught.value.field == "previous_response_id"


async def test_what_an_older_release_has_recorded_brings_no_tools() -> None:
    talk = Conversation()
    await talk.asked(added(F), tools=[{**F, "name": "own"}], lacking=["own_tools"])
    for field, body in (
        ("tool_choice.name", {"tool_choice": {"type": "function", "name": "f"}}),
        ("tools.0.type", {"tools": [{"type": "web_search"}]}),
    ):
        with pytest.raises(BadRequest) as caught:
            await talk.asked(**body)
        assert caught.value.field == field
    assert await talk.offered() == []


async def test_a_summary_is_asked_for_without_the_conversations_tools() -> None:
    talk = Conversation()
    await talk.asked(added(F))
    body = {"input": [{"type": "compaction_trigger"}], "previous_response_id": f"resp_{0:012x}"}
    request = ResponsesDialect().parse(json.dumps(body).encode())
    await complete(talk.recorder, await talk.recorder.enter("t"), request)
    assert request.job.tools == [] and len(request.job.messages) == 3


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


async def test_in_a_fork_of_what_an_older_release_recorded_no_tools_go_on() -> None:
    """They did not in its origin, which the fork is to repeat: its second request was offered tools, and matched nothing."""
    dialect, here = ResponsesDialect(), Recorder(MemoryStore(), cache_bytes=2**20, implicit=True)

    def parse(**body: Any) -> CanonicalRequest:
        return dialect.parse(json.dumps({"model": "m"} | body).encode())

    first = parse(input=[{"type": "additional_tools", "tools": [F]}, USER])
    second = parse(input=[USER], previous_response_id=f"resp_{'0' * 11}a")
    reply: Message = {"role": "assistant", "content": "done"}
    kept: dict[str, Any] = {"stored": True}
    fields: dict[str, Any] = {"dialect": "responses", "model": "m", "reply": reply, "timings": Timings(queued=1.0)}
    one = Turn(
        turn_id="0" * 11 + "a", messages=first.job.messages, tools=first.job.tools, options={"kept": kept}, **fields
    )
    two = Turn(
        turn_id="0" * 11 + "b",
        index=1,
        messages=[USER, reply, USER],
        options={"kept": kept | {"after": True}},
        **fields,
    )
    origin = ForkOrigin(ForkOf(trial_id="o", turn_id=two.turn_id))
    origin.add(one)
    origin.add(two)
    origin.settle(two)
    recording = await here.enter("fork")
    turn, row, _ = forked.replayed(one, first, dialect, await plan(here, recording, first.job, Pace()), 3.0)
    await here.commit(recording, turn, row)
    recording = await here.enter("fork")
    await complete(here, recording, second)
    assert second.job.tools == []
    assert origin.knows(forked.key_of(origin, second, await plan(here, recording, second.job, Pace())), 1)
