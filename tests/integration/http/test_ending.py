"""How a request ends while others wait for it, and what must be left of it: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proxy import metrics, request
from proxy.contracts.errors import EngineFailed, NoWorker
from proxy.contracts.frames import Generate, StreamEvent
from proxy.store.memory import MemoryStore
from tests.integration.http.conftest import running
from tests.support.parrot import ParrotEngine, Say
from tests.support.waiting import until

CHAT = "/t/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


class SlowStore(MemoryStore):
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


async def test_a_retry_does_not_join_what_has_failed_and_is_about_to_end() -> None:
    says, store = [Say(refuse=EngineFailed("the engine has died")), Say("hello")], SlowStore()
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
    store = SlowStore()
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
