"""What a session's watchers see. Events are read from the record, so a lost wake-up delays one by `block_ms` at most."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from steno.contracts.rest import END
from steno_proxy.store.encoding.head import head_from_hash
from steno_proxy.store.interface import SessionTail
from steno_proxy.store.places import ArchivePlace, ArchiveReader, InArchive
from steno_proxy.store.redis.archive import RedisArchive
from steno_proxy.store.redis.link.redis_link import RedisLink, Script
from steno_proxy.store.redis.recordings import CHUNK_TURNS, NO_ROWS, pairs
from steno_proxy.store.redis.schema import trial_keys
from steno_proxy.store.views import Event, end_event, past_events, turn_events, turns_seen

WATCH_TTL_S = 60  # how long the stream outlives its last watcher


class RedisEvents:
    """Events of sessions, recorded and live.

    Args: watch_link: for the one call that blocks, for `block_ms`. tail: `SessionStore.tail`, which says where a session is.
    """

    def __init__(
        self, link: RedisLink, watch_link: RedisLink, archive: RedisArchive, shelf: ArchiveReader,
        tail: Callable[[str, int], Awaitable[SessionTail]], block_ms: int,
    ) -> None:  # fmt: skip
        self._link = link
        self._watch_link = watch_link
        self._archive = archive
        self._shelf = shelf
        self._tail = tail
        self._block_ms = block_ms
        self._watch = Script("watch")
        self._watchers = 0

    async def of(self, trial_id: str, *, after: str | None = None) -> AsyncGenerator[Event, None]:
        """Those after cursor `after`, until the session has ended (`SessionStore.events`)."""
        try:
            await self._tail(trial_id, NO_ROWS)
        except InArchive as archived:
            if after != END:
                async for event in self._past(trial_id, archived.place, turns_seen(after)):
                    yield event
            return
        if after == END:
            return
        self._watchers += 1
        try:
            async for event in self._happening(trial_id, turns_seen(after)):
                yield event
        finally:
            self._watchers -= 1
            if not self._watchers:
                await self._watch_link.rest()

    async def _past(self, trial_id: str, place: ArchivePlace, seen: int) -> AsyncGenerator[Event, None]:
        session, turns = await self._shelf.read(trial_id, place)
        for event in past_events(seen, session, turns):
            yield event

    async def _happening(self, trial_id: str, seen: int) -> AsyncGenerator[Event, None]:
        keys = trial_keys(trial_id)
        watched = [keys.events, keys.session, keys.turns]
        while True:
            wake, fields, entries = await self._link.run(
                self._watch, watched, [seen, WATCH_TTL_S, CHUNK_TURNS], writes=False
            )
            head = head_from_hash(pairs(fields)) if fields else None
            if head is None and (place := (await self._archive.places([trial_id])).get(trial_id)):
                async for event in self._past(trial_id, place, seen):
                    yield event
                return
            ended = head is None or head.status != "open"
            events = turn_events(seen, entries, ended=ended)
            for event in events:
                yield event
            seen += len(events)
            if len(events) == CHUNK_TURNS:
                continue
            if ended:
                yield end_event(head)
                return
            await self._watch_link.call(
                self._watch_link.client.xread({keys.events: wake}, count=1, block=self._block_ms)
            )
