"""Retries that SDKs mark: joined, given again or asked again, on whichever replica, and what is on record of each."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from steno.contracts.errors import EngineFailed
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.store.redis.store import RedisStore
from tests.integration.http.conftest import Proxy, running
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

AGAIN = {"x-stainless-retry-count": "1"}
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0.5}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT = "/t/v1/chat/completions"


async def ask(proxy: Proxy, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return await proxy.http.post(CHAT, json=BODY | fields, headers=headers or {})


async def read(proxy: Proxy, headers: dict[str, str], body: dict[str, Any] = BODY, path: str = CHAT) -> list[str]:
    """The data lines of a streamed answer."""
    async with proxy.http.stream("POST", path, json=body | {"stream": True}, headers=headers) as response:
        assert response.status_code == 200
        return [line async for line in response.aiter_lines() if line.startswith("data:")]


def text(lines: list[str]) -> str:
    chunks = [json.loads(line[5:]) for line in lines if "[DONE]" not in line]
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


async def leave_after(proxy: Proxy, letter: str, **fields: Any) -> None:
    """A streaming client that goes away when it has seen this letter."""
    body = BODY | {"stream": True} | fields
    async with proxy.http.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if f'"{letter}"' in line:
                break
    await until(lambda: proxy.engine.cancelled)


async def samples(proxy: Proxy) -> list[dict[str, Any]]:
    return list((await proxy.http.get("/sessions/t/samples")).json()["items"])


@pytest.mark.parametrize("n", [1, 2])
async def test_a_finished_turn_is_given_again_and_nothing_is_sampled(proxy: Proxy, n: int) -> None:
    first = (await ask(proxy, n=n)).json()
    again = (await ask(proxy, AGAIN, n=n)).json()
    assert again == first
    lines = await read(proxy, AGAIN, BODY | {"n": n})
    assert text(lines) == "hello" * n and lines[-1] == "data: [DONE]"
    assert {json.loads(line[5:])["id"] for line in lines[:-1]} == {first["id"]}
    assert len(proxy.engine.requests) == len(await proxy.turns("t")) == n


async def test_tool_calls_come_again_under_their_ids() -> None:
    async with running(ParrotEngine(lambda request: Say("so:", calls=[("own", "f", '{"a": 1}')]))) as proxy:
        first = (await ask(proxy, tools=TOOLS)).json()["choices"][0]
        lines = await read(proxy, AGAIN, BODY | {"tools": TOOLS})
        deltas = [c["delta"] for line in lines[:-1] for c in json.loads(line[5:])["choices"]]
        [call] = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert call["id"] == first["message"]["tool_calls"][0]["id"] and call["function"]["arguments"] == '{"a": 1}'
        assert len(proxy.engine.requests) == 1


@pytest.mark.parametrize("other", [{"temperature": 0.6}, {"model": "n"}, {"n": 2}, {"max_tokens": 9}, {"tools": TOOLS}])
async def test_a_mark_alone_makes_no_retry_of_another_request(proxy: Proxy, other: dict[str, Any]) -> None:
    await ask(proxy)
    await ask(proxy, AGAIN, **other)
    assert len(proxy.engine.requests) == 1 + other.get("n", 1)
    assert not any(turn.retry_of for turn in await proxy.turns("t"))


@pytest.mark.parametrize("mark", [{}, {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "soon"}])
async def test_equal_prompts_without_a_mark_are_siblings(proxy: Proxy, mark: dict[str, str]) -> None:
    await ask(proxy)
    await ask(proxy, mark)
    _, two = await proxy.turns("t")
    assert (two.fork_reason, two.retry_of) == ("sibling", None) and len(await samples(proxy)) == 2


async def test_an_answer_that_was_gone_on_from_has_arrived_and_is_not_what_is_asked_for_again(proxy: Proxy) -> None:
    reply = (await ask(proxy)).json()["choices"][0]["message"]
    await ask(proxy, messages=[*BODY["messages"], reply, {"role": "user", "content": "more"}])
    await ask(proxy, AGAIN)
    assert [turn.fork_reason for turn in await proxy.turns("t")] == [None, None, "sibling"]


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_running_turn_is_joined_and_both_get_it_from_the_beginning(streamed: bool) -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("abcd", gates={2: gate}))) as proxy:
        first = asyncio.create_task(read(proxy, {}))
        await until(lambda: proxy.engine.requests)
        await asyncio.sleep(0.05)
        again = asyncio.create_task(read(proxy, AGAIN) if streamed else ask(proxy, AGAIN))
        await until(lambda: _joined(proxy))
        gate.set()
        assert text(await first) == "abcd"
        found: Any = await again
        assert text(found) == "abcd" if streamed else found.json()["choices"][0]["message"]["content"] == "abcd"
        [turn] = await proxy.turns("t")
        assert (turn.delivered, turn.partial, turn.retry_of) == (5, False, None)


def _joined(proxy: Proxy) -> int:
    return sum(len(request.log.joined) for request in proxy.app.state.turns._running)


def _delivered(proxy: Proxy) -> list[int]:
    running = proxy.app.state.turns._running
    return [choice.transcript.delivered for request in running for choice in request.choices]


async def test_a_client_that_leaves_takes_nothing_from_the_one_that_joined() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("abcd", gates={2: gate}))) as proxy:
        body = BODY | {"stream": True}
        async with proxy.http.stream("POST", CHAT, json=body) as response:
            async for line in response.aiter_lines():
                if '"b"' in line:
                    break
            again = asyncio.create_task(read(proxy, AGAIN))
            await until(lambda: _joined(proxy))
        await until(lambda: all(request.log.first.client.gone for request in proxy.app.state.turns._running))
        gate.set()
        assert text(await again) == "abcd" and len(proxy.engine.requests) == 1
        [turn] = await proxy.turns("t")
        assert (turn.delivered, turn.partial) == (5, False)


async def test_when_the_last_that_listens_leaves_the_generation_is_cancelled() -> None:
    async with running(ParrotEngine(lambda request: Say("abcd", gates={2: asyncio.Event()}))) as proxy:
        both = [asyncio.create_task(read(proxy, {}))]
        await until(lambda: proxy.engine.requests)
        both.append(asyncio.create_task(read(proxy, AGAIN)))
        await until(lambda: _joined(proxy) and _delivered(proxy) == [2])
        for one in both:
            one.cancel()
        await until(lambda: proxy.engine.cancelled)
        [turn] = await proxy.turns("t", 1)
        assert (turn.partial, turn.delivered) == (True, 2)


async def test_those_who_joined_see_a_failure_as_the_first_does() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("abcd", gates={2: gate}, fail_after=3))) as proxy:
        first = asyncio.create_task(read(proxy, {}))
        await until(lambda: proxy.engine.requests)
        again = asyncio.create_task(read(proxy, AGAIN))
        await until(lambda: _joined(proxy))
        gate.set()
        for one in (first, again):
            with pytest.raises(httpx.RemoteProtocolError):
                await one


async def test_a_turn_that_broke_is_asked_again_and_superseded() -> None:
    gates = [{2: asyncio.Event()}, {}]
    async with running(ParrotEngine(lambda request: Say("abcd", gates=gates.pop(0)))) as proxy:
        await leave_after(proxy, "b")
        await proxy.turns("t", 1)
        assert text(await read(proxy, AGAIN)) == "abcd"
        one, two = await proxy.turns("t")
        assert (one.partial, one.delivered, one.superseded_by) == (True, 2, two.turn_id)
        assert (two.partial, two.retry_of, two.fork_reason) == (False, one.turn_id, "sibling")
        [sample] = await samples(proxy)
        assert sample["turn_ids"] == [two.turn_id]
        assert text(await read(proxy, {"x-stainless-retry-count": "2"})) == "abcd" and len(proxy.engine.requests) == 2


async def test_every_attempt_supersedes_the_one_before() -> None:
    async with running(ParrotEngine(lambda request: Say("abcd", fail_after=2))) as proxy:
        for count in range(3):
            with pytest.raises(httpx.RemoteProtocolError):
                await read(proxy, {"x-stainless-retry-count": str(count)})
        one, two, three = await proxy.turns("t")
        assert [turn.superseded_by for turn in (one, two, three)] == [two.turn_id, three.turn_id, None]
        assert [turn.retry_of for turn in (one, two, three)] == [None, one.turn_id, two.turn_id]
        assert [sample["turn_ids"] for sample in await samples(proxy)] == [[three.turn_id]]


async def test_of_several_choices_each_is_superseded_by_its_own() -> None:
    gates = [{}, {2: asyncio.Event()}, {}, {}]
    async with running(ParrotEngine(lambda request: Say("abcd", gates=gates.pop(0)))) as proxy:
        await leave_after(proxy, "b", n=2)
        await proxy.turns("t", 2)
        assert text(await read(proxy, AGAIN, BODY | {"n": 2})).count("d") == 2
        turns = await proxy.turns("t")
        old = {turn.choice: turn for turn in turns[:2]}
        new = {turn.choice: turn for turn in turns[2:]}
        assert {choice: turn.retry_of for choice, turn in new.items()} == {i: old[i].turn_id for i in (0, 1)}
        assert {turn.answer_id for turn in turns[2:]} == {new[0].turn_id}
        assert len(await samples(proxy)) == 2


async def test_a_request_that_was_refused_is_new_when_it_comes_again_and_no_retry_of_its_siblings() -> None:
    says = [Say("one"), Say(refuse=EngineFailed("not now")), Say("two")]
    async with running(ParrotEngine(lambda request: says.pop(0))) as proxy:
        assert (await ask(proxy)).status_code == 200
        assert (await ask(proxy)).status_code == 503
        answer = (await ask(proxy, AGAIN)).json()
        assert answer["choices"][0]["message"]["content"] == "two"
        one, two = await proxy.turns("t")
        assert (one.superseded_by, two.retry_of) == (None, None)


async def test_log_probabilities_that_are_not_on_record_are_sampled_anew(proxy: Proxy) -> None:
    await ask(proxy, logprobs=True)
    answer = (await ask(proxy, AGAIN, logprobs=True)).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == 6
    one, two = await proxy.turns("t")
    assert one.superseded_by == two.turn_id


async def test_the_last_answer_is_given_again_when_the_budget_is_spent(proxy: Proxy) -> None:
    await proxy.http.post("/sessions/t", json={"limits": {"max_turns": 1}})
    first = (await ask(proxy)).json()
    assert (await ask(proxy, AGAIN)).json() == first
    assert (await ask(proxy)).status_code == 403


async def test_plain_prompts_are_given_again_too(proxy: Proxy) -> None:
    for prompt in ("some text", [5, 6, 7]):
        answers = [await proxy.http.post("/t/v1/completions", json={"prompt": prompt}, headers=h) for h in ({}, AGAIN)]
        assert answers[0].json() == answers[1].json()
    assert len(proxy.engine.requests) == 2


async def test_another_replica_gives_the_answer_again_and_supersedes_what_broke() -> None:
    store = MemoryStore()
    gates = [{2: asyncio.Event()}]
    async with running(ParrotEngine(lambda r: Say("abcd", gates=gates.pop(0) if gates else {})), store=store) as one:
        await leave_after(one, "b")
        await one.turns("t", 1)
        async with running(ParrotEngine(lambda request: Say("efgh")), store=store) as two:
            assert text(await read(two, AGAIN)) == "efgh"
            assert text(await read(one, AGAIN)) == "efgh"
            assert (len(one.engine.requests), len(two.engine.requests)) == (1, 1)
            assert [turn.superseded_by is None for turn in await one.turns("t")] == [False, True]


def losing_one(module: Any) -> Any:
    """A client of `httpx`, or of the like, on a network that loses the first answer after it has left."""

    class LosesOne(module.AsyncBaseTransport):  # type: ignore[misc]
        def __init__(self) -> None:
            self.inner = module.AsyncHTTPTransport()
            self.requests = 0

        async def handle_async_request(self, request: Any) -> Any:
            self.requests += 1
            response = await self.inner.handle_async_request(request)
            if self.requests == 1:
                await response.aread()
                raise module.ReadError("the connection is gone", request=request)
            return response

    return module.AsyncClient(transport=LosesOne())


async def test_the_openai_sdks_own_retry_gets_the_answer_that_it_lost(proxy: Proxy) -> None:
    http = losing_one(httpx)
    client = openai.AsyncOpenAI(base_url=f"{proxy.url}/t/v1", api_key="none", max_retries=1, http_client=http)
    answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    [turn] = await proxy.turns("t")
    assert http._transport.requests == 2 and answer.id == f"chatcmpl-{turn.turn_id}"


async def test_the_anthropic_sdks_own_retry_gets_the_answer_that_it_lost() -> None:
    async with running(ParrotEngine(lambda r: Say("so:", reasoning="hm", calls=[("own", "f", '{"a": 1}')]))) as proxy:
        http = losing_one(httpx2)
        client = anthropic.AsyncAnthropic(base_url=f"{proxy.url}/t", api_key="none", max_retries=1, http_client=http)
        answer = await client.messages.create(
            model="m",
            max_tokens=64,
            thinking={"type": "adaptive"},
            messages=[{"role": "user", "content": "x"}],
            tools=[{"name": "f", "input_schema": {"type": "object"}}],
        )
        [turn] = await proxy.turns("t")
        assert http._transport.requests == 2 and answer.id.endswith(turn.turn_id)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]


async def test_who_joins_in_a_format_with_blocks_gets_closed_ones_only_from_the_record() -> None:
    """I3."""
    gate = asyncio.Event()
    say = Say("text", reasoning="hm", calls=[("own", "f", "{}")], gates={4: gate})
    async with running(ParrotEngine(lambda request: say)) as proxy:
        asked = [{"role": "user", "content": "x"}]
        body = {"model": "m", "max_tokens": 64, "messages": asked, "thinking": {"type": "adaptive"}}
        first = asyncio.create_task(proxy.http.post("/t/v1/messages", json=body))
        await until(lambda: proxy.engine.requests)
        await asyncio.sleep(0.05)
        again = asyncio.create_task(read(proxy, AGAIN, body, "/t/v1/messages"))
        await until(lambda: _joined(proxy))
        [turn] = await proxy.turns("t", 1)
        assert (turn.finish_reason, turn.reply.get("reasoning_content")) == ("open", "hm")
        gate.set()
        whole = (await first).json()
        events = [json.loads(line[5:]) for line in await again]
        opened = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        assert opened == [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
        assert "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta") == "text"
        assert events[-1]["type"] == "message_stop"
        [turn] = await proxy.turns("t")
        assert turn.finish_reason == "tool_calls" and not turn.partial


ASKED: list[Any] = [{"role": "user", "content": "x"}]
FORMATS: dict[str, dict[str, Any]] = {
    "/t/v1/chat/completions": {"model": "m", "messages": ASKED, "stop": ["EOT"]},
    "/t/v1/completions": {"model": "m", "prompt": "x"},
    "/t/v1/messages": {"model": "m", "max_tokens": 99, "messages": ASKED, "stop_sequences": ["EOT"]},
    "/t/v1/responses": {"model": "m", "input": "x"},
    "/t/v1beta/models/m:generateContent": {"contents": [{"parts": [{"text": "x"}]}]},
}


@pytest.mark.parametrize("path", FORMATS)
async def test_in_every_format_the_answer_comes_again_to_the_byte(path: str) -> None:
    body = FORMATS[path]
    say = Say("some text", reasoning="" if "prompt" in body else "hm", stop="EOT" if "messages" in body else "")
    async with running(ParrotEngine(lambda request: say)) as proxy:
        first = await proxy.http.post(path, json=body)
        again = await proxy.http.post(path, json=body, headers=AGAIN)
        assert (again.status_code, again.content) == (first.status_code, first.content) and first.status_code == 200
        if "model" in body:
            streamed = await proxy.http.post(path, json=body | {"stream": True}, headers=AGAIN)
            assert "some text" in streamed.text
        assert len(proxy.engine.requests) == 1


async def test_a_client_that_reads_no_more_and_asks_again_gets_a_new_attempt() -> None:
    """Its first connection is still open, and full."""
    engine = ParrotEngine(lambda request: Say("x" * 40_000) if len(engine.requests) == 1 else Say("yes"))
    async with running(engine) as proxy:
        payload = json.dumps(BODY | {"stream": True}).encode()
        said = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n"
        head = f"POST {CHAT} HTTP/1.1\r\n{said}\r\n"
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", proxy.port))
            deaf.sendall(head.encode() + payload)
            turns = proxy.app.state.turns
            await until(lambda: any(request.log.first.writing for request in turns._running))
            assert text(await read(proxy, AGAIN)) == "yes"
            one, two = await proxy.turns("t")
            assert (one.partial, one.superseded_by, two.partial) == (True, two.turn_id, False)


async def test_in_redis_what_broke_is_superseded_for_every_replica() -> None:
    redis = RedisServer()
    stores = [RedisStore(redis.url, **PATIENT), RedisStore(redis.url, **PATIENT)]
    for store in stores:
        await store.open()
    try:
        gates = [{2: asyncio.Event()}]
        async with running(
            ParrotEngine(lambda r: Say("abcd", gates=gates.pop(0) if gates else {})), store=stores[0]
        ) as one:
            await leave_after(one, "b")
            await one.turns("t", 1)
            async with running(ParrotEngine(lambda request: Say("efgh")), store=stores[1]) as two:
                assert text(await read(two, AGAIN)) == "efgh"
                assert text(await read(one, AGAIN)) == "efgh"
                old, new = await one.turns("t")
                assert (old.superseded_by, new.retry_of) == (new.turn_id, old.turn_id)
                assert [sample["turn_ids"] for sample in await samples(one)] == [[new.turn_id]]
    finally:
        for store in stores:
            await store.close()
        redis.close()


async def test_a_turn_open_at_another_replica_is_superseded_and_stays_so_when_it_ends() -> None:
    store = MemoryStore()
    gate = asyncio.Event()
    body = {"model": "m", "max_tokens": 64, "messages": ASKED, "thinking": {"type": "adaptive"}}
    async with running(ParrotEngine(lambda r: Say("abcd", reasoning="hm", gates={4: gate})), store=store) as one:
        first = asyncio.create_task(read(one, {}, body, "/t/v1/messages"))
        await until(lambda: one.engine.requests)
        [turn] = await one.turns("t", 1)
        assert turn.finish_reason == "open"
        async with running(ParrotEngine(lambda request: Say("efgh")), store=store) as two:
            answer = await two.http.post("/t/v1/messages", json=body, headers=AGAIN)
            assert answer.json()["content"][0]["text"] == "efgh"
            gate.set()
            assert '"message_stop"' in (await first)[-1]
            old, new = await two.turns("t")
            assert (old.finish_reason, old.superseded_by, new.retry_of) == ("stop", new.turn_id, old.turn_id)
            assert [sample["turn_ids"] for sample in await samples(two)] == [[new.turn_id]]


@pytest.mark.parametrize("prompt", ["some text", [5, 6, 7]])
async def test_a_plain_prompt_that_got_an_empty_text_is_given_it_again(prompt: Any) -> None:
    async with running(ParrotEngine(lambda request: Say(""))) as proxy:
        answers = [await proxy.http.post("/t/v1/completions", json={"prompt": prompt}, headers=h) for h in ({}, AGAIN)]
        assert answers[0].json() == answers[1].json() and len(proxy.engine.requests) == 1
        await proxy.http.post("/t/v1/completions", json={"prompt": prompt})
        assert [turn.parent_id for turn in await proxy.turns("t", at_least=2)] == [None, None]
