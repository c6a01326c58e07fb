"""What is deleted is nowhere to be read, however far it was on its way to the archive; and no copy of it stays there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steno.contracts.errors import Gone, NotFound
from steno_proxy.store.redis.schema import ARCHIVED, ARCHIVER, ARCHIVING, BLANKS, COPIES, DEAD
from steno_proxy.store.redis.store import RedisStore
from tests.integration.store.archive.support import (
    FaultyFileSystem,
    ended,
    keys_of,
    move,
    replica,
    trials_in,
)
from tests.support.contracts.list import ALL, listed
from tests.support.contracts.recording import END, record
from tests.support.machine.redis_server import RedisServer

DELETED: dict[str, Any] = {"now": 100.0, "tombstone_s": 600.0}


async def check_gone(store: RedisStore, server: RedisServer, url: str, trial_id: str) -> None:
    """Now, and once its tombstone has gone too."""
    for call in (store.session, store.turns):
        with pytest.raises(Gone):
            await call(trial_id)
    with server.client() as client:
        for key in (ARCHIVER, DEAD, *keys_of(server, trial_id)):
            client.delete(key)
    for call in (store.session, store.turns):
        with pytest.raises(NotFound):
            await call(trial_id)
    assert trial_id not in await listed(store)
    await move(store)
    assert trial_id not in trials_in(url)
    with server.client() as client:
        assert not client.hexists(ARCHIVED, trial_id) and client.scard(BLANKS) == 0


@pytest.mark.parametrize("moment", ["write", "commit"])
async def test_a_session_that_is_deleted_while_it_leaves_is_gone(
    store: RedisStore, server: RedisServer, url: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trial_id in ("a", "b"):
        await ended(store, trial_id, 1)
    other, archiver = replica(server, url)
    where: Any = archiver._objects if moment == "write" else other.archive
    real = getattr(where, moment)

    async def meanwhile(*args: Any) -> Any:
        done = await real(*args)
        await store.delete("a", **DELETED)
        return done

    monkeypatch.setattr(where, moment, meanwhile)
    assert await move(other, archiver) == 1
    await other.close()
    await check_gone(store, server, url, "a")
    assert trials_in(url) == ["b"] and len(await store.turns("b")) == 1


async def test_a_deletion_that_an_archiver_did_not_live_to_see_is_one_all_the_same(
    store: RedisStore, server: RedisServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies between the session's place and its leaving; the deletion had looked for a place before."""
    await ended(store, "a", 1)
    dying, archiver = replica(server, url)
    commit, publish = dying.archive.commit, store._index.publish

    async def dies(*args: Any) -> bool:
        await commit(*args)
        raise KeyboardInterrupt

    async def late(*args: Any, **options: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            await move(dying, archiver)
        await publish(*args, **options)

    state = await store.departures.prepare("a", END["now"] + 10.0)

    async def prepared(*_: Any, **options: Any) -> str:
        return state

    monkeypatch.setattr(dying.archive, "commit", dies)
    monkeypatch.setattr(dying.departures, "prepare", prepared)
    session, turns = await store.session("a"), await store.turns("a")
    monkeypatch.setattr(dying, "session", lambda _: _value(session))
    monkeypatch.setattr(dying, "turns", lambda _: _value(turns))
    monkeypatch.setattr(store._index, "publish", late)
    await store.delete("a", **DELETED)
    monkeypatch.undo()
    await dying.close()
    await check_gone(store, server, url, "a")


async def _value(value: Any) -> Any:
    return value


async def test_a_session_that_leaves_while_it_is_deleted_is_gone(
    store: RedisStore, server: RedisServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ended(store, "a", 1)
    other, archiver = replica(server, url)
    real, asked = store.archive.places, 0

    async def places(trial_ids: list[str]) -> Any:
        nonlocal asked
        asked += 1
        found = await real(trial_ids)
        if asked == 1:
            assert await move(other, archiver) == 1
        return found

    monkeypatch.setattr(store.archive, "places", places)
    await store.delete("a", **DELETED)
    monkeypatch.undo()
    await other.close()
    await check_gone(store, server, url, "a")


async def test_of_what_a_crash_left_the_deleted_do_not_come_back(
    store: RedisStore, server: RedisServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has forgotten one of three sessions, which only this object still has. Another was deleted, and one is in Redis."""
    for trial_id in ("deleted", "here", "lost"):
        await ended(store, trial_id, 1)
    dying, archiver = replica(server, url)
    real = archiver._objects.write

    async def dies(*args: Any) -> None:
        await real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(archiver._objects, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        await move(dying, archiver)
    await dying.close()
    await store.delete("deleted", **DELETED)
    with server.client() as client:
        assert client.exists(ARCHIVING)
        for key in (ARCHIVER, *keys_of(server, "lost")):
            client.delete(key)
    await move(store)
    assert trials_in(url) == ["here", "lost"], "one copy of each"
    assert await listed(store) == ["here", "lost"]
    await check_gone(store, server, url, "deleted")
    await store.delete("here", **DELETED)
    await move(store)
    assert trials_in(url) == ["lost"] and len(await store.turns("lost")) == 1


async def test_of_a_session_that_is_archived_again_the_first_copy_goes(
    store: RedisStore, server: RedisServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await record(store, "a", 1)
    await store.complete("a", status="completed", **(END | {"reward": None}))
    other, archiver = replica(server, url)
    real = other.archive.commit

    async def meanwhile(places: Any) -> bool:
        done = await real(places)
        await store.complete("a", status="completed", **END)
        return done

    monkeypatch.setattr(other.archive, "commit", meanwhile)
    assert await move(other, archiver) == 0
    assert trials_in(url) == ["a"]
    await other.close()
    assert await move(store) == 1
    await move(store)
    assert trials_in(url) == ["a", "a"] and (await store.session("a")).reward == 1.0
    await store.delete("a", **DELETED)
    await move(store)
    assert trials_in(url) == []
    with server.client() as client:
        assert not client.exists(COPIES) and not client.exists(BLANKS)


async def test_an_archive_that_is_listed_twice_keeps_the_copy_that_counts(
    store: RedisStore, server: RedisServer
) -> None:
    """A crash while it was listed: the older copy is named again, and then the newer one. Neither is overwritten."""
    await ended(store, "a", 1)
    await move(store)
    [newer] = (await store.archive.places(["a"])).values()
    older = newer._replace(name="2026-01-01/0123")
    assert await store.archive.hold()
    for _ in range(2):
        for place in (older, newer):
            assert await store.archive.commit({"a": place})
    assert await store.archive.blanks() == [] and await store.archive.places(["a"]) == {"a": newer}
    assert await store.archive.forget("a")
    assert set(await store.archive.blanks()) == {older, newer}
    assert await store.archive.commit({"a": newer}), "what is to be overwritten is nobody's place again"
    assert await store.archive.places(["a"]) == {}
    await store.archive.release()


async def test_a_place_in_the_spelling_of_an_older_release_is_overwritten_once(
    store: RedisStore, server: RedisServer, url: str
) -> None:
    await ended(store, "a", 1)
    await move(store)
    with server.client() as client:
        client.hset(ARCHIVED, "a", client.hget(ARCHIVED, "a") + b":5")
    await store.delete("a", **DELETED)
    await move(store)
    with server.client() as client:
        assert trials_in(url) == [] and not client.exists(BLANKS)


async def test_what_is_deleted_is_overwritten_once_per_object_and_an_object_that_fails_stops_nothing(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, archiver = replica(server, f"faulty://{tmp_path.name}")
    for names in (("a", "b", "c"), ("d",)):
        for trial_id in names:
            await ended(store, trial_id, 1)
        assert await move(store, archiver) == len(names)
    for trial_id in ("a", "c", "d"):
        await store.delete(trial_id, **DELETED)
    await ended(store, "e", 1)
    written: list[str] = []
    real = archiver._objects._write

    def write(path: str, data: bytes) -> None:
        written.append(path)
        real(path, data)

    monkeypatch.setattr(archiver._objects, "_write", write)
    FaultyFileSystem.fault = "full"
    assert await move(store, archiver) == 1, "what is to leave leaves"
    assert len(written) == 3, "two objects with deleted sessions, and a new one"
    with server.client() as client:
        assert client.scard(BLANKS) in (1, 2), "one of the two objects has no room"
    await move(store, archiver)
    assert trials_in(archiver._objects.url) == ["b", "e"] and len(written) == 4
    assert len((await store.list_sessions(**ALL)).items) == 2
    await store.close()


@pytest.mark.parametrize("fault, rounds", [("info .gz", 2), ("old_listing", 1)])
async def test_what_is_deleted_is_overwritten_also_where_its_object_seemed_not_to_be_there(
    server: RedisServer, tmp_path: Path, fault: str, rounds: int
) -> None:
    """`exists` of fsspec answers False for any error, and that of an object store looks into an old listing."""
    store, archiver = replica(server, f"faulty://{tmp_path.name}")
    for trial_id in ("a", "b"):
        await ended(store, trial_id, 1)
    await move(store, archiver)
    await store.delete("a", **DELETED)
    FaultyFileSystem.fault = fault
    for left in range(rounds - 1, -1, -1):
        await move(store, archiver)
        with server.client() as client:
            assert client.scard(BLANKS) == left
    assert trials_in(archiver._objects.url) == ["b"]
    await store.close()


async def test_a_replica_that_lost_the_archive_overwrites_nothing_more(
    store: RedisStore, server: RedisServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trial_id in ("a", "b"):
        await ended(store, trial_id, 1)
        await move(store)
        await store.delete(trial_id, **DELETED)
    slow, archiver = replica(server, url)
    real, names = archiver._objects.blank, []

    async def slowly(name: str, places: Any) -> None:
        names.append(name)
        await real(name, places)
        with server.client() as client:
            client.set(ARCHIVER, "another")

    monkeypatch.setattr(archiver._objects, "blank", slowly)
    await ended(slow, "c", 1)
    assert await move(slow, archiver) == 0
    await slow.close()
    assert len(names) == 1 and len(trials_in(url)) <= 1
    with server.client() as client:
        client.delete(ARCHIVER)
    assert await move(store) == 1
    assert trials_in(url) == ["c"]
