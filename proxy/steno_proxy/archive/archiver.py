"""Moves ended sessions from Redis into the archive, in rounds, one replica at a time (docs/adr/0018).

A session leaves Redis only once its object has been written, read back and compared. What a crash leaves is in
`steno_proxy/store/redis/archive.py`; whatever fails is logged and counted, and tried again in the next round.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

from steno.contracts.errors import ArchiveUnreadable, StenoError
from steno.contracts.records import Session
from steno_proxy import metrics
from steno_proxy.archive.lines import PackedSession, members, pack, unpack_head
from steno_proxy.archive.objects import ArchiveIdentity, ObjectStorage
from steno_proxy.store.places import ArchivePlace
from steno_proxy.store.redis.store import RedisStore

log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
BATCH_SESSIONS = 256
"""An object is written when it has as many of either, or the day ends."""
STORE, KEPT = "store", "archive"
"""What Redis keeps: its own id, made once, which its archive has too; and the id of its archive, once it lists all of it."""


class _Ready(NamedTuple):
    """A session that is to leave. state: what it was when it was packed."""

    trial_id: str
    group_id: str | None
    state: str
    packed: PackedSession


class Archiver:
    """Args: clock: Unix seconds, for the names of objects."""

    def __init__(self, store: RedisStore, objects: ObjectStorage, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._objects = objects
        self._clock = clock

    async def round(self, *, now: float, retention_s: float, early_s: float | None = None) -> int:
        """Move what ended `retention_s` ago or earlier; returns how many sessions have left: 0 where another replica does it.

        Args: early_s: memory is short: also what ended so long ago, if neither its group runs nor its reward may come.
        Raises: ArchiveUnreadable, StoreUnavailable. What has left until then has left whole, and what has not is still there.
        """
        archive = self._store.archive
        if not await archive.hold():
            return 0
        try:
            if not await self._recognise():
                return 0
            if (abandoned := await archive.abandoned()) is not None:
                await self._take_up(abandoned)
            if not await self._blank():
                return 0
            early = retention_s if early_s is None else min(early_s, retention_s)
            return await self._move(now, now - retention_s, now - early)
        except ArchiveUnreadable:
            metrics.ARCHIVE_ERRORS.inc()
            raise
        finally:
            await archive.release()

    async def _recognise(self) -> bool:
        """One Redis has one archive, and an archive is of one Redis: nobody moves sessions where the others can't read them, or
        lists those of another Redis. Looked at in each round, as Redis may lose its memory, or the archive to another.

        Returns: False: another replica has taken over. Raises: ArchiveUnreadable: this archive is not ours.
        """
        url, here, known = self._objects.url, await self._objects.identity(), await self._store.kept(KEPT)
        if known is not None:
            if here is not None and here.id == known.decode():
                return True
            if here is None and await self._objects.names():
                log.warning("the archive %s has no archive.json: listing all that is in it", url)
                if not await self._list_again() or await self._objects.identity() is not None:
                    return False  # another replica, or another Redis, has taken it meanwhile
                await self._objects.begin(ArchiveIdentity(known.decode(), self._store.home))
                return True
            found = f"of {here.redis}, with the id {here.id}" if here else "empty"
            raise ArchiveUnreadable(
                f"the archive {url} is {found}, but this Redis has sessions in the archive with id {known.decode()}: give all "
                "replicas of one Redis the same folder or URL, and other Redis servers another; when you move it, move its files"
            )
        mine = (await self._store.keep(STORE, uuid.uuid4().hex.encode())).decode()
        if here is not None and here.id != mine:
            if here.redis != self._store.home:
                raise ArchiveUnreadable(
                    f"the archive {url} is of the Redis {here.redis}, and this one is {self._store.home}: give each Redis an "
                    "archive of its own; if this Redis replaces the other, remove archive.json: then the archived sessions are "
                    "listed again"
                )
            log.warning("%s has lost its data: taking the archive %s, and listing its sessions again", here.redis, url)
        await self._objects.begin(ArchiveIdentity(mine, self._store.home))
        if not await self._list_again():
            return False
        await self._store.keep(KEPT, mine.encode())
        return True

    async def _list_again(self) -> bool:
        """A Redis that is new, or has lost its memory, or some of it, learns what is in the archive. False: another replica has
        taken over."""
        found = 0
        for name in await self._objects.names():
            data = await self._objects.whole(name)
            try:
                places = await asyncio.to_thread(_places_in, name, data)
            except ValueError as error:
                metrics.ARCHIVE_ERRORS.inc()
                log.error("object %s of the archive can't be read, its sessions are not listed: %s", name, error)
                continue
            if not (await self._store.archive.hold() and await self._known_again(places)):
                return False
            found += len(places)
        if found:
            log.info("%d sessions of the archive are listed again", found)
        return True

    async def _known_again(self, places: list[tuple[Session, ArchivePlace]]) -> bool:
        committed = await self._store.archive.commit({session.trial_id: place for session, place in places})
        for session, _ in places if committed else ():
            if await self._store.archive.status(session.trial_id) is None:  # else it will be archived again
                await self._store.shelve(session)
        return committed

    async def _take_up(self, name: str) -> None:
        """Deal with an object that a crash left uncommitted. If Redis knows all its sessions (there, archived or deleted), it is
        removed. If Redis has lost its latest writes and knows nothing of some, the object stays: these sessions are listed again,
        and the copies in it that nothing names are overwritten."""
        archive = self._store.archive
        if await self._objects.there(name):
            data = await self._objects.whole(name)
            try:
                places = await asyncio.to_thread(_places_in, name, data)
            except ValueError as error:
                metrics.ARCHIVE_ERRORS.inc()
                log.error("object %s of the archive can't be read; it stays as it is: %s", name, error)
            else:
                known = await archive.places([session.trial_id for session, _ in places])
                lost = [
                    (session, place)
                    for session, place in places
                    if session.trial_id not in known and await archive.status(session.trial_id) is None
                ]
                if lost:
                    named = {place for _, place in lost} | set(known.values())
                    await archive.to_blank([place for _, place in places if place not in named])
                    await self._known_again(lost)
                else:
                    await self._objects.remove(name)
        else:
            await self._objects.remove(name)  # what was written of it before it had its name
        await archive.end()

    async def _blank(self) -> bool:
        """Overwrite what was deleted, each object once. One that can't be rewritten now is left for the next round, and stops
        nothing else. False: another replica has taken over."""
        archive = self._store.archive
        by_object: dict[str, list[ArchivePlace]] = {}
        for place in await archive.blanks():
            by_object.setdefault(place.name, []).append(place)
        for name, places in by_object.items():
            if not await archive.hold():
                return False
            try:
                await self._objects.blank(name, places)
            except ArchiveUnreadable as error:
                metrics.ARCHIVE_ERRORS.inc()
                log.error("object %s of the archive still has %d deleted sessions: %s", name, len(places), error)
                if isinstance(error.__cause__, TimeoutError):
                    break  # and so would the next
            else:
                await archive.blanked(places)
        return True

    async def _move(self, now: float, retained: float, cutoff: float) -> int:
        """Archive sessions; returns how many have left. Args: cutoff: sessions that ended at or before this leave, unless their
        group waits for a lease or is leased. retained: one that ended after this stays also while its group runs or its reward
        may come."""
        moved, seen, batch, size, day = 0, set[str](), list[_Ready](), 0, ""
        skip = 0
        departures = self._store.departures
        while await self._store.archive.hold() and (some := await departures.leaving(cutoff, skip)):
            skip += len(some)
            new = [one for one in some if one[0] not in seen]
            seen.update(trial_id for trial_id, _ in new)
            held = await departures.held(new, retained)
            for trial_id, ended_at in new:
                if trial_id in held:
                    continue
                today = time.strftime("%Y-%m-%d", time.gmtime(ended_at))
                if batch and (today != day or size >= BATCH_BYTES or len(batch) >= BATCH_SESSIONS):
                    moved += await self._write(day, batch)
                    batch, size, skip = [], 0, 0  # those that have left are in the way no more
                day = today
                ready = await self._ready(trial_id, now, early=ended_at > retained)
                if ready is not None:
                    batch.append(ready)
                    size += len(ready.packed.data)
        if batch:
            moved += await self._write(day, batch)
        return moved

    async def _ready(self, trial_id: str, now: float, *, early: bool) -> _Ready | None:
        """None: it may not leave, or not yet."""
        try:
            state = await self._store.departures.prepare(trial_id, now, early=early)
            if not state:
                return None
            session, turns = await self._store.session(trial_id), await self._store.turns(trial_id)
            session.notes = await self._store.notes(trial_id)
            packed = await asyncio.to_thread(pack, session, turns)
        except ValueError as error:
            metrics.ARCHIVE_ERRORS.inc()
            log.error("session %s stays in Redis: %s", trial_id, error)
            return None
        except StenoError as error:
            if error.retryable:
                raise
            return None  # deleted meanwhile
        return _Ready(trial_id, session.group_id, state, packed)

    async def _write(self, day: str, batch: list[_Ready]) -> int:
        archive = self._store.archive
        name = f"{day}/{int(self._clock() * 1000):012x}{secrets.token_hex(4)}"
        if not (await archive.hold() and await archive.begin(name)):
            return 0  # another replica has taken over
        places, at = {}, 0
        for one in batch:
            places[one.trial_id] = ArchivePlace(name, at, one.packed.head_bytes, len(one.packed.data))
            at += len(one.packed.data)
        try:
            await self._objects.write(name, b"".join(one.packed.data for one in batch))
            committed = await archive.commit(places)
        except ArchiveUnreadable:
            await self._objects.remove(name)
            await archive.end()
            raise
        if not committed:
            await self._objects.remove(name)
            return 0
        left = [one for one in batch if await self._store.departures.left(one.trial_id, one.group_id, one.state)]
        metrics.ARCHIVED_SESSIONS.inc(len(left))
        metrics.ARCHIVED_BYTES.inc(sum(len(one.packed.data) for one in left))
        return len(left)


def _places_in(name: str, data: bytes) -> list[tuple[Session, ArchivePlace]]:
    """Raises: ValueError."""
    found: list[tuple[Session, ArchivePlace]] = []
    begun: tuple[Session, int, int] | None = None
    for at, length, held in members(data):
        if held.startswith(b'{"session":'):
            begun = (unpack_head(data[at : at + length]), at, length)
        elif begun is not None:
            session, start, head = begun
            found.append((session, ArchivePlace(name, start, head, at + length - start)))
            begun = None
    return found
