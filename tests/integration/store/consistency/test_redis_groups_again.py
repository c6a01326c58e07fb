"""A group whose last session goes at the moment when the same group is made again: it is there, and its run has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from steno.contracts.errors import NotFound
from steno.contracts.records import Group, Session
from steno_proxy.store.redis.store import RedisStore
from tests.integration.store.conftest import opened
from tests.support.contracts.list import listed, make_group
from tests.support.contracts.recording import END
from tests.support.machine.redis_server import PATIENT, RedisServer

LATER = END["now"] + 10.0


@pytest.fixture
async def other(server: RedisServer) -> AsyncIterator[RedisStore]:
    async with opened(server, **PATIENT) as store:
        yield store


async def over(store: RedisStore) -> tuple[Group, list[Session]]:
    """A group whose only session is past its retention."""
    group, sessions = make_group("g", 1)
    await store.create_group(group, sessions)
    await store.complete("g-0", status="aborted", **(END | {"reward": None}))
    await store.settle("g-0", now=END["now"])
    return group, sessions


async def check_there(store: RedisStore, group: Group) -> None:
    assert await store.group("g") == group
    assert await listed(store, status="open", group_id="g") == group.trial_ids
    [place] = await store.runs.groups("r")
    assert (place.state, place.ended) == ("running", 0)
    await store.complete("g-0", status="aborted", **(END | {"reward": None}))
    await store.settle("g-0", now=END["now"])
    [place] = await store.runs.groups("r")
    assert (place.state, place.ended) == ("empty", 1)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_group_that_is_made_again_while_its_run_forgets_it_is_there(
    store: RedisStore, other: RedisStore, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record was found by who made it, and then deleted."""
    group, sessions = await over(store)
    gone = store._index._group_gone

    async def meanwhile(found: Group) -> None:
        if when == "before":
            await other.create_group(group, sessions)
        await gone(found)
        if when == "after":
            await other.create_group(group, sessions)

    monkeypatch.setattr(store._index, "_group_gone", meanwhile)
    assert await store.expire(now=LATER, retention_s=1.0) == 1
    monkeypatch.undo()
    await check_there(other, group)


async def test_a_group_that_is_listed_only_once_its_record_has_gone_is_there(
    store: RedisStore, other: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, sessions = await over(store)
    announce = other._index.announce

    async def meanwhile(*args: Any) -> Any:
        assert await store.expire(now=LATER, retention_s=1.0) == 1
        monkeypatch.undo()
        return await announce(*args)

    prior = group.model_copy(update={"created_at": group.created_at + 1.0})
    monkeypatch.setattr(other._index, "announce", meanwhile)
    await other.create_group(prior, sessions)
    await check_there(other, group)


async def test_a_group_is_not_put_back_whose_sessions_went_while_it_was_made(
    store: RedisStore, other: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, sessions = make_group("g", 1)
    create = store._create

    async def deleted(*args: Any) -> Session:
        made = await create(*args)
        await other.delete("g-0", now=1.0, tombstone_s=60.0)
        return made

    monkeypatch.setattr(store, "_create", deleted)
    await store.create_group(group, sessions)
    with pytest.raises(NotFound):
        await store.group("g")
    assert await store.runs.groups("r") == []
