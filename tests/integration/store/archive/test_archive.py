"""Ended sessions leave Redis for the archive, and are read as before (docs/adr/0018)."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from steno.contracts.errors import ArchiveUnreadable, Conflict, Gone, NotFound
from steno.contracts.notes import Note
from steno.contracts.records import TurnAnnotation, halves_to_bytes
from steno_proxy.archive.objects import ObjectStorage
from steno_proxy.store.facets import SessionFilter
from steno_proxy.store.redis import runs as runs_module
from steno_proxy.store.redis.schema import ARCHIVED, ENDED, FACETS, RUNS, run_keys
from steno_proxy.store.redis.store import RedisStore
from tests.integration.store.archive.support import (
    LATER,
    ended,
    keys_of,
    lines_of,
    move,
    read,
    replica,
    trials_in,
)
from tests.support.contracts.list import ALL, listed, make_group
from tests.support.contracts.recording import END, record
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.recordings import row, session, turn


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


async def test_where_memory_is_short_what_is_waited_for_stays(store: RedisStore) -> None:
    """A minute after the first trial of a group had ended, the group was served without the others."""
    await store.create_group(*make_group("g", 2))
    await record(store, "g-0", 1)
    await store.complete("g-0", status="completed", **END)
    await store.settle("g-0", now=END["now"])
    for trial_id in ("limited", "alone"):
        await store.register(session(trial_id))
    await store.complete("limited", status="completed", final=False, **(END | {"reward": None}))
    await store.complete("alone", status="completed", **END)
    early = {"now": END["now"] + 61.0, "retention_s": 86400.0, "early_s": 60.0}
    assert await store.archiver.round(**early) == 1  # type: ignore[attr-defined]
    assert set(await store.archive.places(["g-0", "limited", "alone"])) == {"alone"}
    [one] = await store.runs.groups("r")
    assert one.state == "running"
    await store.complete("limited", status="completed", **END)
    await store.complete("g-1", status="aborted", **(END | {"reward": None}))
    await store.settle("g-1", now=END["now"])
    assert await store.archiver.round(**early) == 1, "the reward has come"  # type: ignore[attr-defined]
    [one] = await store.runs.groups("r")
    assert (one.state, one.ended) == ("ready", 2)


async def test_what_awaits_its_reward_as_it_leaves_awaits_none_in_the_archive(store: RedisStore) -> None:
    """Nobody could post it any more, and a launcher would wait for that for ever."""
    await record(store, "limited", 1)
    await store.complete("limited", status="completed", final=False, **(END | {"reward": None}))
    assert (await store.session("limited")).awaits_reward
    assert await move(store) == 1
    left = await store.session("limited")
    assert (left.status, left.reward, left.awaits_reward) == ("completed", None, False)


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


async def test_without_an_archive_its_sessions_say_so(store: RedisStore, server: RedisServer) -> None:
    await ended(store, "a")
    await move(store)
    without = RedisStore(server.url, **PATIENT)
    with pytest.raises(ArchiveUnreadable, match="set archive"):
        await without.session("a")
    assert list((await without.list_sessions(**ALL)).unreadable) == ["a"]
    await without.close()


async def test_a_new_group_takes_no_archived_session_that_is_not_its_own(store: RedisStore) -> None:
    await ended(store, "g-0")
    assert await move(store) == 1
    with pytest.raises(Conflict, match="trial g-0: a session in no group has this id"):
        await store.create_group(*make_group("g", 2))
    assert (await store.runs.view("r")).groups.running == 0


async def test_a_full_redis_is_emptied_into_the_archive(store: RedisStore, server: RedisServer, url: str) -> None:
    await ended(store, "a")
    before = await read(store, "a")
    with server.client() as client:
        client.config_set("maxmemory", "1")
        try:
            assert await move(store) == 1
            assert trials_in(url) == ["a"] and keys_of(server, "a") == []
            assert await read(store, "a") == before
            await store.delete("a", now=END["now"] + LATER, tombstone_s=60.0)
            await move(store)
            assert trials_in(url) == [], "its bytes are overwritten"
        finally:
            client.config_set("maxmemory", "0")
