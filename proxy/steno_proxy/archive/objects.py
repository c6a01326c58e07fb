"""The storage of archived sessions: a folder, or any store that fsspec knows. Objects are written whole and read back before they
are named.

    archive.json                          whose archive this is: one Redis has one
    day=2026-11-22/019ab2c3d4e5f607.jsonl.gz   sessions that ended on that day (`lines.py`)
    partial/…                             being written; a crash leaves one, and the next round takes it away

Names consist of a day and hex digits (`archiver.py` makes them): nothing that a client says is in them.

All calls run in daemon threads, which the process does not wait for at its end, and have deadlines: if a mount hangs, the caller
gets an error. Changes run one after the other: one that runs late, once the mount is back, is over before the next begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from steno.contracts.errors import ArchiveUnreadable, ConfigError
from steno.contracts.records import Session, Turn
from steno_proxy.archive.daemon_threads import DaemonThreads
from steno_proxy.archive.lines import filler, unpack, unpack_head
from steno_proxy.store.places import ArchivePlace

T = TypeVar("T")
IDENTITY = "archive.json"
READERS = 16
"""Calls that only read, at a time."""
PAGE_READERS = 12
"""How many of these read for pages of lists, which have many sessions; the others are for reads of single sessions."""
CALL_S = 30.0
"""Seconds that a call with little data may take, its wait for a thread included."""
WHOLE_S = 120.0
"""The same for a whole object, or for the names of all. A replica that writes for longer has lost the archive to another replica
by then (`HOLD_S`)."""
READ_BYTES_PER_S = 1 << 20
"""For each so many bytes, the read of a session may take one second more."""


class ArchiveIdentity(NamedTuple):
    """Of an archive. id: what its Redis made once. redis: where that is (`home_of`)."""

    id: str
    redis: str


class ObjectStorage:
    """Args: url: a folder, or PROTOCOL://…. Raises: ConfigError: no such protocol, or its package is not installed."""

    def __init__(self, url: str) -> None:
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(str(Path(url).expanduser()) if url.startswith("~") else url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"archive: {url!r}: {error}", field="archive") from None
        self._local = isinstance(self._fs, LocalFileSystem)
        self._readers = DaemonThreads("steno-archive-reader", READERS)
        self._writer = DaemonThreads("steno-archive-writer", 1)
        self._of_pages = asyncio.Semaphore(PAGE_READERS)

    def _path(self, *names: str) -> str:
        return "/".join((self._root.rstrip("/"), *names))

    def _object(self, name: str) -> str:
        day, _, rest = name.partition("/")
        return self._path(f"day={day}", f"{rest}.jsonl.gz")

    async def _look(self, within_s: float, call: Callable[..., T], *args: Any) -> T:
        """Raises: ArchiveUnreadable."""
        return await self._answered(self._readers.do(within_s, call, *args))

    async def _change(self, within_s: float, call: Callable[..., T], *args: Any, late: bool = False) -> T:
        """late: done also where nobody waits for it any more. Raises: ArchiveUnreadable."""
        return await self._answered(self._writer.do(within_s, call, *args, late=late))

    async def _answered(self, doing: Coroutine[Any, Any, T]) -> T:
        try:
            return await doing
        except ArchiveUnreadable:
            raise
        except Exception as error:  # whatever a file system raises: who asked is told, and nothing leaves Redis
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise ArchiveUnreadable(f"the archive {self.url} failed: {why}") from error

    def _there(self, path: str) -> bool:
        """Not `exists`: that takes any error for "not there", and an old listing for what is there."""
        self._fs.invalidate_cache()
        try:
            self._fs.info(path)
        except FileNotFoundError:
            return False
        return True

    def _listed(self, path: str) -> list[str]:
        """Names in a folder. Not `glob`: that leaves out what can't be listed, and reads signs in the path as patterns."""
        self._fs.invalidate_cache()
        try:
            return [found.rstrip("/").rpartition("/")[2] for found in self._fs.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    async def identity(self) -> ArchiveIdentity | None:
        """Whose archive this is; None: nobody's yet."""

        def look() -> ArchiveIdentity | None:
            path = self._path(IDENTITY)
            if not self._there(path):
                return None
            found = json.loads(self._fs.cat_file(path))
            return ArchiveIdentity(str(found["id"]), str(found.get("redis")))

        return await self._look(CALL_S, look)

    async def begin(self, identity: ArchiveIdentity) -> None:
        """It is this Redis's archive from here on."""
        data = json.dumps({"format": 1, **identity._asdict()}).encode() + b"\n"
        await self._change(CALL_S, self._write, self._path(IDENTITY), data)

    async def write(self, name: str, data: bytes) -> None:
        """What is read under its name afterwards are these bytes. Cancelled: what is written late is removed late.

        Raises: ArchiveUnreadable: they can't be written, or read.
        """
        try:
            await self._change(WHOLE_S, self._write, self._object(name), data)
        except asyncio.CancelledError:
            with contextlib.suppress(ArchiveUnreadable):  # it is told, and not waited for
                await self._change(0.0, self._remove, name, late=True)
            raise

    def _write(self, path: str, data: bytes) -> None:
        partial = self._path("partial", path.rpartition("/")[2])
        for each in (partial, path):
            self._fs.makedirs(each.rpartition("/")[0], exist_ok=True)
        if self._local:
            with Path(partial).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        else:
            self._fs.pipe_file(partial, data)
        if self._fs.cat_file(partial) != data:
            raise ArchiveUnreadable(
                f"the archive {self.url} is corrupt: {path} was read back with other bytes than written"
            )
        if self._local:
            Path(partial).replace(path)
            for folder in (Path(path).parent, Path(path).parent.parent):
                at = os.open(folder, os.O_RDONLY)
                os.fsync(at)
                os.close(at)
        else:
            self._fs.mv(partial, path)
        self._fs.invalidate_cache()
        if self._fs.cat_file(path) != data:
            raise ArchiveUnreadable(
                f"the archive {self.url} is corrupt: {path} was read back with other bytes than written"
            )

    async def remove(self, name: str) -> None:
        """Remove an object, if it is there. If an earlier change hangs, this one runs late, after it."""
        await self._change(CALL_S, self._remove, name, late=True)

    def _remove(self, name: str) -> None:
        path = self._object(name)
        for each in (path, self._path("partial", path.rpartition("/")[2])):
            if self._there(each):
                self._fs.rm_file(each)

    async def blank(self, name: str, places: Sequence[ArchivePlace]) -> None:
        """The bytes at these places of an object become filler, and what is after them stays where it is. Idempotent."""

        def blank() -> None:
            path = self._object(name)
            if not self._there(path):
                return
            before = self._fs.cat_file(path)
            data = bytearray(before)
            for place in places:
                if place.offset + place.length <= len(data):
                    data[place.offset : place.offset + place.length] = filler(place.length)
                else:  # the object has been cut: nothing whole is behind it
                    del data[place.offset :]
            if data != before:
                self._write(path, bytes(data))

        await self._change(WHOLE_S, blank)

    async def names(self) -> list[str]:
        """Of all objects, in the order of their writing within a day."""

        def find() -> list[str]:
            days = [day for day in self._listed(self._root) if day.startswith("day=")]
            return sorted(
                f"{day.removeprefix('day=')}/{name.removesuffix('.jsonl.gz')}"
                for day in days
                for name in self._listed(self._path(day))
                if name.endswith(".jsonl.gz")
            )

        return await self._look(WHOLE_S, find)

    async def there(self, name: str) -> bool:
        return await self._look(CALL_S, self._there, self._object(name))

    async def whole(self, name: str) -> bytes:
        return await self._look(WHOLE_S, self._fs.cat_file, self._object(name))

    def _cut(self, place: ArchivePlace, length: int) -> bytes:
        data: bytes = self._fs.cat_file(self._object(place.name), start=place.offset, end=place.offset + length)
        return data

    async def read(self, trial_id: str, place: ArchivePlace) -> tuple[Session, list[Turn]]:
        """Raises: ArchiveUnreadable: names the trial, its object and why."""

        def read() -> tuple[Session, list[Turn]]:
            found = unpack(self._cut(place, place.length))
            _check(trial_id, found[0])
            return found

        return await self._of(trial_id, place, place.length, read)

    async def heads(self, places: Sequence[tuple[str, ArchivePlace]]) -> list[Session | ArchiveUnreadable]:
        """The sessions at these places, or why one can't be read. Each has its time from when it is its turn; where one had no
        answer in time, those behind it are not asked for."""
        hangs = False

        def head(trial_id: str, place: ArchivePlace) -> Session:
            found = unpack_head(self._cut(place, place.head_bytes))
            _check(trial_id, found)
            return found

        async def one(trial_id: str, place: ArchivePlace) -> Session | ArchiveUnreadable:
            nonlocal hangs
            async with self._of_pages:
                try:
                    if hangs:
                        raise self._unreadable(trial_id, place, "others of this page had no answer in time")
                    return await self._of(trial_id, place, place.head_bytes, head, trial_id, place)
                except ArchiveUnreadable as error:
                    hangs = hangs or isinstance(error.__cause__, TimeoutError)
                    return error

        return await asyncio.gather(*(one(trial_id, place) for trial_id, place in places))

    async def _of(self, trial_id: str, place: ArchivePlace, size: int, call: Callable[..., T], *args: Any) -> T:
        try:
            return await self._readers.do(CALL_S + size / READ_BYTES_PER_S, call, *args)
        except Exception as error:  # whatever a file system, or a spoilt file, comes with
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise self._unreadable(trial_id, place, why) from error

    def _unreadable(self, trial_id: str, place: ArchivePlace, why: str) -> ArchiveUnreadable:
        return ArchiveUnreadable(
            f"session {trial_id} is in the archive and can't be read: {self._object(place.name)}: {why}"
        )


def _check(trial_id: str, session: Session) -> None:
    if session.trial_id != trial_id:
        raise ValueError("it holds another session")
