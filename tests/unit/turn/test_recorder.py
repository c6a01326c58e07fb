"""Recordings are a cache of the store's rows: right under concurrency, eviction, deletion and re-use of an id."""

from __future__ import annotations

import asyncio

import pytest

from proxy.contracts.errors import Gone, NotFound
from proxy.contracts.records import IndexRow, Session, Timings, Turn
from proxy.recorder import Recorder
from proxy.sessions.normalise import message_digest
from proxy.store.memory import MemoryStore

USER = {"role": "user", "content": "hi"}


def turn_and_row(i: int) -> tuple[Turn, IndexRow]:
    reply = {"role": "assistant", "content": f"reply {i}"}
    turn = Turn(turn_id=f"{i:012x}", messages=[USER], reply=reply, timings=Timings(queued=1.0))
    digests = message_digest(USER) + message_digest(reply)
    return turn, IndexRow(turn.turn_id, -1, digests, b"\0" * 8, b"\0" * 8, "stop", False, 0, completion_tokens=0)


def recorder(store: MemoryStore, **options: object) -> Recorder:
    given = {"cache_bytes": 10**9, "implicit": True, "clock": lambda: 100.0} | options
    return Recorder(store, **given)  # type: ignore[arg-type]


async def test_an_unknown_trial_is_registered_only_where_that_is_allowed() -> None:
    store = MemoryStore()
    with pytest.raises(NotFound):
        await recorder(store, implicit=False).enter("t")
    assert (await recorder(store).enter("t")).session is not None


async def test_two_replicas_see_each_others_turns() -> None:
    store = MemoryStore()
    one, two = recorder(store), recorder(store)
    here, there = await one.enter("t"), await two.enter("t")
    await one.commit(here, *turn_and_row(0))
    await two.commit(there, *turn_and_row(1))
    assert (here.turns, there.turns) == (1, 0)
    here, there = await one.enter("t"), await two.enter("t")
    assert here.tree.ids == there.tree.ids == ["000000000000", "000000000001"]


class SlowTail(MemoryStore):
    """A store that answers `tail` one event-loop turn later, so that requests overlap."""

    async def tail(self, trial_id: str, start: int):  # type: ignore[no-untyped-def]
        found = await super().tail(trial_id, start)
        await asyncio.sleep(0)
        return found


async def test_overlapping_requests_add_each_row_once() -> None:
    store = SlowTail()
    warm = recorder(store)
    recording = await warm.enter("t")
    for i in range(5):
        await warm.commit(recording, *turn_and_row(i))
    cold = recorder(store)
    found = await asyncio.gather(*(cold.enter("t") for _ in range(4)))
    assert len({id(recording) for recording in found}) == 1 and found[0].turns == 5


async def test_the_least_recently_used_are_dropped_and_rebuilt() -> None:
    store = MemoryStore()
    small = recorder(store, cache_bytes=1)
    await small.commit(await small.enter("a"), *turn_and_row(0))
    await small.enter("b")
    assert small.trees()[0] == 1
    assert (await small.enter("a")).turns == 1


async def test_an_id_in_use_again_starts_a_new_tree() -> None:
    store = MemoryStore()
    keeper = recorder(store)
    await keeper.commit(await keeper.enter("t"), *turn_and_row(0))
    await store.complete("t", status="completed", reward=None, end_reason="x", metrics={}, now=100.0)
    with pytest.raises(Gone):
        await keeper.enter("t")
    assert await store.expire(now=10_000.0, retention_s=1.0) == 1
    await store.register(Session(trial_id="t", created_at=10_001.0, updated_at=10_001.0))
    assert (await keeper.enter("t")).turns == 0
