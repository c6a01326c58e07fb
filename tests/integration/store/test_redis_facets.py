"""What sessions are found by in Redis: few records are read, and an index that is behind shows nothing that does not match."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from steno.contracts.records import Session
from steno_proxy.store.encoding.head import head_of
from steno_proxy.store.facets import SessionFilter, facets_of
from steno_proxy.store.redis.index import GRACE_S
from steno_proxy.store.redis.lists import RedisLists
from steno_proxy.store.redis.schema import FACETS
from steno_proxy.store.redis.store import RedisStore
from tests.support.contracts.list import listed
from tests.support.contracts.recording import END, record
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.recordings import session

LINE_BYTES = 240
"""Of Redis's memory, for one session."""


async def rewarded(store: RedisStore, **wanted: Any) -> list[str]:
    return await listed(store, wanted=SessionFilter(**wanted))


async def ended(store: RedisStore, trial_id: str, reward: float = 1.0, **fields: Any) -> None:
    await store.register(session(trial_id, **fields))
    await store.complete(trial_id, status="completed", **END | {"reward": reward})


async def test_only_the_records_that_match_are_read_and_a_line_is_small(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"fix-the-parser-{number:05}.{number % 8}" for number in range(200)]
    shared: dict[str, Any] = {"run_id": "run-2026-11-23", "metadata": {"agent": "mini-swe-agent"}}
    await asyncio.gather(*(ended(store, name, float(name == names[100]), **shared) for name in names))
    asked_for: list[str] = []
    sessions = RedisLists.sessions

    async def counted(self: RedisLists, trial_ids: Sequence[str]) -> list[Session]:
        asked_for.extend(trial_ids)
        return await sessions(self, trial_ids)

    monkeypatch.setattr(RedisLists, "sessions", counted)
    assert await rewarded(store, min_reward=1.0) == [names[100]] == asked_for
    assert await rewarded(store, agent="nobody") == await rewarded(store, mark="synthetic") == []
    assert asked_for == [names[100]]
    with server.client() as client:
        assert 0 < (client.memory_usage(FACETS, samples=0) or 0) / len(names) <= LINE_BYTES


async def test_a_line_that_is_behind_hides_a_session_for_a_while_and_shows_none_wrongly(
    server: RedisServer, store: RedisStore
) -> None:
    await ended(store, "a", 0.0)
    await ended(store, "b", 1.0)
    with server.client() as client:
        lines = client.hgetall(FACETS)
        client.hset(FACETS, "a", lines[b"b"])
        assert await rewarded(store, min_reward=1.0) == ["b"], "the record decides"
        client.hset(FACETS, "a", b'[9, "spoilt"')
        client.hdel(FACETS, "b")
    assert await rewarded(store, min_reward=1.0) == ["b"], "what has no line that can be read is looked at"
    assert await rewarded(store, max_reward=0.0) == ["a"]


async def test_what_was_read_earlier_does_not_undo_what_was_read_later(store: RedisStore) -> None:
    await store.register(session("a"))
    given_up = await store.complete("a", status="aborted", **END | {"reward": None}, final=False)
    await store.complete("a", status="aborted", **END)
    assert await rewarded(store, min_reward=1.0) == ["a"]
    await store._index.publish("a", head_of(given_up), found_by=facets_of(given_up))  # by a replica that was held up
    assert await rewarded(store, min_reward=1.0) == ["a"]


@pytest.mark.parametrize("dies_at", ["reward", "mark"])
async def test_what_a_crash_kept_from_the_index_is_found_after_a_sweep(
    server: RedisServer, store: RedisStore, dies_at: str
) -> None:
    now = 4_000_000_000.0  # later than Redis's clock says
    dying = RedisStore(server.url, clock=lambda: now, **PATIENT)
    healthy = RedisStore(server.url, clock=lambda: now, **PATIENT)
    await record(store, "a", 1)
    if dies_at == "mark":
        await store.complete("a", status="completed", **END)

    async def crash(*_: Any, **__: Any) -> None:
        raise InterruptedError

    dying._index.publish = crash  # type: ignore[method-assign]
    wanted = {"mark": "synthetic"} if dies_at == "mark" else {"min_reward": 1.0}
    with pytest.raises(InterruptedError):
        if dies_at == "mark":
            await dying.add_marks("a", ["synthetic"])
        else:
            await dying.complete("a", status="completed", **END)
    assert await rewarded(healthy, **wanted) == []
    now += GRACE_S + 1
    assert await healthy.sweep(now=now) == 1
    assert await rewarded(healthy, **wanted) == ["a"]
    await dying.close()
    await healthy.close()


async def test_nothing_is_left_of_sessions_that_are_gone(server: RedisServer, store: RedisStore) -> None:
    for trial_id in ("deleted", "expired", "open"):
        await store.register(session(trial_id))
    await store.complete("expired", status="completed", **END)
    await store.delete("deleted", now=1.0, tombstone_s=60.0)
    assert await store.expire(now=END["now"] + 9.0, retention_s=1.0) == 1
    with server.client() as client:
        assert client.hkeys(FACETS) == [b"open"]
