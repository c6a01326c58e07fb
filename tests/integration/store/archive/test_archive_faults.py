"""Whatever crashes or fails while sessions leave for the archive, nothing is lost and nothing is there twice (docs/adr/0018)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from steno.contracts.errors import ArchiveUnreadable, StoreUnavailable
from steno.contracts.records import Group
from steno_proxy.archive import objects
from steno_proxy.store.redis.schema import ARCHIVED, ENDED, PENDING, RUNS
from steno_proxy.store.redis.store import RedisStore
from tests.integration.store.archive.support import (
    FaultyFileSystem,
    ended,
    keys_of,
    move,
    read,
    replica,
    trials_in,
)
from tests.support.contracts.list import ALL, listed, make_group
from tests.support.contracts.recording import END, record
from tests.support.machine.redis_server import RedisServer
from tests.support.records.recordings import session
from tests.support.waiting import until


@pytest.mark.parametrize("moment", ["begin", "write", "commit", "leave", "settle"])
async def test_a_crash_anywhere_loses_nothing_and_duplicates_nothing(
    store: RedisStore, server: RedisServer, url: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await ended(store, f"t{number}", 1)
    before = {f"t{number}": await read(store, f"t{number}") for number in range(3)}
    dying, archiver = replica(server, url)
    where = {"write": archiver._objects, "settle": dying._index}.get(moment, dying.archive)
    real = getattr(where, moment)

    async def dies(*args: Any, **options: Any) -> Any:
        await real(*args, **options)
        raise KeyboardInterrupt  # nothing of ours catches it, as nothing does kill -9

    monkeypatch.setattr(where, moment, dies)
    monkeypatch.setattr(dying.archive, "release", lambda: _nothing())
    with pytest.raises(KeyboardInterrupt):
        await move(dying, archiver)
    await dying.close()
    assert {trial_id: await read(store, trial_id) for trial_id in before} == before
    assert await move(store) == 0, "the dead one holds the archive"
    with server.client() as client:
        client.delete("steno:{:index}:archiver")  # its time is over
    await move(store)
    assert {trial_id: await read(store, trial_id) for trial_id in before} == before
    with server.client() as client:
        assert (client.hlen(ARCHIVED), client.zcard(ENDED)) == (3, 0)
    assert [key for trial_id in before for key in keys_of(server, trial_id)] == []
    copies = trials_in(url)
    assert sorted(set(copies)) == sorted(before)
    if moment in ("begin", "write"):
        assert copies == sorted(before)


async def _nothing() -> None:
    return None


HICCUPS = [("_archive", "leave"), ("_runs", "forget"), ("_index", "settle")]


@pytest.mark.parametrize("room, call", HICCUPS)
async def test_a_group_whose_last_session_leaves_while_redis_hiccups_is_forgotten(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch, room: str, call: str
) -> None:
    """It stayed among the run's groups for ever, and the run among those that each sweep walks."""
    group = await cut_short(store, monkeypatch, room, call)
    await move(store)
    await check_left(store, server, group)
    assert await listed(store, group_id="g") == group.trial_ids


@pytest.mark.parametrize("room, call", HICCUPS)
async def test_so_is_one_whose_last_session_can_not_be_read_any_more(
    store: RedisStore, server: RedisServer, url: str, monkeypatch: pytest.MonkeyPatch, room: str, call: str
) -> None:
    """Each round asked the archive for it, for good, and the group stayed in its run."""
    group = await cut_short(store, monkeypatch, room, call)
    fs, root = fsspec.core.url_to_fs(url)
    for path in fs.glob(f"{root}/day=*/*.jsonl.gz"):
        fs.rm_file(path)
    await move(store)
    with server.client() as client:
        assert client.zcard(ENDED) == 0, "the next round asks for it no more"
    await store.sweep(now=time.time() + 60.0)
    await check_left(store, server, group)


async def cut_short(store: RedisStore, monkeypatch: pytest.MonkeyPatch, room: str, call: str) -> Group:
    """A group whose sessions are leaving when Redis does not answer; the last one has left."""
    group, sessions = make_group("g", 2)
    await store.create_group(group, sessions)
    for trial_id in group.trial_ids:
        await store.complete(trial_id, status="aborted", **(END | {"reward": None}))
        await store.settle(trial_id, now=END["now"])
    where = getattr(store.departures, room)
    real, calls = getattr(where, call), []

    async def once(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if call != "forget":
            answer = await real(*args, **options)
        if len(calls) == (1 if call == "forget" else 2):
            raise StoreUnavailable("the session store does not answer")
        return await real(*args, **options) if call == "forget" else answer

    with monkeypatch.context() as patch, pytest.raises(StoreUnavailable):
        patch.setattr(where, call, once)
        await move(store)
    return group


async def check_left(store: RedisStore, server: RedisServer, group: Group) -> None:
    """Its run names it as one of the archive."""
    [place] = await store.runs.groups("r")
    assert place.archived and (place.state, place.ended) == ("empty", 2)
    await store.runs.close_due()
    with server.client() as client:
        assert (client.zcard(RUNS), client.zcard(ENDED)) == (0, 0)
    page = await store.list_sessions(**ALL)
    assert sorted([*(found.trial_id for found in page.items), *page.unreadable]) == group.trial_ids
    await store.sweep(now=time.time() + 60.0)
    with server.client() as client:
        assert client.zcard(PENDING) == 0
    assert [found.archived for found in await store.runs.groups("r")] == [True]


async def test_a_replica_that_lost_the_archive_changes_nothing(
    store: RedisStore, server: RedisServer, url: str
) -> None:
    await ended(store, "a")
    slow, archiver = replica(server, url)
    real = archiver._objects.write

    async def slowly(name: str, data: bytes) -> None:
        await real(name, data)
        if name != "x":
            with server.client() as client:
                client.delete("steno:{:index}:archiver")
            assert await move(store) == 1

    archiver._objects.write = slowly  # type: ignore[method-assign]
    before = await read(store, "a")
    assert await move(slow, archiver) == 0
    assert trials_in(url) == ["a"] and await read(store, "a") == before
    await slow.close()


async def test_a_reward_that_comes_meanwhile_is_not_lost(store: RedisStore, server: RedisServer, url: str) -> None:
    await record(store, "a", 1)
    await store.complete("a", status="completed", **(END | {"reward": None}))
    other, archiver = replica(server, url)
    real = archiver._objects.write

    async def meanwhile(name: str, data: bytes) -> None:
        await real(name, data)
        await store.complete("a", status="completed", **END)

    archiver._objects.write = meanwhile  # type: ignore[method-assign]
    assert await move(other, archiver) == 0
    assert (await store.session("a")).reward == 1.0
    assert await move(store) == 1
    assert (await store.session("a")).reward == 1.0
    await other.close()


@pytest.mark.parametrize("fault", ["full", "cut", "unnamed"])
async def test_what_the_archive_did_not_take_stays(server: RedisServer, fault: str, tmp_path: Path) -> None:
    url = f"faulty://{tmp_path.name}"
    store, archiver = replica(server, url)
    await ended(store, "a")
    before = await read(store, "a")
    FaultyFileSystem.fault = fault
    with pytest.raises(ArchiveUnreadable, match=r"failed: |is corrupt: .* was read back with other bytes"):
        await move(store, archiver)
    assert keys_of(server, "a") and await read(store, "a") == before
    assert trials_in(url) == []
    assert await move(store, archiver) == 1
    assert trials_in(url) == ["a"] and await read(store, "a") == before
    await store.close()


async def test_a_write_that_hangs_ends_the_round_and_what_it_does_late_is_taken_away(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"faulty://{tmp_path.name}"
    store, archiver = replica(server, url)
    await ended(store, "a")
    before = await read(store, "a")
    FaultyFileSystem.mount_is_back.clear()
    FaultyFileSystem.fault = "hangs"
    try:
        with monkeypatch.context() as patch, pytest.raises(ArchiveUnreadable, match=r"no answer within 2 s"):
            patch.setattr(objects, "WHOLE_S", 2.0)
            patch.setattr(objects, "CALL_S", 2.0)
            await move(store, archiver)
        assert keys_of(server, "a") and await read(store, "a") == before
    finally:
        FaultyFileSystem.mount_is_back.set()
    await until(lambda: not archiver._objects._writer._threads)
    assert trials_in(url) == []
    assert await move(store, archiver) == 1
    assert trials_in(url) == ["a"] and await read(store, "a") == before
    await store.close()


async def test_what_a_cancelled_round_writes_late_is_taken_away(server: RedisServer, tmp_path: Path) -> None:
    """Another replica has the archive by then, and has found nothing of it."""
    url = f"faulty://{tmp_path.name}"
    store, archiver = replica(server, url)
    other, others = replica(server, url)
    await ended(store, "a")
    FaultyFileSystem.mount_is_back.clear()
    FaultyFileSystem.fault = "hangs"
    try:
        moving = asyncio.create_task(move(store, archiver))
        await until(lambda: not FaultyFileSystem.fault)
        moving.cancel()
        await asyncio.wait({moving}, timeout=objects.CALL_S / 2)
        assert moving.cancelled(), "it waits for no mount"
        assert await move(other, others) == 1
    finally:
        FaultyFileSystem.mount_is_back.set()
    await until(lambda: not archiver._objects._writer._threads)
    assert trials_in(url) == ["a"]
    assert len(await others._objects.names()) == 1
    await store.close()
    await other.close()


@pytest.mark.parametrize("what", ["session", "turns", "list"])
async def test_a_read_that_hangs_is_answered_in_time(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store, archiver = replica(server, f"faulty://{tmp_path.name}")
    await ended(store, "a")
    assert await move(store, archiver) == 1
    before = await read(store, "a")
    monkeypatch.setattr(objects, "CALL_S", 2.0)
    FaultyFileSystem.mount_is_back.clear()
    FaultyFileSystem.fault = "hangs_read"
    try:
        if what == "list":
            assert list((await store.list_sessions(**ALL)).unreadable) == ["a"]
        else:
            with pytest.raises(ArchiveUnreadable, match=r"can't be read: .* no answer within 2(\.0\d)? s"):
                await getattr(store, what)("a")
        monkeypatch.undo()
        assert await read(store, "a") == before, "others are read meanwhile"
    finally:
        FaultyFileSystem.mount_is_back.set()
    await store.close()


async def test_a_long_list_of_an_archive_that_hangs_is_answered_after_one_wait(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session of a page has its time from its turn on, and none is asked for behind one that had no answer."""
    store, archiver = replica(server, f"faulty://{tmp_path.name}")
    names = [f"t{n:02}" for n in range(2 * objects.PAGE_READERS)]
    for name in names:
        await ended(store, name)
    assert await move(store, archiver) == len(names)
    monkeypatch.setattr(objects, "CALL_S", 2.0)
    FaultyFileSystem.mount_is_back.clear()
    FaultyFileSystem.fault = "hangs_reads"
    FaultyFileSystem.hung.clear()
    try:
        found = await store.list_sessions(**ALL)
        assert sorted(found.unreadable) == names
        assert len(FaultyFileSystem.hung) == objects.PAGE_READERS
    finally:
        FaultyFileSystem.fault = ""
        FaultyFileSystem.mount_is_back.set()
    await store.close()


async def test_what_was_written_of_an_object_before_it_had_its_name_is_taken_away(
    store: RedisStore, server: RedisServer, url: str
) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    assert await store.archive.hold() and await store.archive.begin("2026-11-22/0123")
    await store.archive.release()
    fs.makedirs(f"{root}/partial", exist_ok=True)
    fs.pipe_file(f"{root}/partial/0123.jsonl.gz", b"half of it")
    await ended(store, "a")
    assert await move(store) == 1
    assert fs.find(f"{root}/partial") == [] and trials_in(url) == ["a"]


@pytest.mark.parametrize("spoil", ["gone", "cut", "flipped"])
async def test_a_spoilt_object_is_an_error_of_its_sessions_alone(
    server: RedisServer, tmp_path: Path, spoil: str
) -> None:
    store, archiver = replica(server, str(tmp_path))
    await ended(store, "bad")
    await move(store, archiver)
    [path] = tmp_path.glob("day=*/*.jsonl.gz")
    data = path.read_bytes()
    await ended(store, "good")
    await move(store, archiver)
    await store.register(session("open"))
    if spoil == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:40] if spoil == "cut" else data[:30] + bytes([data[30] ^ 1]) + data[31:])
    for call in (store.session("bad"), store.turns("bad")):
        with pytest.raises(ArchiveUnreadable, match="session bad is in the archive and can't be read"):
            await call
    page = await store.list_sessions(**ALL)
    assert sorted(one.trial_id for one in page.items) == ["good", "open"] and list(page.unreadable) == ["bad"]
    await move(store, archiver)
    with pytest.raises(ArchiveUnreadable):
        await store.session("bad")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    assert (await store.session("bad")).counts.turns == 3
    await store.close()


async def test_folders_that_replicas_do_not_share_are_refused(
    store: RedisStore, server: RedisServer, tmp_path: Path
) -> None:
    await ended(store, "a")
    await move(store)
    other, archiver = replica(server, str(tmp_path / "another"))
    await ended(store, "b")
    with pytest.raises(ArchiveUnreadable, match="the same folder"):
        await move(other, archiver)
    with pytest.raises(ArchiveUnreadable):
        await other.session("a")
    assert (await other.session("b")).counts.turns == 3
    await other.close()
