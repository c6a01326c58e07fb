"""Which sessions have left Redis, and where they are: `archived` maps a trial to its place. How one leaves:

    1 seal       its record takes no turn from here on (trial's slot); what may change yet of it is digested (`leave.lua`)
    2 begin      the object that will hold it is noted, by who holds `archiver` (index slot)
    3 write      the object is written, read back and compared
    4 commit     the places of all its sessions are known, in one script, if the same replica still holds `archiver`
    5 leave      the session leaves Redis, if its digest is the same (trial's slot); else it is archived again
    6 publish    `ended` forgets it: lists keep it

A crash before 4 leaves an object that nothing names: `archiving` says which, and the next round removes it. One after 4
leaves sessions in both: Redis's is the one that is read, and the next round begins at 1 again, with another object. One of a
group is announced before it leaves (`RedisIndex`), with its group, which nothing in Redis says afterwards and the object may
not either.

A session that is deleted meanwhile gets no place: step 4 gives none to a session in `dead`, and publish.lua, which puts it there,
removes its place. If a session is archived again, `copies` has the place of its older copy, which is overwritten when the session
is deleted: until then the copy only costs space, and a wrong place in `copies` costs nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from steno_proxy.store.places import ArchivePlace
from steno_proxy.store.redis.link.redis_link import RedisLink, Script
from steno_proxy.store.redis.schema import ARCHIVED, ARCHIVER, ARCHIVING, BLANKS, COPIES, DEAD, side_keys, trial_keys

HOLD_S = 120.0
"""For how long a replica archives after it has last said so."""
_KEYS = [ARCHIVER, ARCHIVING, ARCHIVED, BLANKS, DEAD, COPIES]


class RedisArchive:
    """Moves ended sessions from Redis to the archive (the module's docstring has the steps)."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._token = secrets.token_hex(8)
        self._script, self._leave, self._bury = Script("archive"), Script("leave"), Script("bury")

    async def _run(self, operation: str, *args: Any) -> bool:
        return bool(await self._link.run(self._script, _KEYS, [operation, self._token, *args]))

    async def hold(self) -> bool:
        """Whether it is this replica that archives, for HOLD_S from now."""
        return await self._run("hold", round(HOLD_S * 1000))

    async def release(self) -> None:
        await self._run("release")

    async def begin(self, name: str) -> bool:
        return await self._run("begin", name)

    async def abandoned(self) -> str | None:
        """An object that was begun and never committed."""
        [found] = await self._link.ask(("GET", ARCHIVING))
        return found.decode() if found is not None else None

    async def end(self) -> None:
        await self._run("end")

    async def commit(self, places: dict[str, ArchivePlace]) -> bool:
        return await self._run("commit", *[part for t, place in places.items() for part in (t, place.encode())])

    async def places(self, trial_ids: Sequence[str]) -> dict[str, ArchivePlace]:
        """The places of those of these trials that are in the archive."""
        if not trial_ids:
            return {}
        [found] = await self._link.ask(("HMGET", ARCHIVED, *trial_ids))
        return {t: ArchivePlace.decode(raw) for t, raw in zip(trial_ids, found, strict=True) if raw is not None}

    async def forget(self, trial_id: str) -> bool:
        """A session is deleted: its bytes are overwritten in the next round."""
        return await self._run("forget", trial_id)

    async def blanks(self) -> list[ArchivePlace]:
        [found] = await self._link.ask(("SMEMBERS", BLANKS))
        places = {raw: ArchivePlace.decode(raw) for raw in found}
        if odd := [raw for raw, place in places.items() if place.encode() != raw.decode()]:  # of an older release
            await self.to_blank([places[raw] for raw in odd])
            await self._link.write("SREM", BLANKS, *odd)
        return list(dict.fromkeys(places.values()))

    async def to_blank(self, places: Sequence[ArchivePlace]) -> None:
        """Nobody is to find these: they are overwritten in the next round."""
        if places:
            await self._link.write("SADD", BLANKS, *(place.encode() for place in places))

    async def blanked(self, places: Sequence[ArchivePlace]) -> None:
        await self._link.write("SREM", BLANKS, *(place.encode() for place in places))

    async def status(self, trial_id: str) -> str | None:
        """The status of the session in Redis; `deleted` for a tombstone; None: there is neither."""
        [found] = await self._link.ask(("HGET", trial_keys(trial_id).session, "status"))
        return found.decode() if found is not None else None

    async def state(self, trial_id: str) -> str:
        found: bytes = await self._link.run(self._leave, [*trial_keys(trial_id), *side_keys(trial_id)], [""])
        return found.decode()

    async def leave(self, trial_id: str, state: str) -> bool:
        """Remove a session from Redis if its state is still this one. Returns: whether it has left."""
        keys = [*trial_keys(trial_id), *side_keys(trial_id)]
        return bool(await self._link.run(self._leave, keys, [state]) == b"left")

    async def bury(self, trial_id: str, created_at: float, *, now: float, tombstone_ms: int) -> None:
        await self._link.run(self._bury, [trial_keys(trial_id).session], [tombstone_ms, repr(created_at), repr(now)])
