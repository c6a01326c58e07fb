"""Ended sessions leave Redis for the archive, and are read as before; whatever crashes or fails on the way (docs/adr/0018)."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from steno.contracts.errors import ArchiveUnreadable, Conflict, Gone, NotFound
from steno.contracts.notes import Note
from steno.contracts.records import Session, Turn, TurnAnnotation, halves_to_bytes
from steno_proxy.archive.archiver import Archiver
from steno_proxy.archive.objects import ObjectStorage
from steno_proxy.sessions.samples import samples
from steno_proxy.store.facets import SessionFilter
from steno_proxy.store.redis import runs as runs_module
from steno_proxy.store.redis.schema import ARCHIVED, ENDED, FACETS, RUNS, run_keys
from steno_proxy.store.redis.store import RedisStore
from tests.support.list_contract import ALL, listed, make_group
from tests.support.recording_contract import END, record
from tests.support.recordings import row, session, turn
from tests.support.redis_server import PATIENT, RedisServer

LATER = 200_000.0
"""Seconds, by the clock that the rounds are told: all that ended in these tests is past its retention then."""


class FaultyFileSystem(MemoryFileSystem):
    """Does as `fault` says, once."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 (fsspec's own)
    pseudo_dirs = [""]  # noqa: RUF012
    fault = ""

    def _strip(self, path: str) -> str:
        return str(path)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        if FaultyFileSystem.fault == "full" and path.endswith(".gz"):
            FaultyFileSystem.fault = ""
            raise OSError(28, "No space left on device")
        if FaultyFileSystem.fault == "cut" and path.endswith(".gz"):
            FaultyFileSystem.fault = ""
            value = value[: len(value) // 2]
        super().pipe_file(path, value, **options)

    def mv(self, one: str, two: str, **options: Any) -> None:  # type: ignore[override]
        if FaultyFileSystem.fault == "unnamed":
            FaultyFileSystem.fault = ""
            raise TimeoutError
        super().mv(one, two, **options)


fsspec.register_implementation("faulty", FaultyFileSystem)


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "archive")
    return f"memory://{tmp_path.name}"


def replica(server: RedisServer, url: str, **options: Any) -> tuple[RedisStore, Archiver]:
    objects = ObjectStorage(url)
    store = RedisStore(server.url, shelf=objects, **PATIENT, **options)
    return store, Archiver(store, objects)


@pytest.fixture
async def store(server: RedisServer, url: str) -> AsyncIterator[RedisStore]:
    store, store.archiver = replica(server, url)  # type: ignore[attr-defined]
    yield store
    await store.close()


async def move(store: Any, archiver: Archiver | None = None) -> int:
    archiver = archiver or store.archiver
    return await archiver.round(now=END["now"] + LATER, retention_s=LATER)


async def read(store: RedisStore, trial_id: str) -> tuple[Session, list[Turn], Any, list[Any]]:
    found, turns = await store.session(trial_id), await store.turns(trial_id)
    noted = await store.notes(trial_id)
    events = [event async for event in store.events(trial_id)]
    return found, turns, (samples(found, turns), noted), events


async def ended(store: RedisStore, trial_id: str, turns: int = 3, **fields: Any) -> None:
    await record(store, trial_id, turns, **fields)
    await store.complete(trial_id, status="completed", **END)
    await store.settle(trial_id, now=END["now"])


def lines_of(url: str) -> list[dict[str, Any]]:
    """All lines of all objects, read by gzip and json alone."""
    fs, root = fsspec.core.url_to_fs(url)
    paths = sorted(fs.glob(f"{root}/day=*/*.jsonl.gz"))
    return [json.loads(line) for path in paths for line in gzip.decompress(fs.cat_file(path)).splitlines()]


def trials_in(url: str) -> list[str]:
    return sorted(line["session"]["trial_id"] for line in lines_of(url) if "session" in line)


def keys_of(server: RedisServer, trial_id: str) -> list[bytes]:
    with server.client() as client:
        return [key for key in client.keys("*") if b"{%s}" % trial_id.encode() in key]


async def test_an_ended_session_leaves_redis_and_is_read_as_before(
    store: RedisStore, server: RedisServer, url: str
) -> None:
    hostile = "..-_.etc.passwd.." + "x" * 100
    for trial_id in ("a", hostile):
        await ended(store, trial_id)
    odd = turn(
        7, messages=[{"role": "user", "content": "\ud800 \r\n \u2028 π"}], sampling_logprobs=b"\x00\x00\xc0\xff" * 3
    )
    await record(store, "odd", 0)
    await store.commit("odd", odd, row(odd), now=2.0)
    await store.complete("odd", status="aborted", **END)
    await store.note("a", [Note(kind="refused", text="why", times=3, at=5.0)])
    await store.register(session("open"))
    names = ("a", hostile, "odd")
    before = {trial_id: await read(store, trial_id) for trial_id in names}
    pages = {
        status: await store.list_sessions(**(ALL | {"status": status})) for status in (None, "completed", "aborted")
    }

    assert await store.archiver.round(now=END["now"] + 5.0, retention_s=10.0) == 0, "not past its retention"  # type: ignore[attr-defined]
    assert await move(store) == 3
    assert await move(store) == 0
    assert [keys_of(server, trial_id) for trial_id in names] == [[], [], []]
    with server.client() as client:
        assert client.zcard(ENDED) == 0, "a sweep has nothing to walk"
    assert {trial_id: await read(store, trial_id) for trial_id in names} == before
    assert await store.turns("a", start=1, limit=1) == before["a"][1][1:2]
    for status, page in pages.items():
        assert await store.list_sessions(**(ALL | {"status": status})) == page
    assert trials_in(url) == sorted(names)
    assert [line["turn"]["turn_id"] for line in lines_of(url) if "turn" in line][:3] == [
        one.turn_id for one in before["a"][1]
    ]


@pytest.mark.parametrize("url", ["memory"], indirect=True)
async def test_a_session_that_leaves_while_it_is_read_is_read_whole(
    store: RedisStore, server: RedisServer, url: str
) -> None:
    reader, _ = replica(server, url)
    answered = reader._link._answered
    asked, leaves_at = 0, 0

    async def leaving(command: Awaitable[Any]) -> Any:
        nonlocal asked
        asked += 1
        if asked == leaves_at:
            assert await move(store) == 1
        return await answered(command)

    reader._link._answered = leaving  # type: ignore[method-assign,assignment]
    try:
        while asked >= leaves_at:  # before the first command that the reading takes, the second, …
            leaves_at += 1
            trial_id = f"t{leaves_at}"
            await ended(store, trial_id)
            before = await read(store, trial_id)
            asked = 0
            assert await read(reader, trial_id) == before, f"it left before command {leaves_at}"
    finally:
        await reader.close()
    assert leaves_at > 8


async def test_what_a_trainer_saw_goes_along_and_keeps_what_is_told_meanwhile(store: RedisStore) -> None:
    made = await record(store, "t")
    await store.complete("t", status="completed", **END)
    seen = TurnAnnotation(step=1, version="a/1", advantage=0.5, differences=halves_to_bytes([0.125, math.nan, 2.0]))
    await store.annotate("t", {made[1].turn_id: seen})
    state = await store.departures.prepare("t", END["now"] + LATER)
    newer = seen.model_copy(update={"step": 2})
    await store.annotate("t", {made[1].turn_id: newer})
    assert not await store.departures.left("t", None, state), "it has changed since it was read for the archive"
    assert await move(store) == 1
    assert [turn.annotation for turn in await store.turns("t")] == [None, newer, None]
    with pytest.raises(NotFound):
        await store.annotate("t", {made[0].turn_id: seen})
    assert not await store._link.client.keys("steno:{t}:*")


async def test_what_is_in_the_archive_changes_no_more(store: RedisStore) -> None:
    await ended(store, "a")
    recorded = await store.session("a")
    await move(store)
    assert await store.register(session("a")) == recorded
    assert await store.complete("a", status="completed", **(END | {"now": 999.0})) == recorded
    await store.settle("a", now=999.0)
    for status, reward in (("aborted", 1.0), ("completed", 0.5), ("completed", None)):
        with pytest.raises(Conflict):
            await store.complete("a", status=status, **(END | {"reward": reward}))
    one = turn(9)
    for call in (store.tail("a", 0), store.rotate_key("a", None), store.begin_task_step("a", "x")):
        with pytest.raises(Gone):
            await call
    with pytest.raises((Gone, NotFound)):
        await store.commit("a", one, row(one), now=1.0)
    assert await listed(store) == ["a"]


async def test_a_group_is_there_after_its_trials_have_left(store: RedisStore, server: RedisServer) -> None:
    group, sessions = make_group("g", 2)
    await store.create_group(group, sessions)
    for one in sessions:
        await store.complete(one.trial_id, status="completed", **(END | {"reward": None}))
        await store.settle(one.trial_id, now=END["now"])
    view = await store.runs.view("r")
    assert await move(store) == 2
    assert await store.create_group(group, sessions) == group == await store.group("g")
    assert await listed(store, group_id="g") == group.trial_ids
    assert await store.runs.view("r") == view
    await store.runs.close_due()
    with server.client() as client:
        assert client.zcard(RUNS) == 0


async def test_lists_of_groups_name_those_whose_trials_have_left(store: RedisStore) -> None:
    group, sessions = make_group("old", 2)
    await store.create_group(group, sessions)
    for one in sessions:
        await store.complete(one.trial_id, status="completed", **(END | {"reward": None}))
        await store.settle(one.trial_id, now=END["now"])
    await store.create_group(*make_group("new", 1, created_at=8.0))
    [new, before] = await store.runs.groups("r")
    assert (before.group_id, before.state, before.ended, before.archived) == ("old", "empty", 2, False)
    assert await move(store) == 2
    assert await store.runs.groups("r") == [new, before.model_copy(update={"archived": True})]
    assert (await store.runs.groups("another")) == []

    for trial_id in group.trial_ids:
        await store.delete(trial_id, now=END["now"] + LATER, tombstone_s=60.0)
    assert await store.runs.groups("r") == [new]


async def test_of_archived_groups_lists_name_the_newest(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "MOST_ARCHIVED", 500)
    monkeypatch.setattr(runs_module, "ARCHIVED_MORE", 1000)
    await store.create_group(*make_group("old", 1, created_at=1.0))
    await store.complete("old-0", status="aborted", **(END | {"reward": None}))
    assert await move(store) == 1
    key = run_keys("r").past
    with server.client() as client:
        one = json.loads(client.hget(key, "old"))
        client.hset(key, mapping={f"g{n}": json.dumps(one | {"m": f"{n}.5"}) for n in range(1, 1499)})
        await store.runs.close_due()
        assert client.hlen(key) == 1499, "so few are not looked for"
        await store.create_group(*make_group("new", 1, created_at=9999.0))
        client.hset(key, "g1499", json.dumps(one | {"m": "1499.5"}))
        await store.runs.close_due()
        assert client.hlen(key) == 500
        named = [place.group_id for place in await store.runs.groups("r")]
        assert named == ["new", *(f"g{n}" for n in range(1499, 999, -1))]
        assert await listed(store, group_id="old") == ["old-0"] and (await store.group("old")).trial_ids == ["old-0"]


async def test_a_list_of_a_run_reads_no_archived_records_of_other_runs(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {"a": "x:y", "b": "other", "c": None, "d": "x:y", "e": "other"}
    for number, (trial_id, run_id) in enumerate(runs.items()):
        await store.register(session(trial_id, created_at=float(number + 1), run_id=run_id))
        await ended(store, trial_id, turns=1)
    assert await move(store) == 5
    read_heads: list[str] = []
    heads = ObjectStorage.heads

    async def counted(self: ObjectStorage, places: Any) -> Any:
        read_heads.extend(trial_id for trial_id, _ in places)
        return await heads(self, places)

    monkeypatch.setattr(ObjectStorage, "heads", counted)
    assert await listed(store, wanted=SessionFilter(run_id="x:y")) == ["a", "d"] == read_heads
    read_heads.clear()
    with server.client() as client:  # sessions of before there were lines, and their places: their records say it
        client.delete(FACETS)
        for trial_id, place in client.hgetall(ARCHIVED).items():
            client.hset(ARCHIVED, trial_id, place + b":x%3Ay")
    assert await listed(store, wanted=SessionFilter(run_id="x:y")) == ["a", "d"]
    assert read_heads == ["a", "b", "c", "d", "e"]
    with server.client() as client:  # all of it is forgotten: it is listed again, and found as before
        client.flushall()
    await move(store)
    read_heads.clear()
    assert await listed(store, wanted=SessionFilter(run_id="x:y")) == ["a", "d"] == read_heads


async def test_what_waits_for_a_trainer_stays(store: RedisStore) -> None:
    group, sessions = make_group("g", 1)
    await store.create_group(group, sessions)
    await ended(store, "g-0")
    assert await move(store) == 0
    assert (await store.session("g-0")).counts.turns == 3


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


async def test_a_list_of_what_is_gone_has_pages_too(server: RedisServer, tmp_path: Path) -> None:
    """It walked on through all of them, to fill its first page."""
    store, archiver = replica(server, str(tmp_path))
    for number in range(5):
        await ended(store, f"t{number}", 1)
    await move(store, archiver)
    await store.register(session("u"))
    for path in tmp_path.glob("day=*/*.gz"):
        path.unlink()
    seen, cursor, pages = [], None, 0
    while pages == 0 or cursor is not None:
        page = await store.list_sessions(**(ALL | {"limit": 2, "cursor": cursor}))
        seen += [*page.unreadable, *(one.trial_id for one in page.items)]
        cursor, pages = page.next_cursor, pages + 1
        assert len(page.unreadable) + len(page.items) <= 2
    assert seen == ["t0", "t1", "t2", "t3", "t4", "u"]
    await store.close()


async def test_a_deleted_session_leaves_the_archive_too(store: RedisStore, url: str) -> None:
    for trial_id in ("a", "b", "c"):
        await ended(store, trial_id)
    await move(store)
    others = {trial_id: await read(store, trial_id) for trial_id in ("a", "c")}
    await store.delete("b", now=100.0, tombstone_s=600.0)
    await store.delete("b", now=101.0, tombstone_s=600.0)
    for call in (store.session("b"), store.turns("b"), store.register(session("b"))):
        with pytest.raises(Gone):
            await call
    assert sorted(await listed(store)) == ["a", "c"]
    await move(store)
    assert trials_in(url) == ["a", "c"]
    assert {trial_id: await read(store, trial_id) for trial_id in others} == others


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


async def test_a_redis_that_lost_its_memory_lists_the_archive_again(
    store: RedisStore, server: RedisServer, url: str
) -> None:
    for trial_id in ("a", "b", "c"):
        await ended(store, trial_id)
    await move(store)
    await store.delete("b", now=100.0, tombstone_s=600.0)
    await move(store)
    before = await store.list_sessions(**ALL)
    with server.client() as client:
        client.flushall()
    assert await move(store) == 0, "the same process goes on"
    assert await store.list_sessions(**ALL) == before
    assert len(await store.turns("a")) == 3


async def test_an_archive_is_of_one_redis(store: RedisStore, url: str) -> None:
    """What one Redis has archived, another never lists; unless it is told that it takes its place."""
    await ended(store, "a")
    await move(store)
    server = RedisServer()
    try:
        other, archiver = replica(server, url)
        await ended(other, "b")
        with pytest.raises(
            ArchiveUnreadable, match=rf"of the Redis localhost:\d+/0 on .*, and this one is {other.home}: "
        ):
            await move(other, archiver)
        assert await listed(other) == ["b"]
        assert await move(store) == 0, "the first still has it"
        fs, root = fsspec.core.url_to_fs(url)
        fs.rm_file(f"{root}/archive.json")
        assert await move(other, archiver) == 1
        assert await listed(other) == ["a", "b"] and len(await other.turns("a")) == 3
        with pytest.raises(
            ArchiveUnreadable, match=rf"is of {other.home}, with the id .* and other Redis servers another"
        ):
            await move(store)
        assert len(await store.turns("a")) == 3
        await other.close()
    finally:
        server.close()


async def test_a_crash_while_an_archive_is_listed_again(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trial_id in ("a", "b"):
        await ended(store, trial_id)
    await move(store)
    with server.client() as client:
        client.flushall()

    async def dies(found: Session) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "shelve", dies)
        await move(store)
    assert await listed(store) == []
    await move(store)
    assert await listed(store) == ["a", "b"]


async def test_without_an_archive_its_sessions_say_so(store: RedisStore, server: RedisServer) -> None:
    await ended(store, "a")
    await move(store)
    without = RedisStore(server.url, **PATIENT)
    with pytest.raises(ArchiveUnreadable, match="set archive"):
        await without.session("a")
    assert list((await without.list_sessions(**ALL)).unreadable) == ["a"]
    await without.close()
