"""What is in an archive that Redis does not know: what can't be read is not taken for nothing."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from steno.contracts.errors import ArchiveUnreadable
from steno.contracts.records import Session
from steno_proxy.archive.archiver import Archiver
from steno_proxy.archive.objects import ArchiveIdentity
from steno_proxy.store.interface import SessionListPage
from steno_proxy.store.redis.store import RedisStore
from tests.integration.store.archive.support import FaultyFileSystem, ended, move, replica, trials_in
from tests.support.contracts.list import ALL, listed
from tests.support.machine.redis_server import RedisServer


async def test_an_archive_whose_identity_can_not_be_read_is_not_taken_over(server: RedisServer, tmp_path: Path) -> None:
    store, archiver = replica(server, f"faulty://{tmp_path.name}")
    theirs = ArchiveIdentity("theirs", "another Redis")
    await archiver._objects.begin(theirs)
    FaultyFileSystem.fault = "info archive.json"
    with pytest.raises(ArchiveUnreadable, match="Input/output error"):
        await move(store, archiver)
    assert await archiver._objects.identity() == theirs
    await store.close()


@pytest.mark.parametrize("fault", ["ls", "ls day=1970-01-01"])
async def test_a_redis_that_lost_its_memory_lists_the_archive_once_it_can_be_listed_whole(
    server: RedisServer, tmp_path: Path, fault: str
) -> None:
    store, archiver = replica(server, f"faulty://{tmp_path.name}")
    before = await archived(store, archiver, server)
    FaultyFileSystem.fault = fault
    with pytest.raises(ArchiveUnreadable, match="Input/output error"):
        await move(store, archiver)
    assert await listed(store) == []
    await move(store, archiver)
    assert await store.list_sessions(**ALL) == before
    await store.close()


async def test_a_path_may_have_signs_that_are_patterns_elsewhere(server: RedisServer, tmp_path: Path) -> None:
    store, archiver = replica(server, str(tmp_path / "run[1]*"))
    before = await archived(store, archiver, server)
    await move(store, archiver)
    assert await store.list_sessions(**ALL) == before
    await store.close()


async def archived(store: RedisStore, archiver: Archiver, server: RedisServer) -> SessionListPage:
    """Sessions in the archive that Redis has forgotten. Returns their list as it was."""
    for trial_id in ("a", "b"):
        await ended(store, trial_id, 1)
    assert await move(store, archiver) == 2
    before = await store.list_sessions(**ALL)
    with server.client() as client:
        client.flushall()
    return before


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


async def test_a_redis_of_an_older_backup_lists_what_was_archived_since_once_archive_json_is_removed(
    server: RedisServer, tmp_path: Path
) -> None:
    store, archiver = replica(server, str(tmp_path / "archive"))
    await ended(store, "a", 1)
    assert await move(store, archiver) == 1
    await ended(store, "b", 1)
    with server.client() as client:
        backup = {key: client.dump(key) for key in client.keys("*")}
        await ended(store, "c", 1)
        assert await move(store, archiver) == 2
        before = await store.list_sessions(**ALL)
        client.flushall()
        for key, value in backup.items():
            client.restore(key, 0, value)
    (tmp_path / "archive" / "archive.json").unlink()
    assert await move(store, archiver) == 1, "b, which this Redis has, once more"
    assert await store.list_sessions(**ALL) == before and await listed(store) == ["a", "b", "c"]
    assert await move(store, archiver) == 0, "and the archive is known"
    await store.delete("b", now=3e5, tombstone_s=60.0)
    await move(store, archiver)
    assert trials_in(str(tmp_path / "archive")) == ["a", "c"], "no copy of its bytes is left"
    await store.close()


async def test_an_archive_that_another_redis_takes_while_it_is_listed_again_stays_its_own(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one Redis replaces another, and the first one's proxies still run."""
    store, archiver = replica(server, str(tmp_path / "archive"))
    await ended(store, "a", 1)
    await move(store, archiver)
    (tmp_path / "archive" / "archive.json").unlink()
    theirs, list_again = ArchiveIdentity("theirs", "another Redis"), archiver._list_again

    async def listed_while_it_is_taken() -> bool:
        await archiver._objects.begin(theirs)
        return await list_again()

    monkeypatch.setattr(archiver, "_list_again", listed_while_it_is_taken)
    assert await move(store, archiver) == 0
    assert await archiver._objects.identity() == theirs
    with pytest.raises(ArchiveUnreadable, match="of another Redis"):
        await move(store, archiver)
    await store.close()
