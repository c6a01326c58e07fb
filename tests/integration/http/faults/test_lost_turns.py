"""A store that has lost turns which agents were told of (a failover without `redis_wait_replicas`, a power cut): what is left
goes on exactly. No prompt begins with what is not on record, whatever replicas remember (I1, I2); no turn hangs in the air."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from steno.contracts.wire.frames import Generate
from steno_proxy import metrics
from steno_proxy.store.redis.store import RedisStore
from tests.integration.http.conftest import Proxy, running
from tests.integration.http.faults.test_retries import AGAIN
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.losing import LosingRedis, LosingStore
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def reply_to(text: str) -> Message:
    return {"role": "assistant", "content": f"reply to {text}"}


class Trial:
    """A trial at two replicas, whose store may forget. held: what answers to `hold …` wait for, after their first token."""

    def __init__(self, held: asyncio.Event) -> None:
        self.held = held
        self.one: Proxy
        self.two: Proxy
        self.store: LosingStore | LosingRedis

    async def post(self, proxy: Proxy, messages: list[Message], **headers: str) -> Any:
        return await proxy.http.post("/t/v1/chat/completions", json={"messages": messages}, headers=headers)

    async def ask(self, proxy: Proxy, *said: Message) -> list[Message]:
        """What was said, and the answer to it."""
        answer = await self.post(proxy, [*said])
        assert answer.status_code == 200, answer.text
        return [*said, answer.json()["choices"][0]["message"]]

    async def mark(self) -> None:
        """What is lost later is what comes after this."""
        assert (await self.one.http.post("/sessions/t", json={})).status_code == 200
        self.store.mark("t")

    async def turns(self) -> list[tuple[int | None, str, str | None]]:
        """Of each turn: number of its parent, what was asked last, why it forked. Checked: it was given the tokens on record of
        what it goes on from, all the rest in messages, and it can be read as a sample."""
        turns = await self.one.turns("t")
        requests = {request.turn_id: request for proxy in (self.one, self.two) for request in proxy.engine.requests}
        paths: dict[str | None, bytes] = {None: b""}
        for turn in turns:
            request = requests[turn.turn_id]
            assert request.prefix_ids == paths[turn.parent_id], f"turn {turn.index}"
            assert len(request.job.messages) - request.prefix_messages == len(turn.messages), f"turn {turn.index}"
            paths[turn.turn_id] = paths[turn.parent_id] + turn.new_prompt_ids + turn.completion_ids
        samples = (await self.one.http.get("/sessions/t/samples")).json()
        assert {one for sample in samples["items"] for one in sample["turn_ids"]} == {turn.turn_id for turn in turns}
        numbers = {turn.turn_id: turn.index for turn in turns}
        return [(numbers.get(turn.parent_id), turn.messages[-1]["content"], turn.fork_reason) for turn in turns]


@contextlib.asynccontextmanager
async def trial(kind: str = "memory") -> AsyncIterator[Trial]:
    held = asyncio.Event()

    def says(request: Generate) -> Say:
        asked = str(request.job.messages[-1]["content"])
        return Say(f"reply to {asked}", gates={1: held} if asked.startswith("hold") else {})

    found = Trial(held)
    async with contextlib.AsyncExitStack() as stack:
        if kind == "memory":
            found.store = LosingStore()
            stores: list[Any] = [found.store] * 2
        else:
            server = stack.enter_context(contextlib.closing(RedisServer()))
            found.store = LosingRedis(server)
            stores = [RedisStore(server.url, **PATIENT) for _ in range(2)]
            for store in stores:
                stack.push_async_callback(store.close)
        found.one = await stack.enter_async_context(running(ParrotEngine(says), store=stores[0]))
        found.two = await stack.enter_async_context(running(ParrotEngine(says), store=stores[1]))
        yield found


@pytest.mark.parametrize("kind", ["memory", "redis"])
@pytest.mark.parametrize("left", [0, 1])
async def test_what_was_lost_is_nothing_to_go_on_from(kind: str, left: int, caplog: pytest.LogCaptureFixture) -> None:
    async with trial(kind) as t:
        said: list[Message] = []
        for number in range(2):
            if number == left:
                await t.mark()
            said = await t.ask(t.one, *said, user(f"{number}"))
        t.store.lose("t")
        with caplog.at_level(logging.ERROR):
            for number, proxy in enumerate((t.one, t.one, t.two, t.one), start=2):
                said = await t.ask(proxy, *said, user(f"{number}"))
        asked = [*["0"][:left], "2", "3", "4", "5"]
        assert await t.turns() == [(number - 1 if number else None, text, None) for number, text in enumerate(asked)]
        told = [record.message for record in caplog.records if "lost" in record.message]
        assert len(told) == 1 and f"number {max(left, 1)}, is not on record any more" in told[0], "once, by who knew it"


async def test_its_number_may_be_another_turns_by_now() -> None:
    """As many turns as before, so that counting them says nothing."""
    async with trial() as t:
        first = await t.ask(t.one, user("0"))
        await t.mark()
        lost = await t.ask(t.one, *first, user("lost"))
        t.store.lose("t")
        other = await t.ask(t.two, *first, user("other"))
        await t.ask(t.one, *lost, user("1"))
        await t.ask(t.one, *other, user("2"))
        await t.ask(t.two, *lost, user("1"), reply_to("1"), user("3"))
        assert await t.turns() == [
            (None, "0", None), (0, "other", None), (0, "1", "diverged"), (1, "2", None), (2, "3", None)
        ]  # fmt: skip


async def test_an_answer_that_goes_on_from_what_is_lost_meanwhile_is_an_error_and_can_be_asked_again() -> None:
    unrecorded = metrics.UNRECORDED_TOKENS.labels("store_unavailable")._value
    async with trial() as t:
        first = await t.ask(t.one, user("0"))
        await t.mark()
        said = [*await t.ask(t.one, *first, user("lost")), user("hold")]
        before, asked = unrecorded.get(), asyncio.ensure_future(t.post(t.one, said))
        streamed = asyncio.ensure_future(_lines(t.one, said))
        await until(lambda: len(t.one.engine.requests) == 4)
        t.store.lose("t")
        t.held.set()
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert "which this answer continues, is not on record any more" in answer.json()["error"]["message"]
        lines = await streamed
        assert "[DONE]" not in lines[-1] and unrecorded.get() - before == 2 * len("reply to hold.")
        assert await t.turns() == [(None, "0", None)]
        again = await t.post(t.one, said, **AGAIN)
        assert again.json()["choices"][0]["message"]["content"] == "reply to hold"
        assert await t.turns() == [(None, "0", None), (0, "hold", None)]


async def test_a_retry_of_what_was_answered_and_lost_is_sampled_anew() -> None:
    async with trial() as t:
        first = await t.ask(t.one, user("0"))
        await t.mark()
        said = [*first, user("1")]
        await t.ask(t.one, *said)
        answer = (await t.post(t.one, said, **AGAIN)).json()
        assert len(t.one.engine.requests) == 2, "what is on record is given again"
        t.store.lose("t")
        again = (await t.post(t.one, said, **AGAIN)).json()
        assert again["id"] != answer["id"] and len(t.one.engine.requests) == 3
        assert await t.turns() == [(None, "0", None), (0, "1", None)]


@pytest.mark.parametrize("taken", [False, True])
async def test_a_turn_that_is_lost_while_it_is_open_comes_on_record_whole(taken: bool) -> None:
    """taken: another turn has its number by then."""
    async with trial() as t:
        await t.mark()
        t.one.engine.script = lambda request: Say("ab", calls=[("own", "f", "{}")], gates={3: t.held})
        body = {"max_tokens": 100, "messages": [user("0")], "stream": True}
        seen = []
        async with t.one.http.stream("POST", "/t/v1/messages", json=body) as response:
            async for line in response.aiter_lines():
                event = json.loads(line[6:]) if line.startswith("data: ") else {}
                seen.append(event.get("type"))
                if seen[-1] == "content_block_stop" and not t.held.is_set():
                    t.store.lose("t")
                    if taken:
                        await t.ask(t.two, user("other"))
                    t.held.set()
        assert "message_stop" in seen
        t.one.engine.script = lambda request: Say("then")
        call = {"id": f"toolu_{(await t.one.turns('t'))[-1].turn_id}_0", "type": "tool_use", "name": "f", "input": {}}
        kept = [{"type": "text", "text": "ab"}, call]
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}]}
        body = {"max_tokens": 100, "messages": [user("0"), {"role": "assistant", "content": kept}, result]}
        assert (await t.one.http.post("/t/v1/messages", json=body)).status_code == 200
        if not taken:
            assert await t.turns() == [(None, "0", None), (0, "ok", None)]
            return
        await t.ask(t.one, user("other"), reply_to("other"), user("1"))
        assert await t.turns() == [(None, "other", None), (None, "0", None), (1, "ok", None), (0, "1", None)]


async def _lines(proxy: Proxy, messages: list[Message]) -> list[str]:
    """The lines of a streamed answer, as far as they come."""
    lines: list[str] = []
    with contextlib.suppress(Exception):  # the connection breaks
        async with proxy.http.stream(
            "POST", "/t/v1/chat/completions", json={"messages": messages, "stream": True}
        ) as response:
            async for line in response.aiter_lines():
                lines.append(line)
    return [line for line in lines if line]
