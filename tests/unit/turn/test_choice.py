"""What becomes of the writes of a choice when nobody waits for them any more, and of tokens that nobody has looked at."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from proxy import metrics
from proxy.contracts.canonical import Sampling
from proxy.contracts.errors import EngineFailed, Gone
from proxy.contracts.frames import Delta, Finish, Started
from proxy.contracts.records import floats_to_bytes, ids_to_bytes
from proxy.store.memory import MemoryStore
from tests.support.choices import Said


class Slow(MemoryStore):
    """Turns come on record, or fail to, when `go` is set."""

    def __init__(self, failure: Exception | None) -> None:
        super().__init__()
        self.failure, self.entered, self.go = failure, asyncio.Event(), asyncio.Event()

    async def commit(self, *args: Any, **kwargs: Any) -> int:
        self.entered.set()
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        return await super().commit(*args, **kwargs)


async def left(said: Said, store: Slow, waiting: asyncio.Task[None]) -> list[str]:
    """Whoever waits goes away in the middle of the write, which then ends. Returns: what the loop complains of."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(str(about["message"])))
    await store.entered.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    store.go.set()
    write = said.choice.commit or said.choice.saving
    assert write is not None
    await asyncio.wait({write})
    said.choice.commit = said.choice.saving = None
    del write
    await asyncio.sleep(0)
    gc.collect()
    return complaints


@pytest.mark.parametrize("still_open", [True, False])
async def test_a_write_that_fails_when_its_waiter_has_left_is_nobodys_business(still_open: bool) -> None:
    store = Slow(Gone("session trial is closed"))
    said = await spoken(store)
    write = said.choice.saved() if still_open else said.choice.committed(None)
    assert await left(said, store, asyncio.create_task(write)) == []


async def test_a_write_goes_on_to_its_end_when_its_waiter_has_left() -> None:
    store = Slow(None)
    said = await spoken(store)
    assert await left(said, store, asyncio.create_task(said.choice.committed(None))) == []
    assert [turn.completion_tokens for turn in await store.turns("trial")] == [1]


async def test_what_arrived_and_nobody_looked_at_is_of_a_turn_that_has_begun_else_late() -> None:
    """I4."""
    before = metrics.LATE_TOKENS._value.get()
    for looked_at, begun in ((True, True), (True, False), (False, False)):
        said = await Said.begin()
        started = Started(1, 0, ids_to_bytes([1]), 1, b"", Sampling())
        said.choice.stream.deliver(started)
        for token in (7, 8):
            said.choice.stream.deliver(Delta(1, ids_to_bytes([token]), floats_to_bytes([-0.5]), "run/1", "x"))
        if looked_at:
            first, *untaken = await said.choice.stream.next()
            said.choice.transcript.take(first)
            said.choice.stream.put_back(untaken)
            said.choice.facts.started = 1.0 if begun else None
        said.choice.cut_off("left")
        turns = await said.turns(EngineFailed("gone"))
        assert [(turn.partial, turn.completion_tokens) for turn in turns] == ([(True, 2)] if begun else [])
    assert metrics.LATE_TOKENS._value.get() - before == 4


async def spoken(store: Slow) -> Said:
    said = await Said.begin(store)
    said.hear(Delta(1, ids_to_bytes([7]), floats_to_bytes([-0.5]), "run/1", "x"), Finish(1, "stop", 1))
    return said
