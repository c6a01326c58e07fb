"""I3 for blocks: what a client may act on is on record first, whatever breaks after it; and what it keeps, it can go on from."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno.contracts.errors import StoreUnavailable
from steno.contracts.records import OPEN, IndexRow, Turn, bytes_to_ids
from steno.contracts.wire.frames import Generate
from steno_proxy import metrics
from steno_proxy.store.interface import RetryKey
from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.support.programs.stack import ROOT
from tests.support.programs.stack import running as stack_running
from tests.support.records.tokens import counters
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

ASKED: dict[str, Any] = {"role": "user", "content": "hi"}
TEXT = {"role": "assistant", "content": [{"type": "text", "text": "ab"}]}
MORE = {"role": "user", "content": "go on"}
THEN = {"role": "assistant", "content": [{"type": "text", "text": "then"}]}
COUNTED = ("steno_proxy_completion_tokens_total", "steno_proxy_unrecorded_tokens_total")
CALLS = [("own-1", "f", "{}"), ("own-2", "g", "{}")]
# Tokens of Say("ab", calls=CALLS): a, b, the first call, the second call, the stop id.
FIRST_CALL, SECOND_CALL, LAST = 2, 3, 4


async def stream(proxy: Proxy, trial_id: str, *messages: Any) -> AsyncIterator[dict[str, Any]]:
    """The events of an answer, as they come."""
    body = {"max_tokens": 100, "stream": True, "messages": messages}
    async with proxy.http.stream("POST", f"/{trial_id}/v1/messages", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


async def ask(proxy: Proxy, trial_id: str, *messages: Any) -> dict[str, Any]:
    answer = await proxy.http.post(f"/{trial_id}/v1/messages", json={"max_tokens": 100, "messages": messages})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def says(request: Generate, **first: Any) -> Say:
    """Text and two calls to a question, text to whatever comes after an answer."""
    answered = any(message["role"] == "assistant" for message in request.job.messages)
    return Say("then") if answered else Say("ab", calls=CALLS, **first)


async def test_a_block_is_on_record_before_it_closes_and_the_whole_turn_takes_its_place() -> None:
    gates = {SECOND_CALL: asyncio.Event(), LAST: asyncio.Event()}
    seen: list[Turn] = []
    async with running(ParrotEngine(lambda request: says(request, gates=gates))) as proxy:
        async for event in stream(proxy, "t", ASKED):
            if event["type"] == "content_block_stop":
                [turn] = await proxy.turns("t")
                seen.append(turn)
                gates.get(len(seen) + 2, asyncio.Event()).set()
        [turn] = await proxy.turns("t")
        counts = (await proxy.store.session("t")).counts
    assert [(each.turn_id, each.index) for each in seen] == [(turn.turn_id, 0)] * 3
    assert [(each.finish_reason, each.partial) for each in seen] == [(OPEN, True), (OPEN, True), ("tool_calls", False)]
    assert [bytes_to_ids(each.completion_ids).tolist() for each in seen] == [
        [97, 98, 2], [97, 98, 2, 2], [97, 98, 2, 2, 2]
    ]  # fmt: skip
    called = [[call["function"]["name"] for call in each.reply.get("tool_calls", [])] for each in seen]
    assert called == [[], ["f"], ["f", "g"]], "each time what the client may act on, and no more"
    assert (seen[0].delivered, turn.delivered) == (None, 5)
    assert (counts.turns, counts.completion_tokens) == (1, 5)


async def test_an_answer_in_one_piece_is_recorded_once_and_whole() -> None:
    class Counting(MemoryStore):
        commits = 0

        async def commit(
            self, trial_id: str, turn: Turn, row: IndexRow, *, now: float, retry_key: RetryKey | None = None
        ) -> int:
            self.commits += 1
            return await super().commit(trial_id, turn, row, now=now, retry_key=retry_key)

    store = Counting()
    async with running(ParrotEngine(says), store=store) as proxy:
        answer = await ask(proxy, "t", ASKED)
        assert [block["type"] for block in answer["content"]] == ["text", "tool_use", "tool_use"]
        assert store.commits == 1


async def test_a_store_that_fails_keeps_the_block_open() -> None:
    class Failing(MemoryStore):
        async def commit(
            self, trial_id: str, turn: Turn, row: IndexRow, *, now: float, retry_key: RetryKey | None = None
        ) -> int:
            if turn.finish_reason == OPEN:
                raise StoreUnavailable("the store is away")
            return await super().commit(trial_id, turn, row, now=now, retry_key=retry_key)

    gates = {SECOND_CALL: asyncio.Event()}  # the worker does not come to its end by itself
    async with running(ParrotEngine(lambda request: says(request, gates=gates)), store=Failing()) as proxy:
        events = [event async for event in stream(proxy, "t", ASKED)]
        assert not any(event["type"] == "content_block_stop" for event in events)
        assert events[-1]["error"]["type"] == "overloaded_error"
        [turn] = await proxy.turns("t")
        assert (turn.partial, turn.finish_reason, turn.error) == (True, "error", "store_unavailable: the store is away")
        await until(lambda: proxy.engine.cancelled == [turn.turn_id])


async def test_what_had_arrived_when_the_store_failed_is_on_record_as_well() -> None:
    """I4: the proxy has tokens in hand that nobody has been told of when the turn breaks."""
    arrived: list[int] = []

    class Failing(MemoryStore):
        async def commit(
            self, trial_id: str, turn: Turn, row: IndexRow, *, now: float, retry_key: RetryKey | None = None
        ) -> int:
            if turn.finish_reason == OPEN:
                await until(lambda: proxy.app.state.hub.counts.tokens == LAST + 1)
                arrived.append(turn.completion_tokens)
                raise StoreUnavailable("the store is away")
            return await super().commit(trial_id, turn, row, now=now, retry_key=retry_key)

    async with running(ParrotEngine(says), store=Failing()) as proxy:
        assert [event async for event in stream(proxy, "t", ASKED)][-1]["type"] == "error"
        [turn] = await proxy.turns("t")
        assert arrived == [FIRST_CALL + 1], "there was more in hand than the block that could not be saved"
        assert (turn.partial, turn.completion_tokens) == (True, LAST + 1)
        assert bytes_to_ids(turn.completion_ids).tolist() == [97, 98, 2, 2, 2]


@pytest.mark.parametrize("fail_after", [SECOND_CALL, LAST])
async def test_what_a_client_keeps_of_a_broken_stream_is_recognised(fail_after: int) -> None:
    """All that was sampled is on record (I4); the reply is the blocks that were closed, and the next turn goes on from them."""

    async with running(ParrotEngine(lambda request: says(request, fail_after=fail_after))) as proxy:
        events = [event async for event in stream(proxy, "t", ASKED)]
        closed = [event["index"] for event in events if event["type"] == "content_block_stop"]
        assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "overloaded_error"
        assert closed == ([0] if fail_after == SECOND_CALL else [0, 1])
        kept = list(TEXT["content"])
        new: list[Any] = [MORE]
        if fail_after == LAST:
            call = next(e["content_block"] for e in events if e.get("content_block", {}).get("type") == "tool_use")
            kept.append(call)
            new = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}]}]
        await ask(proxy, "t", ASKED, {"role": "assistant", "content": kept}, *new)
        cut, then = await proxy.turns("t")
        assert (cut.partial, cut.finish_reason, cut.completion_tokens, cut.delivered) == (
            True,
            "error",
            *[fail_after] * 2,
        )
        assert (then.parent_id, then.fork_reason) == (cut.turn_id, None)
        assert proxy.engine.requests[1].prefix_ids == cut.new_prompt_ids + cut.completion_ids


async def test_a_client_that_leaves_after_a_block_has_it_on_record() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: says(request, gates={SECOND_CALL: gate}))) as proxy:
        events = stream(proxy, "t", ASKED)
        async for event in events:
            if event["type"] == "content_block_stop":
                break
        await events.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            while (await proxy.turns("t"))[0].finish_reason == OPEN:
                await asyncio.sleep(0.005)
        [turn] = await proxy.turns("t")
        assert (turn.finish_reason, turn.partial, turn.reply["content"]) == ("cancelled", True, "ab")
        await ask(proxy, "t", ASKED, TEXT, MORE)
        assert (await proxy.turns("t"))[1].parent_id == turn.turn_id


async def test_a_session_that_is_completed_meanwhile_keeps_the_turn_as_partial() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: says(request, gates={SECOND_CALL: gate}))) as proxy:
        async for event in stream(proxy, "t", ASKED):
            if event["type"] == "content_block_stop":
                done = await proxy.http.post("/sessions/t/complete", json={"reward": 1.0})
                assert done.json()["counts"]["turns"] == 1
        assert event["type"] == "error"
        [turn] = await proxy.turns("t")
        assert (turn.finish_reason, turn.partial, turn.completion_tokens) == ("cancelled", True, 3)


async def test_a_commit_that_fails_leaves_what_was_on_record_to_go_on_from() -> None:
    class Failing(MemoryStore):
        broken = True

        async def commit(
            self, trial_id: str, turn: Turn, row: IndexRow, *, now: float, retry_key: RetryKey | None = None
        ) -> int:
            if turn.finish_reason != OPEN and self.broken:
                raise StoreUnavailable("the store is away")
            return await super().commit(trial_id, turn, row, now=now, retry_key=retry_key)

    store = Failing()
    async with running(ParrotEngine(lambda request: says(request, gates={})), store=store) as proxy:
        events = [event async for event in stream(proxy, "t", ASKED)]
        assert events[-1]["type"] == "error"
        store.broken = False
        call = next(e["content_block"] for e in events if e.get("content_block", {}).get("type") == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}
        kept = {"role": "assistant", "content": [*TEXT["content"], call]}
        await ask(proxy, "t", ASKED, kept, {"role": "user", "content": [result]})
        cut, then = await proxy.turns("t")
        assert (cut.finish_reason, then.parent_id) == ("cancelled", cut.turn_id)


async def test_a_replica_that_saw_a_turn_while_it_was_open_sees_it_whole() -> None:
    gate, store = asyncio.Event(), MemoryStore()
    engine = ParrotEngine(lambda request: says(request, gates={SECOND_CALL: gate}))
    async with running(engine, store=store) as one, running(ParrotEngine(says), store=store) as two:
        events = [event async for event in _until_closed(stream(one, "t", ASKED), gate, lambda: ask(two, "t", MORE))]
        calls = [e["content_block"] for e in events if e.get("content_block", {}).get("type") == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "ok"} for call in calls]
        kept = {"role": "assistant", "content": [*TEXT["content"], *calls]}
        await ask(two, "t", ASKED, kept, {"role": "user", "content": results})
        whole, other, then = await store.turns("t")
        assert not whole.partial and other.parent_id is None
        assert (then.parent_id, then.fork_reason) == (whole.turn_id, None)


async def test_a_turn_that_its_client_left_for_another_replica_does_not_grow_any_more() -> None:
    """The first proxy does not know that nobody listens: what it commits later must not change what the other goes on from. Nor
    does it take for recorded what is not: it tells nobody so (I3), books its tokens (I4), and goes on from what is (I1, I2)."""
    gate, store = asyncio.Event(), MemoryStore()
    engine = ParrotEngine(lambda request: says(request, gates={SECOND_CALL: gate}))
    async with running(engine, store=store) as one, running(ParrotEngine(says), store=store) as two:
        assert (await one.http.post("/sessions/t", json={"run_id": "r"})).status_code == 200
        before, late = await asyncio.to_thread(counters, one.url + "/metrics"), metrics.LATE_TOKENS._value
        late_before = late.get()
        went_on = ask_again(two)
        events = [event async for event in _until_closed(stream(one, "t", ASKED), gate, went_on)]
        assert events[-1]["type"] == "error"
        left, then = await store.turns("t")
        assert (left.finish_reason, left.partial, left.completion_tokens) == ("cancelled", True, 3)
        assert left.error is not None and left.error.startswith("proxy_lost")
        assert (then.parent_id, then.fork_reason) == (left.turn_id, None)
        samples = (await one.http.get("/sessions/t/samples")).json()["items"]
        assert [sample["turn_ids"] for sample in samples] == [[left.turn_id, then.turn_id]]
        await until(lambda: late.get() - late_before == one.app.state.hub.counts.tokens - 3)
        after = await asyncio.to_thread(counters, one.url + "/metrics")
        assert [after[name] - before[name] for name in COUNTED] == [3 + then.completion_tokens, 0]
        booked = (await store.runs.view("r")).not_trained
        assert list(booked) == ["late"] and booked["late"]["base/0"] in (1, LAST + 1 - 3)

        call = next(e["content_block"] for e in events if e.get("content_block", {}).get("type") == "tool_use")
        whole = {"role": "assistant", "content": [*TEXT["content"], call]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}]}
        await ask(one, "t", ASKED, TEXT, MORE, THEN, MORE)
        await ask(one, "t", ASKED, whole, result)
        *_, kept, full = await store.turns("t")
        path = b"".join(turn.new_prompt_ids + turn.completion_ids for turn in (left, then))
        assert (kept.parent_id, kept.fork_reason) == (then.turn_id, None)
        assert (full.parent_id, full.fork_reason) == (None, "assistant_rewritten")
        assert [request.prefix_ids for request in one.engine.requests[1:]] == [path, b""]


async def test_a_replica_goes_on_from_what_another_recorded_after_a_turn_that_still_runs_here() -> None:
    """I2."""
    gate, store = asyncio.Event(), MemoryStore()
    engine = ParrotEngine(lambda request: says(request, gates={SECOND_CALL: gate}))
    async with running(engine, store=store) as one, running(ParrotEngine(says), store=store) as two:

        async def went_on() -> None:
            await ask(two, "t", ASKED, TEXT, MORE)
            await ask(one, "t", ASKED, TEXT, MORE, THEN, MORE)

        events = [event async for event in _until_closed(stream(one, "t", ASKED), gate, went_on)]
        assert events[-1]["type"] == "error"
        left, then, kept = await store.turns("t")
        assert (left.finish_reason, left.completion_tokens) == ("cancelled", 3)
        assert [(turn.parent_id, turn.fork_reason) for turn in (then, kept)] == [
            (left.turn_id, None),
            (then.turn_id, None),
        ]
        path = b"".join(turn.new_prompt_ids + turn.completion_ids for turn in (left, then))
        assert [request.prefix_ids for request in one.engine.requests] == [b"", path]
        await ask(one, "t", ASKED, TEXT, MORE, THEN, MORE, THEN, MORE)
        assert (await store.turns("t"))[-1].parent_id == kept.turn_id


def ask_again(proxy: Proxy) -> Any:
    return lambda: ask(proxy, "t", ASKED, TEXT, MORE)


async def _until_closed(events: AsyncIterator[dict[str, Any]], gate: asyncio.Event, then: Any) -> AsyncIterator[Any]:
    async for event in events:
        yield event
        if event["type"] == "content_block_stop" and not gate.is_set():
            await then()
            gate.set()


SCRIPT = """
def say(request):
    if any(message["role"] == "assistant" for message in request["messages"]):
        return "then"
    call = {"function": {"name": "f", "arguments": {"text": "one two three four five six seven " * 30}}}
    return {"content": "ab", "tool_calls": [call], "pace_s": 0.5}
"""


def test_killed_after_a_block_closed_the_block_is_in_redis_and_a_new_proxy_goes_on_from_it(
    redis_url: str, tmp_path: Path
) -> None:
    """The real thing: the proxy as a process, a real Redis, and kill -9 in the middle of a tool call."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    worker = ["--engine", "scripted", "--script", f"{script}:say", "--model", str(ROOT / "steno/models/tiny")]
    worker += ["--drain-s", "0.1"]
    trial_id = f"block-{uuid.uuid4().hex}"
    asked = {"max_tokens": 100, "messages": [ASKED], "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    seen = []
    with stack_running(tmp_path / "one", worker, proxy=["--redis-url", redis_url]) as stack:
        url = f"{stack.url}/{trial_id}/v1/messages"
        with (
            pytest.raises(httpx.HTTPError),
            httpx.stream("POST", url, json=asked | {"stream": True}, timeout=60) as response,
        ):
            for line in response.iter_lines():
                seen.append(line)
                if line == "event: content_block_stop":
                    os.kill(stack.proxy.pid, signal.SIGKILL)
        stack.proxy.wait(60)
    assert "event: message_stop" not in seen and seen.count("event: content_block_stop") == 1
    with stack_running(tmp_path / "two", worker, proxy=["--redis-url", redis_url]) as stack:
        [turn] = stack.turns(trial_id)
        assert (turn["finish_reason"], turn["partial"], turn["reply"]["content"]) == (OPEN, True, "ab")
        assert turn["completion_ids"]
        url = f"{stack.url}/{trial_id}/v1/messages"
        answer = httpx.post(url, json=asked | {"messages": [ASKED, TEXT, MORE]}, timeout=60)
        assert answer.status_code == 200
        cut, then = stack.turns(trial_id)
        assert (cut["finish_reason"], cut["completion_ids"]) == ("cancelled", turn["completion_ids"])
        assert (then["parent_id"], then["fork_reason"]) == (cut["turn_id"], None)
