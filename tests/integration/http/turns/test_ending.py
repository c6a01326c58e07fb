"""A turn that others end or wait for: its client leaves, its session is completed, the proxy stops, a retry comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from steno.contracts.errors import EngineFailed, NoWorker
from steno.contracts.records import IndexRow, Turn, bytes_to_ids
from steno.contracts.wire.frames import Generate, StreamEvent
from steno_proxy import metrics
from steno_proxy.store.interface import RetryKey
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.turns import request
from steno_proxy.turns.request import MOST_JOINED
from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

CHAT = "/t/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


async def test_a_client_that_leaves_cancels_the_generation_and_its_partial_turn_is_kept() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("abc", gates={2: gate}))) as proxy:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if '"b"' in line:
                    break
        await until(lambda: proxy.engine.cancelled)
        [turn] = await proxy.turns("t", 1)
        assert (turn.partial, turn.finish_reason, turn.delivered) == (True, "cancelled", 2)
        assert bytes_to_ids(turn.completion_ids).tolist() == [97, 98]
        assert turn.error is not None and turn.error.startswith("client_left")


async def test_a_client_that_leaves_an_unstreamed_request_cancels_it_too() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("abc", gates={2: gate}))) as proxy:
        client = asyncio.create_task(proxy.http.post(CHAT, json=BODY))
        await until(lambda: proxy.engine.requests)
        client.cancel()
        await until(lambda: proxy.engine.cancelled)


async def test_completing_a_session_cancels_its_turns_keeps_them_and_refuses_later_calls() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("abc", gates={2: gate}))) as proxy:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            async for line in lines:
                if '"b"' in line:
                    break
            done = await proxy.http.post("/sessions/t/complete", json={"reward": 0.5})
            assert done.status_code == 200 and done.json()["counts"]["turns"] == 1
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in lines:
                    pass
        [turn] = await proxy.turns("t")
        assert (turn.partial, turn.finish_reason, turn.completion_tokens) == (True, "cancelled", 2)
        refused = await proxy.chat("t", "more")
        assert refused.status_code == 410 and refused.json()["error"]["code"] == "session_closed"
        assert (await proxy.http.post("/sessions/t/complete", json={"reward": 0.5})).status_code == 200
        assert (await proxy.http.post("/sessions/t/complete", json={"reward": 0.6})).status_code == 409


class SlowStore(MemoryStore):
    """A store whose commits wait for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.committing = asyncio.Event()
        self.go = asyncio.Event()

    async def commit(
        self, trial_id: str, turn: Turn, row: IndexRow, *, now: float, retry_key: RetryKey | None = None
    ) -> int:
        self.committing.set()
        await self.go.wait()
        return await super().commit(trial_id, turn, row, now=now, retry_key=retry_key)


async def test_the_finish_reason_waits_for_the_commit() -> None:
    """I3: all text may have left, nothing that ends the answer has."""
    store = SlowStore()
    async with running(store=store) as proxy:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            seen = []
            async for line in lines:
                seen.append(line)
                if '"o"' in line:
                    break
            await store.committing.wait()
            assert await proxy.turns("t") == [] and 'finish_reason":"stop' not in "".join(seen)
            store.go.set()
            rest = [line async for line in lines if line]
        assert json.loads(rest[0][6:])["choices"][0]["finish_reason"] == "stop" and rest[-1] == "data: [DONE]"


async def test_a_client_that_leaves_during_the_commit_does_not_undo_it() -> None:
    store = SlowStore()
    async with running(store=store) as proxy:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if '"o"' in line:
                    break
            await store.committing.wait()
        await asyncio.sleep(0.05)
        store.go.set()
        [turn] = await proxy.turns("t", 1)
        assert (turn.partial, turn.finish_reason) == (False, "stop")


async def test_a_proxy_told_to_stop_lets_streams_finish_and_takes_no_more(proxy: Proxy) -> None:
    gate = asyncio.Event()
    proxy.engine.script = lambda request: Say("ab", gates={1: gate})
    running_chat = asyncio.create_task(proxy.chat("t", "x"))
    await until(lambda: proxy.engine.requests)
    draining = asyncio.create_task(proxy.app.state.turns.drain(60))
    await asyncio.sleep(0.02)
    assert (await proxy.chat("t", "y")).status_code == 503
    gate.set()
    assert (await running_chat).status_code == 200
    await draining


async def test_a_proxy_told_to_stop_keeps_what_does_not_finish_in_time(proxy: Proxy) -> None:
    proxy.engine.script = lambda request: Say("ab", gates={1: asyncio.Event()})
    running_chat = asyncio.create_task(proxy.chat("t", "x"))
    await until(lambda: proxy.app.state.hub.counts.tokens == 1)
    await proxy.app.state.turns.drain(0.05)
    assert (await running_chat).status_code == 503
    [turn] = await proxy.turns("t")
    assert turn.partial and turn.completion_tokens == 1


async def test_an_answer_in_one_piece_whose_client_left_was_not_delivered() -> None:
    store = SlowStore()
    async with running(store=store) as proxy:
        client = asyncio.create_task(proxy.http.post(CHAT, json=BODY))
        await store.committing.wait()
        [asked] = proxy.app.state.turns._running
        client.cancel()
        await until(lambda: asked.log.first.client.gone)
        store.go.set()
        async with asyncio.timeout(60):
            while [turn.delivered for turn in await proxy.turns("t", 1)] != [0]:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("leaves", [False, True])
async def test_nor_were_the_choices_of_one_that_failed_before_all_had_ended(leaves: bool) -> None:
    gate = asyncio.Event()
    says = [Say("ab"), Say("cd", gates={1: gate}, fail_after=1)]
    async with running(ParrotEngine(lambda request: says.pop(0))) as proxy:
        client = asyncio.create_task(proxy.http.post(CHAT, json=BODY | {"n": 2}))
        await until(lambda: len(proxy.engine.requests) == 2)
        [turn] = await proxy.turns("t", 1)
        assert (turn.partial, turn.delivered) == (False, turn.completion_tokens), "it is about to be"
        [asked] = proxy.app.state.turns._running
        if leaves:
            client.cancel()
        else:
            gate.set()
            assert (await client).status_code == 503
        await until(asked.done.is_set)
        assert [(turn.partial, turn.delivered) for turn in await proxy.turns("t")] == [(False, 0), (True, 0)]


class SlowToRefuse(MemoryStore):
    """Notes a refusal when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_note = asyncio.Event()
        self.refusing = self.asked = 0

    async def refused(self, *args: Any, **kwargs: Any) -> None:
        self.refusing += 1
        await self.may_note.wait()
        await super().refused(*args, **kwargs)

    async def asked_again(self, *args: Any, **kwargs: Any) -> bool:
        self.asked += 1
        return await super().asked_again(*args, **kwargs)


class Silent(ParrotEngine):
    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        await asyncio.Event().wait()
        yield  # type: ignore[misc]


async def test_no_more_retries_wait_for_one_answer_than_may() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda _: Say("hello", gates={1: gate}))) as proxy:
        first = asyncio.create_task(proxy.http.post(CHAT, json=BODY))
        await until(lambda: proxy.engine.requests)
        again = {"x-stainless-retry-count": "1"}
        rest = [asyncio.create_task(proxy.http.post(CHAT, json=BODY, headers=again)) for _ in range(MOST_JOINED + 3)]
        refused: list[Any] = []
        while len(refused) < 3:
            done, _ = await asyncio.wait(set(rest) - set(refused), timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert done, "as many as asked wait"
            refused += done
        assert {(await one).status_code for one in refused} == {429}
        gate.set()
        answers = [await one for one in (first, *rest) if one not in refused]
        assert [answer.status_code for answer in answers] == [200] * (MOST_JOINED + 1)
        assert len(await proxy.turns("t")) == 1


async def test_a_retry_does_not_join_what_has_failed_and_is_about_to_end() -> None:
    says, store = [Say(refuse=EngineFailed("the engine has died")), Say("hello")], SlowToRefuse()
    async with running(ParrotEngine(lambda _: says.pop(0)), store=store) as proxy:
        first = asyncio.create_task(proxy.http.post(CHAT, json=BODY))
        await until(lambda: store.refusing)
        again = asyncio.create_task(proxy.http.post(CHAT, json=BODY, headers={"x-stainless-retry-count": "1"}))
        await until(lambda: store.asked)
        await asyncio.sleep(0.1)
        store.may_note.set()
        assert (await first).status_code == 503
        assert (await again).json()["choices"][0]["message"]["content"] == "hello"


async def test_whose_client_left_is_forgotten_however_long_the_store_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "ABORT_S", 0.05)
    store = SlowToRefuse()
    async with running(Silent(), store=store) as proxy:
        turns = proxy.app.state.turns
        recording = await turns.recorder.enter("t")
        before = metrics.STREAMS._value.get()
        client = asyncio.create_task(proxy.http.post(CHAT, json=BODY))
        await until(lambda: recording.in_flight)
        await asyncio.sleep(0.2)
        client.cancel()
        await until(lambda: store.refusing)
        await asyncio.sleep(0.5)
        store.may_note.set()
        await until(lambda: not recording.in_flight and not turns._running)
        assert metrics.STREAMS._value.get() == before


async def test_streams_that_had_been_opened_beside_one_that_could_not_are_counted_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(ParrotEngine(lambda _: Say("hello", gates={0: asyncio.Event()}))) as proxy:
        hub, before = proxy.app.state.hub, metrics.STREAMS._value.get()
        opened = []

        def open_two(order: Any) -> Any:
            if len(opened) == 2:
                raise NoWorker("they have all left")
            opened.append(type(hub).open(hub, order))
            return opened[-1]

        monkeypatch.setattr(hub, "open", open_two)
        assert (await proxy.http.post(CHAT, json=BODY | {"n": 3})).status_code == 503
        assert all(stream.ended for stream in opened) and metrics.STREAMS._value.get() == before
