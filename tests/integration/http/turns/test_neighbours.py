"""Clients that write a reply as several neighbours go on from the turn that said it (I2). In Messages neighbours are one."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from steno.contracts.wire.frames import Generate
from steno_proxy.store.redis.store import RedisStore
from tests.integration.http.conftest import Proxy, running
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.workers.parrot import ParrotEngine, Say, check_drawn

Item = dict[str, Any]
TOOL: Any = {"name": "f", "input_schema": {"type": "object"}}
RECORDED = Path(__file__).parents[3] / "fixtures" / "neighbours-30876af.json"
HI: Any = {"role": "user", "content": "fix it"}


def agent(request: Generate) -> Say:
    """Calls two tools at once three times, then answers."""
    asked = sum(message["role"] == "assistant" for message in request.job.messages)
    calls = [(f"own-{asked}-{i}", "f", f'{{"a": {i}}}') for i in range(2)]
    return Say("I look.", reasoning=f"This is {asked}.", calls=calls) if asked < 3 else Say("Done.")


async def trae(proxy: Proxy, trial_id: str, streamed: bool) -> None:
    """As Trae Agent does with Anthropic's SDK: each text, each call and each result is a message; thinking is dropped."""
    client = anthropic.AsyncAnthropic(base_url=f"{proxy.url}/{trial_id}", api_key="none", max_retries=0, timeout=60)
    history: list[Any] = [HI]
    while True:
        asked: Any = {"model": "m", "max_tokens": 500, "messages": history, "tools": [TOOL], "system": "Be good."}
        if streamed:
            async with client.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        if answer.stop_reason != "tool_use":
            return
        for block in answer.content:
            if block.type == "text":
                history.append({"role": "assistant", "content": block.text})
            elif block.type == "tool_use":
                history.append({"role": "assistant", "content": [block.model_dump(exclude_none=True)]})
        for block in answer.content:
            if block.type == "tool_use":
                result = {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
                history.append({"role": "user", "content": [result]})


def check_one_exact_line(proxy: Proxy, turns: list[Any]) -> None:
    assert [turn.fork_reason for turn in turns] == [None] * len(turns)
    assert [turn.parent_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    for before, request in zip(turns, proxy.engine.requests[1:], strict=False):
        assert request.prefix_ids.endswith(before.new_prompt_ids + before.completion_ids)


@pytest.mark.parametrize("streamed", [True, False])
async def test_messages_with_text_and_calls_apart_is_one_exact_line(streamed: bool) -> None:
    async with running(ParrotEngine(agent)) as proxy:
        await trae(proxy, "t", streamed)
        turns = await proxy.turns("t", 4)
        [sample] = await proxy.steno.samples("t")
    check_one_exact_line(proxy, turns)
    assert all("echoed_as" not in turn.options for turn in turns), "one message is what the format says that they are"
    assert [message["role"] for message in turns[1].messages] == ["tool", "tool"]
    rendered = proxy.engine.requests[1].job.messages
    assert [message.get("tool_call_id") for message in rendered] == [None, None, None, "own-0-0", "own-0-1"]
    assert sample.turn_ids == [turn.turn_id for turn in turns]
    assert sum(sample.loss_mask) == sum(turn.completion_tokens for turn in turns)


async def test_messages_shows_and_counts_neighbours_as_one() -> None:
    apart: list[Item] = [HI, {"role": "user", "content": "now"}, {"role": "assistant", "content": "Yes."}]
    apart += [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Go on."}]
    joined = [
        {"role": "user", "content": [{"type": "text", "text": "fix it"}, {"type": "text", "text": "now"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}, {"type": "text", "text": "No."}]},
        apart[-1],
    ]
    async with running(ParrotEngine()) as proxy:
        counts = []
        for trial_id, messages in (("apart", apart), ("joined", joined)):
            body = {"model": "m", "max_tokens": 9, "messages": messages}
            assert (await proxy.http.post(f"/{trial_id}/v1/messages", json=body)).status_code == 200
            counts.append((await proxy.http.post(f"/{trial_id}/v1/messages/count_tokens", json=body)).json())
        [first], [second] = await proxy.turns("apart", 1), await proxy.turns("joined", 1)
    assert counts[0] == counts[1] == {"input_tokens": first.prompt_tokens}
    assert (first.messages, first.new_prompt_ids) == (second.messages, second.new_prompt_ids)
    assert [len(request.job.messages) for request in proxy.engine.requests] == [3, 3]


async def keeps_what_broke(proxy: Proxy, kept: Any, limit: int = 99) -> list[Any]:
    """As Kimi Code does: what it has of a broken answer is its next request's last message."""

    async def ask(*messages: Item, limit: int = 99) -> None:
        body: Item = {"model": "m", "max_tokens": limit, "stream": True, "messages": [HI, *messages]}
        body["thinking"] = {"type": "adaptive"}
        async with proxy.http.stream("POST", "/t/v1/messages", json=body) as answer:
            assert answer.status_code == 200
            with suppress(httpx.RemoteProtocolError):
                await answer.aread()

    begun = {"role": "assistant", "content": kept}
    await ask(limit=limit)
    await ask(begun)
    await ask(begun, {"role": "assistant", "content": "It is done."}, {"role": "user", "content": "And now?"})
    turns: list[Any] = await proxy.turns("t", 3)
    assert [turn.finish_reason for turn in turns] == ["error" if limit == 99 else "length", "stop", "stop"]
    return turns


@pytest.mark.parametrize(("limit", "dies"), [(99, 4), (4, None)])
async def test_messages_that_end_with_a_reply_that_was_cut_off_go_on_from_it(limit: int, dies: int | None) -> None:
    says = iter([Say("I look.", fail_after=dies), Say("It is done."), Say("Yes.")])
    async with running(ParrotEngine(lambda request: next(says))) as proxy:
        turns = await keeps_what_broke(proxy, "I lo", limit)
    assert turns[1].messages == []
    check_one_exact_line(proxy, turns)


async def test_messages_that_end_with_more_of_a_cut_reply_than_is_on_record_are_answered_too() -> None:
    """Of an answer that broke after a closed block, the closed blocks are on record (docs/recording-format.md)."""
    says = iter([Say("I look.", reasoning="hm", fail_after=8), Say("It is done."), Say("Yes.")])
    kept = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "I lo"}]
    async with running(ParrotEngine(lambda request: next(says))) as proxy:
        turns = await keeps_what_broke(proxy, kept)
    assert (turns[0].reply["content"], turns[0].reply["reasoning_content"]) == ("", "hm")
    assert [turn.fork_reason for turn in turns] == [None, "assistant_rewritten", None]
    assert turns[2].parent_id == turns[1].turn_id


async def test_messages_that_end_with_the_beginning_of_an_answer_that_still_runs_are_answered() -> None:
    """Its client's connection has broken, and the proxy does not know it yet."""
    goes_on = asyncio.Event()
    says = iter([Say("I look.", gates={4: goes_on}), Say("It is done.")])
    body: Item = {"model": "m", "max_tokens": 99, "messages": [HI]}
    begun = {"role": "assistant", "content": "I lo"}
    async with (
        running(ParrotEngine(lambda request: next(says))) as proxy,
        proxy.http.stream("POST", "/t/v1/messages", json=body | {"stream": True}) as answer,
    ):
        seen = b""
        async for piece in answer.aiter_raw():
            seen += piece
            if seen.count(b"text_delta") == 4:
                break
        again = await proxy.http.post("/t/v1/messages", json=body | {"messages": [HI, begun]})
        assert (again.status_code, again.json()["content"][0]["text"]) == (200, "It is done.")
        goes_on.set()


async def test_messages_that_begin_an_answer_that_is_not_on_record_are_refused() -> None:
    async with running(ParrotEngine(lambda request: Say("Yes."))) as proxy:
        for begun, status in ("Ye", 400), (None, 200), ("Ye", 400), ("Yes.", 400):
            messages = [HI, {"role": "assistant", "content": begun}] if begun else [HI]
            answer = await proxy.http.post("/t/v1/messages", json={"model": "m", "max_tokens": 9, "messages": messages})
            assert answer.status_code == status
            if status == 400:
                assert "The conversation must end with a user message" in answer.json()["error"]["message"]
        assert [turn.reply["content"] for turn in await proxy.turns("t", 1)] == ["Yes."]


async def test_chat_goes_on_from_a_reply_in_two_messages_and_shows_others_as_they_are() -> None:
    async with running(ParrotEngine(agent)) as proxy:
        history: list[Item] = [HI]
        for _ in range(4):
            said = (await proxy.chat("t", *history)).json()["choices"][0]["message"]
            calls = said.get("tool_calls") or []
            history += [{"role": "assistant", "content": said["content"]}, {"role": "assistant", "tool_calls": calls}]
            history += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
        turns = await proxy.turns("t", 4)
        check_one_exact_line(proxy, turns)
        assert [turn.options.get("echoed_as") for turn in turns] == [None, *["split"] * 3]
        own = [HI, *({"role": "assistant", "content": text} for text in ("Let me", "see.")), HI]
        await proxy.chat("other", *own)
    assert proxy.engine.requests[-1].job.messages == own


async def test_responses_goes_on_from_a_reply_in_items_without_ids() -> None:
    """Two texts with a call between them were streamed; what neither ids nor the order say to be one turn is two messages."""
    async with running(ParrotEngine(lambda request: Say("One.\n\nTwo."))) as proxy:
        history: list[Item] = [HI]
        for _ in range(3):
            await proxy.http.post("/t/v1/responses", json={"model": "m", "input": history})
            history += [{"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}, HI]
        turns = await proxy.turns("t", 3)
    assert [(turn.fork_reason, turn.options.get("echoed_as")) for turn in turns] == [
        (None, None),
        *[(None, "split")] * 2,
    ]


@pytest.mark.parametrize("trial_id", ["old", "mixed"])
async def test_a_session_that_an_older_replica_wrote_message_by_message_is_gone_on_from(
    trial_id: str, redis_server: RedisServer
) -> None:
    """What Redis held after revision 30876af had answered, alone ("old") or in turn with a newer replica ("mixed"): two messages
    of the user first, and each reply as text and call. Each turn of the older one is a root; the last is gone on from."""
    recorded = json.loads(RECORDED.read_text())
    own = f"{trial_id}-neighbours"
    with redis_server.client() as redis:
        for name, stored in recorded["stored"].items():
            if f"{{{trial_id}}}" in name:
                put_back(redis, name.replace(f"{{{trial_id}}}", f"{{{own}}}"), stored)
    history = recorded["histories"][trial_id]
    store = RedisStore(redis_server.url, **PATIENT)
    async with running(ParrotEngine(lambda request: Say("\nMore.")), store=store) as proxy:
        proxy.only_parrots = False  # that revision's parrot drew its tokens otherwise
        before = await proxy.turns(own)
        for _ in range(2):
            body = {"model": "m", "max_tokens": 9, "messages": history, "tools": [TOOL]}
            answer = await proxy.http.post(f"/{own}/v1/messages", json=body)
            assert answer.status_code == 200
            history += [{"role": "assistant", "content": "More."}, HI, {"role": "user", "content": "And now?"}]
        turns = await proxy.turns(own, len(before) + 2)
        samples = await proxy.steno.samples(own)
    await store.close()
    assert turns[: len(before)] == before and all(turn.reply["tool_calls"] for turn in before), "nothing is lost"
    last, next_, after = turns[-3:]
    check_drawn(own, [next_, after])
    assert [(turn.parent_id, turn.fork_reason) for turn in (next_, after)] == [
        (last.turn_id, None),
        (next_.turn_id, None),
    ]
    assert [len(turn.messages) for turn in (next_, after)] == [1, 1], "new neighbours are one message"
    first, second = proxy.engine.requests
    assert first.prefix_ids.endswith(last.new_prompt_ids + last.completion_ids)
    assert second.prefix_ids == first.prefix_ids + next_.new_prompt_ids + next_.completion_ids
    assert samples[-1].turn_ids[-3:] == [last.turn_id, next_.turn_id, after.turn_id]


def put_back(redis: Any, name: str, stored: Item) -> None:
    """A key of the fixture, whose bytes are hex."""
    value = stored["value"]
    redis.delete(name)
    if stored["type"] == "hash":
        redis.hset(name, mapping={bytes.fromhex(key): bytes.fromhex(each) for key, each in value})
    elif stored["type"] == "list":
        redis.rpush(name, *map(bytes.fromhex, value))
    else:
        redis.set(name, bytes.fromhex(value))
