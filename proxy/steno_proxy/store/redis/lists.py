"""Pages of sessions: places from the index, facets for what a filter passes over, and the records of the rest, which decide."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence

from steno.contracts.errors import ArchiveUnreadable
from steno.contracts.records import Session
from steno_proxy.store.encoding.head import head_from_hash, session_of
from steno_proxy.store.facets import SessionFilter
from steno_proxy.store.interface import SessionListPage
from steno_proxy.store.places import ArchiveReader
from steno_proxy.store.redis.archive import RedisArchive
from steno_proxy.store.redis.index import RedisIndex
from steno_proxy.store.redis.link.redis_link import RedisLink
from steno_proxy.store.redis.schema import trial_keys
from steno_proxy.store.views import ListPosition

log = logging.getLogger(__name__)

RECORDS_AT_ONCE = 100
LINES_AT_ONCE = 500
"""Places that are read together: of sessions whose records are looked at, or mostly their facets alone (half a millisecond)."""


class RedisLists:
    """Reads sessions by the dozen, from Redis and from the archive."""

    def __init__(self, link: RedisLink, index: RedisIndex, archive: RedisArchive, shelf: ArchiveReader) -> None:
        self._link = link
        self._index = index
        self._archive = archive
        self._shelf = shelf

    async def page(
        self,
        walk: AsyncIterator[list[ListPosition]],
        after: ListPosition | None,
        *,
        status: str | None,
        group_id: str | None,
        wanted: SessionFilter,
        limit: int,
        most_looked: int | None,
    ) -> SessionListPage:
        """One page of what `walk` comes to, which begins after `after` (`SessionStore.list_sessions`)."""
        found: list[Session] = []
        passed: list[int] = []
        unreadable: list[str] = []
        last, before = (
            after,
            0,
        )  # the last place that is on this page or passed over; how many were looked at before these
        async for places in walk:
            looked = before  # up to `last`
            likely = await self._index.likely(places, wanted)
            for start in range(0, len(likely), limit + 1):
                numbers = likely[start : start + limit + 1]
                listed = await self._listed([places[number] for number in numbers])
                for number in numbers:
                    session = listed.get(places[number].trial_id)
                    if session is None or (
                        isinstance(session, Session) and not _takes(session, status, group_id, wanted)
                    ):
                        continue
                    if len(found) + len(unreadable) == limit and last is not None:
                        return SessionListPage(found, last.cursor(), unreadable, passed, looked)
                    last, looked = places[number], before + number + 1
                    if isinstance(session, Session):
                        found.append(session)
                        passed.append(looked)
                    else:
                        unreadable.append(last.trial_id)
            before += len(places)
            last = places[-1] if places else last
            if most_looked is not None and before >= most_looked and last is not None:
                return SessionListPage(found, last.cursor(), unreadable, passed, before)
        return SessionListPage(found, None, unreadable, passed, before)

    async def _listed(self, places: Sequence[ListPosition]) -> dict[str, Session | ArchiveUnreadable]:
        """The sessions at these places, also those in the archive, or why one can't be read there."""
        found: dict[str, Session | ArchiveUnreadable] = {}
        found |= {session.trial_id: session for session in await self.sessions_at(places)}
        left = await self._archive.places([place.trial_id for place in places if place.trial_id not in found])
        heads = await self._shelf.heads(list(left.items()))
        for trial_id, head in zip(left, heads, strict=True):
            found[trial_id] = head.model_copy(update={"notes": None}) if isinstance(head, Session) else head
        if bad := [head for head in heads if isinstance(head, ArchiveUnreadable)]:
            log.warning("%d sessions of a list can't be read, such as: %s", len(bad), bad[0].message)
        return found

    async def sessions_at(self, places: Sequence[ListPosition]) -> list[Session]:
        """The sessions that the index has at these places; those that are gone, or live again elsewhere, left out."""
        found = await self.sessions([place.trial_id for place in places])
        created = {place.trial_id: place.created for place in places}
        return [session for session in found if session.created_at == created[session.trial_id]]

    async def sessions(self, trial_ids: Sequence[str]) -> list[Session]:
        """Those of these trials that are there. Raises: as `session_of`."""
        return [
            session_of(trial_id, head_from_hash(fields), doc) async for trial_id, fields, doc in self._raw(trial_ids)
        ]

    async def readable(self, trial_ids: Sequence[str]) -> list[Session]:
        """The same, without those that can't be read: the log has why."""
        found = []
        async for trial_id, fields, doc in self._raw(trial_ids):
            try:
                found.append(session_of(trial_id, head_from_hash(fields), doc))
            except Exception as error:
                log.warning("can't read the session of trial %s: %s: %s", trial_id, type(error).__name__, error)
        return found

    async def _raw(self, trial_ids: Sequence[str]) -> AsyncIterator[tuple[str, dict[bytes, bytes], bytes]]:
        """Heads and documents of those of these trials that are there, read some at a time, so that everybody else goes on."""
        for start in range(0, len(trial_ids), RECORDS_AT_ONCE):
            some = trial_ids[start : start + RECORDS_AT_ONCE]
            pipe = self._link.client.pipeline(transaction=False)
            for trial_id in some:
                keys = trial_keys(trial_id)
                pipe.hgetall(keys.session)
                pipe.get(keys.doc)
            replies = await self._link.call(pipe.execute())
            for trial_id, fields, doc in zip(some, replies[::2], replies[1::2], strict=True):
                if doc is not None and fields and fields[b"status"] != b"deleted":
                    yield trial_id, fields, doc


def _takes(session: Session, status: str | None, group_id: str | None, wanted: SessionFilter) -> bool:
    """What decides is the record: the index may be behind it."""
    return status in (None, session.status) and group_id in (None, session.group_id) and wanted.takes(session)
