"""The official OpenAI SDK's responses, streamed and not, stored and gone on from; and what is on record meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from steno.contracts.errors import ContextOverflow
from steno.contracts.records import OPEN
from steno_proxy.store.redis.store import RedisStore
from tests.integration.http.conftest import Proxy, running
from tests.integration.http.faults.test_failing import FailingStore
from tests.integration.http.turns.test_ending import SlowStore
from tests.support.machine.redis_server import PATIENT
from tests.support.workers.parrot import ParrotEngine, Say

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


def script(request: Any) -> Say:
    if request.job.response_format.type == "json_schema":
        return Say('{"city": "Rome"}')
    if request.job.tools and request.job.messages[-1]["role"] != "tool":
        return Say("let me see", reasoning="hm", calls=[("own-1", "f", '{"a": 1}'), ("own-2", "f", '{"a": 2}')])
    return Say("hello", reasoning="well")


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with running(ParrotEngine(script)) as found:
        yield found


def plain(answer: Any) -> Any:
    """Its items, without what the SDK adds to them and what names their turn."""
    items = json.loads(json.dumps([item.to_dict() for item in answer.output]))
    for part in [part for item in items for part in [item, *item.get("content", [])]]:
        for key in ("parsed", "parsed_arguments", "id", "call_id"):
            part.pop(key, None)
    return items


EVERYTHING: dict[str, Any] = {
    "instructions": "be kind", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 50, "tools": [TOOL], "tool_choice": "auto",
    "parallel_tool_calls": True, "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "metadata": {"a": "b"},
    "include": ["reasoning.encrypted_content"], "store": True, "truncation": "disabled", "user": "u", "service_tier": "auto",
}  # fmt: skip


async def test_every_field_streamed_adds_up_to_the_same_as_not(proxy: Proxy) -> None:
    client = proxy.openai("t").responses
    whole = await client.create(model="gpt-x", input="hi", **EVERYTHING)
    async with client.stream(model="gpt-x", input="hi", **EVERYTHING) as stream:
        events = [event async for event in stream]
        streamed = await stream.get_final_response()
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert plain(whole) == plain(streamed)
    assert whole.output_text == streamed.output_text == "let me see"
    assert whole.usage == streamed.usage and whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    assert (whole.status, whole.model, whole.metadata, whole.instructions) == (
        "completed",
        "gpt-x",
        {"a": "b"},
        "be kind",
    )
    one, two = await proxy.turns("t")
    assert (whole.id, streamed.id) == (f"resp_{one.turn_id}", f"resp_{two.turn_id}")
    assert one.asked == {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 50}
    assert (two.fork_reason, one.reasoning_tokens) == ("sibling", 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_items_sent_back_go_on_from_the_recorded_ids(proxy: Proxy, stream: bool) -> None:
    """I2: also in ten turns, with parallel calls and reasoning."""
    client = proxy.openai("t").responses
    items: list[Any] = [{"role": "developer", "content": "work"}, {"role": "user", "content": "go"}]
    for turn in range(10):
        if stream:
            async with client.stream(model="m", input=items, tools=[TOOL], store=False) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await client.create(model="m", input=items, tools=[TOOL], store=False)
        items += [
            {key: value for key, value in item.to_dict().items() if not key.startswith("parsed")}
            for item in answer.output
        ]
        calls = [item for item in answer.output if item.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": f"{turn}"} for call in calls]
        if turn % 2:
            items.append({"role": "user", "content": "more"})
    turns = await proxy.turns("t")
    assert [turn.fork_reason for turn in turns] == [None] * 10
    assert [turn.parent_id for turn in turns[1:]] == [turn.turn_id for turn in turns[:-1]]
    for before, request in zip(turns, proxy.engine.requests[1:], strict=False):
        assert request.prefix_ids.endswith(before.new_prompt_ids + before.completion_ids)


async def test_a_stored_response_can_be_read_gone_on_from_and_deleted(proxy: Proxy) -> None:
    client = proxy.openai("t").responses
    first = await client.create(model="m", input="hi", **{**EVERYTHING, "include": []})
    again = await client.retrieve(first.id)
    same = {
        "id",
        "output",
        "usage",
        "status",
        "instructions",
        "metadata",
        "temperature",
        "max_output_tokens",
        "reasoning",
    }
    assert again.model_dump(include=same) == first.model_dump(include=same)
    assert [tool.name for tool in again.tools] == ["f"]  # type: ignore[union-attr]
    calls = [item.call_id for item in first.output if item.type == "function_call"]
    outputs: list[Any] = [{"type": "function_call_output", "call_id": call_id, "output": "ok"} for call_id in calls]
    second = await client.create(
        model="m", input=outputs, previous_response_id=first.id, tools=[TOOL], instructions="be kind",
        reasoning={"effort": "low"},
    )  # fmt: skip
    third = await client.create(
        model="m", input="bye", previous_response_id=second.id, tools=[TOOL], reasoning={"effort": "low"}
    )
    one, two, three = await proxy.turns("t")
    assert (two.parent_id, two.fork_reason) == (one.turn_id, None)
    assert [message["role"] for message in two.messages] == ["tool", "tool"]
    assert (await client.retrieve(second.id)).previous_response_id == first.id
    # Instructions are not carried over, which is another conversation for the model.
    assert three.parent_id is None and three.messages[0] == {"role": "user", "content": "hi"}
    assert [message["role"] for message in three.messages] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert third.previous_response_id == second.id
    await client.delete(first.id)
    for call in (client.retrieve(first.id), client.create(model="m", input="x", previous_response_id=first.id)):
        with pytest.raises(openai.APIStatusError) as refused:
            await call
        assert refused.value.status_code in (400, 404) and "not found" in refused.value.message
    assert len(await proxy.turns("t")) == 3


async def test_another_replica_knows_what_was_stored(redis_url: str) -> None:
    one_store, other_store = RedisStore(redis_url, **PATIENT), RedisStore(redis_url, **PATIENT)
    engine, other_engine = ParrotEngine(script), ParrotEngine(script)
    async with running(engine, store=one_store) as one, running(other_engine, store=other_store) as other:
        trial = f"replicas-{one.port}"
        first = await one.openai(trial).responses.create(model="m", input="hi", tools=[TOOL], instructions="be kind")
        again = await other.openai(trial).responses.retrieve(first.id)
        assert again.model_dump(include={"output", "usage"}) == first.model_dump(include={"output", "usage"})
        calls = [item.call_id for item in first.output if item.type == "function_call"]
        outputs: list[Any] = [{"type": "function_call_output", "call_id": call_id, "output": "ok"} for call_id in calls]
        references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
        await other.openai(trial).responses.create(
            model="m", input=outputs, previous_response_id=first.id, tools=[TOOL], instructions="be kind"
        )
        start: list[Any] = [{"role": "user", "content": "hi"}, *references, *outputs]
        await one.openai(trial).responses.create(model="m", input=start, tools=[TOOL], instructions="be kind")
        turns = await one.turns(trial)
        assert [turn.parent_id for turn in turns] == [None, turns[0].turn_id, turns[0].turn_id]
        assert [turn.fork_reason for turn in turns] == [None, None, "sibling"]
        await other.openai(trial).responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await one.openai(trial).responses.retrieve(first.id)


async def test_what_was_not_stored_or_is_another_trials_is_not_found(proxy: Proxy) -> None:
    unstored = await proxy.openai("t").responses.create(model="m", input="hi", store=False)
    stored = await proxy.openai("t").responses.create(model="m", input="hi")
    chat = (await proxy.chat("t", "hi")).json()["id"].removeprefix("chatcmpl-")
    other = proxy.openai("other").responses
    await other.create(model="m", input="hi")
    mine = proxy.openai("t").responses
    for client, name in ((mine, unstored.id), (other, stored.id), (mine, f"resp_{chat}"), (mine, "resp_000000000000")):
        with pytest.raises(openai.NotFoundError):
            await client.retrieve(name)
    with pytest.raises(openai.BadRequestError) as refused:
        await mine.create(model="m", input="x", previous_response_id=unstored.id)
    assert refused.value.code == "previous_response_not_found" and refused.value.param == "previous_response_id"


async def test_references_stand_for_what_was_recorded(proxy: Proxy) -> None:
    client = proxy.openai("t").responses
    first = await client.create(model="m", input="hi", tools=[TOOL])
    references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
    calls = [item.call_id for item in first.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call_id, "output": "ok"} for call_id in calls]
    await client.create(model="m", input=[{"role": "user", "content": "hi"}, *references, *outputs], tools=[TOOL])
    one, two = await proxy.turns("t")
    assert (two.parent_id, two.fork_reason) == (one.turn_id, None)
    with pytest.raises(openai.BadRequestError):
        await client.create(model="m", input=[{"type": "item_reference", "id": "msg_000000000000_0"}])


async def test_parsed_text(proxy: Proxy) -> None:
    class City(BaseModel):
        city: str

    answer = await proxy.openai("t").responses.parse(model="m", input="where", text_format=City)
    assert answer.output_parsed == City(city="Rome")
    [request] = proxy.engine.requests
    assert request.job.response_format.name == "City"


async def test_the_route_is_also_one_level_deeper(proxy: Proxy) -> None:
    answer = (await proxy.http.post("/t/v1/v1/responses", json={"input": "hi"})).json()
    assert (await proxy.http.get(f"/t/v1/v1/responses/{answer['id']}")).json()["id"] == answer["id"]


async def test_a_cut_off_answer_is_incomplete(proxy: Proxy) -> None:
    answer = await proxy.openai("t").responses.create(model="m", input="hi", max_output_tokens=6)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in answer.output] == ["completed", "incomplete"]  # type: ignore[union-attr]
    stream = await proxy.openai("t").responses.create(model="m", input="hi", max_output_tokens=6, stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"


def kinds_of(raw: bytes) -> list[str]:
    return [line.removeprefix("event: ") for line in raw.decode().splitlines() if line.startswith("event: ")]


BODY = {"input": "hi", "stream": True, "tools": [TOOL]}


async def test_no_item_closes_before_its_turn_is_on_record() -> None:
    """I3: the first closed item waits for the turn so far, the last for the whole turn."""
    store = SlowStore()
    async with running(ParrotEngine(script), store=store) as proxy:
        async with proxy.http.stream("POST", "/t/v1/responses", json=BODY) as response:
            raw, seen = b"", []
            async for data in response.aiter_raw():
                raw += data
                if raw.count(b"event: response.reasoning_text.delta") == 2 and not store.go.is_set():
                    await store.committing.wait()
                    assert await proxy.turns("t") == []
                    assert "response.output_item.done" not in kinds_of(raw)
                    store.go.set()
                elif b"event: response.output_item.done" in data:
                    seen.append([turn.finish_reason for turn in await proxy.turns("t")])
        assert seen[0] == [OPEN] and seen[-1] == ["tool_calls"]
        assert kinds_of(raw)[-1] == "response.completed"
        [turn] = await proxy.turns("t")
        assert len(turn.completion_ids) // 4 == 15


async def test_a_stream_that_fails_after_its_first_byte_ends_with_response_failed() -> None:
    async with running(ParrotEngine(lambda request: Say("let me see", reasoning="hm", fail_after=6))) as proxy:
        raw = (await proxy.http.post("/t/v1/responses", json=BODY)).content
        kinds = kinds_of(raw)
        assert kinds[-1] == "response.failed" and kinds.count("response.output_item.done") == 1
        failed = json.loads(raw.decode().rstrip().rpartition("data: ")[2])["response"]
        assert failed["error"]["code"] == "server_error" and failed["status"] == "failed"
        [turn] = await proxy.turns("t")
        assert (turn.partial, turn.finish_reason, turn.reply["content"]) == (True, "error", "")
        assert turn.reply["reasoning_content"] == "hm" and len(turn.completion_ids) // 4 == 6
        with pytest.raises(openai.NotFoundError):
            await proxy.openai("t").responses.retrieve(failed["id"])


async def test_a_turn_that_can_not_be_stored_closes_nothing() -> None:
    """I3."""
    async with running(ParrotEngine(script), store=FailingStore()) as proxy:
        refused = await proxy.http.post("/t/v1/responses", json={"input": "hi"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        raw = (await proxy.http.post("/t/v1/responses", json=BODY)).content
        kinds = kinds_of(raw)
        assert kinds[-1] == "response.failed" and "response.output_item.done" not in kinds


async def test_errors_before_the_first_byte_have_openais_shape() -> None:
    overflow = ContextOverflow("too long", prompt_tokens=9, context_tokens=8)
    async with running(ParrotEngine(lambda request: Say(refuse=overflow))) as proxy:
        with pytest.raises(openai.BadRequestError) as refused:
            await proxy.openai("t").responses.create(model="m", input="hi", stream=True)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as wrong:
            await proxy.openai("t").responses.create(model="m", input="hi", background=True)
        assert wrong.value.param == "background"


async def test_silence_before_the_first_token_is_filled_and_a_failure_then_still_told() -> None:
    gate = asyncio.Event()
    engine = ParrotEngine(lambda request: Say("abc", gates={0: gate}, fail_after=0))
    async with running(engine, keepalive_s=0.05) as proxy:
        async with proxy.http.stream("POST", "/t/v1/responses", json=BODY) as response:
            raw = b""
            async for data in response.aiter_raw():
                raw += data
                gate.set()
        assert raw.startswith(b": keepalive\n")
        assert kinds_of(raw) == ["response.created", "response.in_progress", "response.failed"]


async def test_a_client_that_leaves_keeps_what_was_closed(proxy: Proxy) -> None:
    gate = asyncio.Event()
    proxy.engine.script = lambda request: Say("let me see", reasoning="hm", calls=[("", "f", "{}")], gates={5: gate})
    async with proxy.http.stream("POST", "/t/v1/responses", json=BODY) as response:
        async for line in response.aiter_lines():
            if line == "event: response.output_text.delta":
                break
    async with asyncio.timeout(60):
        while not (turns := await proxy.turns("t")) or turns[0].finish_reason == OPEN:
            await asyncio.sleep(0.01)
    assert (turns[0].finish_reason, turns[0].partial) == ("cancelled", True)
    assert turns[0].reply == {"role": "assistant", "content": "", "reasoning_content": "hm"}


async def test_keys_open_only_their_own_trials_responses() -> None:
    """I8."""
    async with running(ParrotEngine(script), admin_key="a" * 32) as proxy:
        for trial in ("t", "u"):
            await proxy.http.post(f"/sessions/{trial}", json={})
        client = proxy.openai("t", proxy.agent_key("t")).responses
        answer = await client.create(model="m", input="hi")
        url, headers = f"/t/v1/responses/{answer.id}", {"authorization": f"Bearer {proxy.agent_key('u')}"}
        for refused in (await proxy.http.get(url, headers=headers), await proxy.http.delete(url, headers=headers)):
            assert refused.status_code in (401, 403)
        assert (await client.retrieve(answer.id)).id == answer.id


async def test_a_marked_retry_is_given_the_same_response_again(proxy: Proxy) -> None:
    again = {"x-stainless-retry-count": "1"}
    for stream in (False, True):
        body = {"input": "hi", "tools": [TOOL], "stream": stream, "user": str(stream)}
        first = await proxy.http.post("/t/v1/responses", json=body)
        second = await proxy.http.post("/t/v1/responses", json=body, headers=again)
        shown = []
        for answer in (first, second):
            text = answer.text.rstrip().rpartition("data: ")[2] if stream else answer.text
            shown.append(json.loads(text)["response"] if stream else json.loads(text))
        assert shown[0] == shown[1]
        assert [kind for kind in kinds_of(second.content) if kind.endswith("done")] == [
            kind for kind in kinds_of(first.content) if kind.endswith("done")
        ]
    assert len(await proxy.turns("t")) == 2


async def test_tokens_are_counted_and_nothing_is_recorded(proxy: Proxy) -> None:
    client = proxy.openai("t").responses
    counted = await client.input_tokens.count(model="m", input="hi", instructions="be kind")
    asked = await client.create(model="m", input="hi", instructions="be kind")
    assert asked.usage is not None and counted.input_tokens == asked.usage.input_tokens
    assert len(await proxy.turns("t")) == 1
    with pytest.raises(openai.BadRequestError):
        await client.input_tokens.count(model="m", input="hi", previous_response_id=asked.id)


@pytest.mark.parametrize(("fail_after", "closed"), [(2, 1), (4, 2), (5, 3), (6, 3)])
async def test_the_items_that_a_client_keeps_of_a_broken_stream_are_recognised(fail_after: int, closed: int) -> None:
    """Tokens: one of reasoning, two of text, a call, another, the stop id."""

    def says(request: Any) -> Say:
        if any(message["role"] == "assistant" for message in request.job.messages):
            return Say("then")
        calls = [("own-1", "f", "{}"), ("own-2", "f", '{"a": 1}')]
        return Say(
            "ab", reasoning="h", calls=calls, fail_after=fail_after if fail_after < 6 else None, lie=fail_after // 6
        )

    async with running(ParrotEngine(says)) as proxy:
        stream = await proxy.openai("t").responses.create(model="m", input="hi", tools=[TOOL], stream=True)
        events = [event.to_dict() async for event in stream]
        assert events[-1]["type"] == "response.failed"
        kept: list[Any] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert len(kept) == closed
        answers = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
            for item in kept
            if item["type"] == "function_call"
        ]
        again: list[Any] = [{"role": "user", "content": "hi"}, *kept, *answers, {"role": "user", "content": "go on"}]
        await proxy.openai("t").responses.create(model="m", input=again, tools=[TOOL])
        one, two = await proxy.turns("t")
        assert (one.partial, two.parent_id, two.fork_reason) == (True, one.turn_id, None)
        assert [message["role"] for message in two.messages] == ["tool"] * len(answers) + ["user"]
