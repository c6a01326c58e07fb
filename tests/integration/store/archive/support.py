"""Ended sessions of a store, and the archive that they are moved to."""

from __future__ import annotations

import gzip
import json
import threading
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from steno.contracts.records import Session, Turn
from steno_proxy.archive.archiver import Archiver
from steno_proxy.archive.objects import ObjectStorage
from steno_proxy.sessions.samples import samples
from steno_proxy.store.redis.store import RedisStore
from tests.support.contracts.recording import END, record
from tests.support.machine.redis_server import PATIENT, RedisServer

LATER = 200_000.0
"""Seconds, by the clock that the rounds are told: all that ended in these tests is past its retention then."""


class FaultyFileSystem(MemoryFileSystem):
    """Has the fault that `fault` names, once (hangs_reads: each time). full: a write fails; cut: half of it is lost. hangs,
    hangs_read: a write or a read waits for `mount_is_back`. info ENDING, ls ENDING: that call fails for a path with this ending.
    old_listing: objects are not found until the listings are forgotten. unnamed: a rename times out."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 (fsspec's own)
    pseudo_dirs = [""]  # noqa: RUF012
    fault = ""
    hung: list[str] = []  # noqa: RUF012
    mount_is_back = threading.Event()

    def _strip(self, path: str) -> str:
        return str(path)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        if FaultyFileSystem.fault == "full" and path.endswith(".gz"):
            FaultyFileSystem.fault = ""
            raise OSError(28, "No space left on device")
        if FaultyFileSystem.fault == "cut" and path.endswith(".gz"):
            FaultyFileSystem.fault = ""
            value = value[: len(value) // 2]
        if FaultyFileSystem.fault == "hangs" and path.endswith(".gz"):
            FaultyFileSystem.fault = ""
            FaultyFileSystem.mount_is_back.wait()
        super().pipe_file(path, value, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if FaultyFileSystem.fault in ("hangs_read", "hangs_reads") and path.endswith(".gz"):
            if FaultyFileSystem.fault == "hangs_read":
                FaultyFileSystem.fault = ""
            FaultyFileSystem.hung.append(path)
            FaultyFileSystem.mount_is_back.wait()
        found: bytes = super().cat_file(path, start, end, **options)
        return found

    def info(self, path: str, **options: Any) -> Any:
        _fail("info", path)
        if FaultyFileSystem.fault == "old_listing" and path.endswith(".gz"):
            raise FileNotFoundError(path)
        return super().info(path, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        _fail("ls", path)
        return super().ls(path, detail, **options)

    def invalidate_cache(self, path: str | None = None) -> None:
        if FaultyFileSystem.fault == "old_listing":
            FaultyFileSystem.fault = ""

    def mv(self, one: str, two: str, **options: Any) -> None:  # type: ignore[override]
        if FaultyFileSystem.fault == "unnamed":
            FaultyFileSystem.fault = ""
            raise TimeoutError
        super().mv(one, two, **options)


def _fail(call: str, path: str) -> None:
    failing, _, ending = FaultyFileSystem.fault.partition(" ")
    if failing == call and path.endswith(ending):
        FaultyFileSystem.fault = ""
        raise OSError(5, "Input/output error")


fsspec.register_implementation("faulty", FaultyFileSystem)


def replica(server: RedisServer, url: str, **options: Any) -> tuple[RedisStore, Archiver]:
    objects = ObjectStorage(url)
    store = RedisStore(server.url, shelf=objects, **PATIENT, **options)
    return store, Archiver(store, objects)


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
