"""Sessions in Redis (I3, I5, I7): one script per write, one round trip per commit and per tail. The schema is `schema.py`.

Durable to the degree the server is: `appendfsync always` keeps every acknowledged turn through a power failure, the usual
`everysec` all but the last second of it. Through a failover, where each write waits for a replica. A write that raised
StoreUnavailable may or may not have happened; each may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Any

from steno.contracts.errors import ArchiveUnreadable, Gone, NotFound
from steno.contracts.lenient import read_json
from steno.contracts.notes import Notes
from steno.contracts.records import Group, Session, Turn
from steno_proxy.config.redis_url import home_of
from steno_proxy.pace import Pace
from steno_proxy.store.claims import Claimed, TrialClaim, lost
from steno_proxy.store.encoding.head import doc_of, head_from_hash, head_of, head_to_hash, session_of
from steno_proxy.store.encoding.texts import to_json
from steno_proxy.store.facets import EVERY_SESSION, SessionFilter, facets_of
from steno_proxy.store.groups import check_member, same_group, there, with_recorded_ids
from steno_proxy.store.interface import EndedOtherwise, SessionListPage, SessionTail
from steno_proxy.store.places import ArchivePlace, ArchiveReader, InArchive, NoArchive
from steno_proxy.store.redis.accounts import RedisAccounts
from steno_proxy.store.redis.archive import RedisArchive
from steno_proxy.store.redis.archived_turns import ArchivedTurns
from steno_proxy.store.redis.departures import RedisDepartures
from steno_proxy.store.redis.events import RedisEvents
from steno_proxy.store.redis.index import RedisIndex
from steno_proxy.store.redis.link.clock import RedisClock
from steno_proxy.store.redis.link.redis_link import RedisLink
from steno_proxy.store.redis.link.wait import ReplicaWait
from steno_proxy.store.redis.lists import LINES_AT_ONCE, RECORDS_AT_ONCE, RedisLists
from steno_proxy.store.redis.policies import RedisPolicies
from steno_proxy.store.redis.recordings import (
    CLAIMED,
    CLOSED,
    MISSING,
    NO_ROWS,
    OTHER,
    RedisRecordings,
    pairs,
    refuse,
)
from steno_proxy.store.redis.runs import RedisRuns
from steno_proxy.store.redis.schema import group_key, kept_key, trial_keys
from steno_proxy.store.redis.token_texts import RedisTokenTexts
from steno_proxy.store.runs.settlement import Tokens, accountable
from steno_proxy.store.timed import look_at
from steno_proxy.store.views import Event, ListPosition, position

log = logging.getLogger(__name__)

WATCH_BLOCK_MS = 5_000  # how long a watcher waits before it looks again by itself
LOOKED_AT_ONCE = 200
"""Sessions that a sweep reads together, between which requests have their turn."""
CREATED_AT_ONCE = 256
"""Sessions of a group; a batch takes as many commands."""


class RedisStore(RedisRecordings):
    """Keeps the `SessionStore` protocol. Any number of replicas may use one Redis.

    Args: url: see `read_redis_url`. wait: how many replicas must have what is written before it counts as written, and for how
        long that is waited for. clock: Unix seconds, for all that is stamped here; None: Redis's.
    """

    def __init__(
        self, url: str, *, wait: ReplicaWait | None = None, clock: Callable[[], float] | None = None, pace: Pace | None = None,
        shelf: ArchiveReader | None = None, **link_options: Any,
    ) -> None:  # fmt: skip
        super().__init__(RedisLink(url, wait=wait, **link_options), pace)
        # Watchers hold a connection while they wait: theirs are others than the commits'.
        self._watch_link = RedisLink(
            url,
            max_connections=1024,
            reply_timeout_s=WATCH_BLOCK_MS / 1000 + 2,
            call_timeout_s=WATCH_BLOCK_MS / 1000 + 5,
        )
        self._redis_clock = RedisClock(self._link)
        self._stamp = clock or self._redis_clock.now
        self.runs = RedisRuns(self._link, self._watch_link, self._living, WATCH_BLOCK_MS, self.clock)
        self._accounts = RedisAccounts(self._link, self.runs)
        self._index = RedisIndex(self._link, self.clock, self._group_gone, self._group_back)
        self._unsettled: dict[str, list[str]] = {}  # announcements of ends that `settle` is to follow
        self.home = home_of(url)
        self.waited_replicas = wait.replicas if wait else 0
        self.policies = RedisPolicies(self._link)
        self.token_texts = RedisTokenTexts(self._link)
        self.archive = RedisArchive(self._link)
        self._shelf = shelf or NoArchive()
        self._archived_turns = ArchivedTurns(self._shelf)
        self._lists = RedisLists(self._link, self._index, self.archive, self._shelf)
        self._events = RedisEvents(self._link, self._watch_link, self.archive, self._shelf, self.tail, WATCH_BLOCK_MS)
        self.departures = RedisDepartures(
            self._link, self._index, self.archive, self._shelf, self._accounts, self.runs, self.clock
        )

    async def open(self) -> None:
        await self.ping()
        await self.now()

    async def close(self) -> None:
        await self.runs.close()
        await self._link.close()
        await self._watch_link.close()

    async def ping(self) -> None:
        await self._link.ping()

    async def now(self) -> float:
        return await self._redis_clock.ask()

    def clock(self) -> float:
        return self._stamp()

    async def earliest(self) -> float:
        await self.now()
        return self._redis_clock.earliest()

    async def keep(self, name: str, value: bytes) -> bytes:
        before: bytes | None = await self._run("keep", [kept_key(name)], [value])
        return value if before is None else before

    async def kept(self, name: str) -> bytes | None:
        """What `keep` has kept under this name."""
        found: bytes | None = (await self._link.ask(("GET", kept_key(name))))[0]
        return found

    # -- groups and sessions

    async def create_group(self, group: Group, sessions: Sequence[Session]) -> Group:
        await self._check_free(group, sessions)
        written = group.model_dump_json().encode()
        before = await self._run("once", [group_key(group.group_id)], [written])
        if before is not None:
            recorded = read_json(Group, before)
            same_group(recorded, group)
            group, sessions = recorded, with_recorded_ids(recorded, sessions)
        archived = await self.archive.places([session.trial_id for session in sessions])
        if not archived:  # else its run has let go of it
            await self.runs.open_group(group)
        sessions = [session for session in sessions if session.trial_id not in archived]
        if not sessions:
            return group
        members = await self._index.announce([session.trial_id for session in sessions])
        gone: list[Gone] = []
        for at in range(0, len(sessions), CREATED_AT_ONCE):  # not all in one turn of the event loop
            some = sessions[at : at + CREATED_AT_ONCE]
            made = [self._create_member(group, session, members[session.trial_id], before is None) for session in some]
            gone += [error for error in await asyncio.gather(*(there(one) for one in made)) if error is not None]
        if gone and (before is None or (len(gone) == len(sessions) and not archived)):
            raise gone[0]
        [kept] = await self._link.ask(("GET", group_key(group.group_id)))
        if kept is None and await self._index.lists(group.group_id):  # its earlier life ended meanwhile (`RedisIndex`)
            await self._group_back(before or written)
        return group

    async def _check_free(self, group: Group, sessions: Sequence[Session]) -> None:
        """Before a new group is counted. Raises: Conflict: a session that is not the group's has one of its trial ids; Gone: one
        of its trials was deleted not long ago."""
        for at in range(0, len(sessions), CREATED_AT_ONCE):
            names = [session.trial_id for session in sessions[at : at + CREATED_AT_ONCE]]
            asked = [("HMGET", trial_keys(trial_id).session, "status", "group") for trial_id in names]
            recorded, *found = await self._link.ask(("GET", group_key(group.group_id)), *asked)
            if recorded is not None:
                return
            for trial_id, (status, of) in zip(names, found, strict=True):
                if status == b"deleted":
                    refuse(trial_id, CLOSED)
                if status is not None:
                    check_member(group.group_id, trial_id, of and of.decode())
            left = await self.archive.places(names)
            for head in await self._shelf.heads(list(left.items())) if left else ():
                if isinstance(head, Session):  # what can't be read now is listed as unreadable
                    check_member(group.group_id, head.trial_id, head.group_id)

    async def _create_member(self, group: Group, session: Session, member: str, is_new: bool) -> None:
        """Args: is_new: False: a group on record may have been made around somebody else's session, by an earlier release."""
        found = await self._create(session, member)
        if is_new:
            check_member(group.group_id, found.trial_id, found.group_id)

    async def group(self, group_id: str) -> Group:
        raw = await self._link.call(self._link.client.get(group_key(group_id)))
        if raw is None:
            raise NotFound(f"no group {group_id}")
        return read_json(Group, raw)

    async def register(self, session: Session) -> Session:
        try:
            return await self.session(session.trial_id)
        except NotFound:
            members = await self._index.announce([session.trial_id])
            return await self._create(session, members[session.trial_id])

    async def _create(self, session: Session, member: str) -> Session:
        keys = trial_keys(session.trial_id)
        head, doc = head_of(session), doc_of(session)
        reply = await self._run("register", keys[:2], [doc, *head_to_hash(head)])
        if reply[0] == CLOSED:
            await self._index.withdraw(member)
            refuse(session.trial_id, CLOSED)
        if reply[0] == 0:
            head, doc = head_from_hash(pairs(reply[1])), reply[2]
        found = session_of(session.trial_id, head, doc)
        at = look_at(found, found.created_at)
        await self._index.publish(session.trial_id, head, member, look_at=at, found_by=facets_of(found))
        return found

    async def session(self, trial_id: str) -> Session:
        try:
            return (await self.tail(trial_id, NO_ROWS)).session
        except InArchive as archived:
            return await self._head(trial_id, archived.place)

    async def _head(self, trial_id: str, place: ArchivePlace, *, noted: bool = False) -> Session:
        """The session in the archive. noted: with its notes, which are asked for on their own otherwise (`notes`)."""
        [found] = await self._shelf.heads([(trial_id, place)])
        if isinstance(found, ArchiveUnreadable):
            raise found
        return found if noted else found.model_copy(update={"notes": None})

    async def tail(self, trial_id: str, start: int, *, known: int = 0) -> SessionTail:
        try:
            return await super().tail(trial_id, start, known=known)
        except NotFound:
            await self._check_not_archived(trial_id)
            raise

    async def notes(self, trial_id: str) -> Notes | None:
        found = await super().notes(trial_id)
        if found is None and (place := (await self.archive.places([trial_id])).get(trial_id)):
            return (await self._head(trial_id, place, noted=True)).notes
        return found

    async def _check_not_archived(self, trial_id: str) -> None:
        """Raises: InArchive."""
        if place := (await self.archive.places([trial_id])).get(trial_id):
            raise InArchive(trial_id, place)

    async def turns(self, trial_id: str, *, start: int = 0, limit: int | None = None) -> list[Turn]:
        try:
            return await super().turns(trial_id, start=start, limit=limit)
        except InArchive as archived:
            place = archived.place
        except NotFound:  # it went while it was read
            found = (await self.archive.places([trial_id])).get(trial_id)
            if found is None:
                raise
            place = found
        if limit is not None:
            return await self._archived_turns.page(trial_id, place, start, limit)
        _, turns = await self._shelf.read(trial_id, place)
        return turns[start:]

    async def rotate_key(self, trial_id: str, generation: int | None) -> int:
        try:
            return await super().rotate_key(trial_id, generation)
        except NotFound:
            await self._check_not_archived(trial_id)
            raise

    async def claim(
        self, trial_id: str, launcher: str, ttl_s: float, *, now: float, gone: Collection[str] = ()
    ) -> tuple[Session, Claimed]:
        try:
            return await super().claim(trial_id, launcher, ttl_s, now=now, gone=gone)
        except NotFound:  # in the archive there is nothing to run
            return await self.session(trial_id), Claimed(TrialClaim(), granted=False, taken_over=False)

    async def begin_task_step(self, trial_id: str, name: str | None) -> None:
        try:
            await super().begin_task_step(trial_id, name)
        except NotFound:
            await self._check_not_archived(trial_id)
            raise

    async def list_sessions(
        self,
        *,
        status: str | None,
        group_id: str | None,
        since: float | None,
        until: float | None,
        cursor: str | None,
        limit: int,
        wanted: SessionFilter = EVERY_SESSION,
        newest_first: bool = False,
        most_looked: int | None = None,
    ) -> SessionListPage:
        after = position(cursor)
        walk = self._index.walk(
            status=status, group_id=group_id, since=since, until=until, after=after, newest_first=newest_first,
            batch=LINES_AT_ONCE if wanted.narrows else RECORDS_AT_ONCE,
        )  # fmt: skip
        return await self._lists.page(
            walk, after, status=status, group_id=group_id, wanted=wanted, limit=limit, most_looked=most_looked
        )

    async def due(self, *, now: float) -> AsyncGenerator[Session, None]:
        trial_ids = await self._index.due(now)
        for start in range(0, len(trial_ids), LOOKED_AT_ONCE):
            some = trial_ids[start : start + LOOKED_AT_ONCE]
            again: dict[str, float | None] = dict.fromkeys(some)
            over = []
            for session in await self._lists.readable(some):  # others: see `RedisIndex.due`
                if session.status == "open":
                    at = look_at(session, now)
                    if at <= now:
                        del again[session.trial_id]  # it stays due until somebody has ended it
                        over.append(session)
                    else:
                        again[session.trial_id] = at
            await self._index.look_again(again)
            for session in over:
                yield session

    async def _living(self, lives: Sequence[tuple[str, str]]) -> list[Session]:
        return await self._lists.sessions_at([ListPosition(float(life), trial_id) for trial_id, life in lives])

    async def _group_gone(self, group: Group) -> None:
        await self.runs.forget(group, self.clock())

    async def _group_back(self, record: bytes) -> None:
        """A group was made again while its earlier life was forgotten. Idempotent."""
        before = await self._run("once", [group_key(read_json(Group, record).group_id)], [record])
        await self.runs.open_group(read_json(Group, before or record))

    async def complete(
        self,
        trial_id: str,
        *,
        status: str,
        reward: float | None,
        end_reason: str,
        metrics: dict[str, float],
        now: float,
        final: bool = True,
        claim: int | None = None,
    ) -> Session:
        keys = trial_keys(trial_id)
        members = await self._index.announce([trial_id])
        posted = "" if reward is None else repr(float(reward))
        args = [status, posted, end_reason, to_json(metrics), repr(now), int(final), "" if claim is None else claim]
        reply = await self._run("complete", [keys.session, keys.doc, keys.events], args)
        if reply[0] != 1:
            await self._index.withdraw(members[trial_id])
            if reply[0] == MISSING:
                try:
                    await self._check_not_archived(trial_id)
                except InArchive as archived:
                    return await self._completed(trial_id, archived.place, status, reward)
            if reply[0] == CLAIMED:
                raise lost(trial_id, claim or 0, int(reply[1]))
            if reply[0] == OTHER:
                raise EndedOtherwise(trial_id, reply[1].decode(), float(reply[2]) if reply[2] else None)
            refuse(trial_id, reply[0])
        head = head_from_hash(pairs(reply[1]))
        session = session_of(trial_id, head, reply[2])
        if accountable(head.group, session.run_id):
            await self._index.publish(trial_id, head, found_by=facets_of(session))
            self._unsettled.setdefault(trial_id, []).append(members[trial_id])
        else:
            await self._index.publish(trial_id, head, members[trial_id], found_by=facets_of(session))
        return session

    async def add_marks(self, trial_id: str, marks: Sequence[str]) -> None:
        """If the session has ended, the change is announced first: lists find ended sessions by their marks."""
        if await self._marked(trial_id, marks, announced=False) is not None:
            return
        members = await self._index.announce([trial_id])
        found = await self._marked(trial_id, marks, announced=True)
        if isinstance(found, Session):
            await self._index.publish(trial_id, head_of(found), members[trial_id], found_by=facets_of(found))
        else:
            await self._index.withdraw(members[trial_id])

    async def _marked(self, trial_id: str, marks: Sequence[str], *, announced: bool) -> Session | bool | None:
        """The session, if it has ended; True, if it is open; None: it has ended, and has to be announced."""
        keys = trial_keys(trial_id)
        outcome, *found = await self._run("marks", [keys.session, keys.doc], [int(announced), *marks])
        if outcome < 0:
            refuse(trial_id, outcome)
        if found:
            return session_of(trial_id, head_from_hash(pairs(found[0])), found[1])
        return True if outcome else None

    async def _completed(self, trial_id: str, place: ArchivePlace, status: str, reward: float | None) -> Session:
        """The same values again change nothing, in the archive either."""
        session = await self._head(trial_id, place)
        if (session.status, session.reward) != (status, reward):
            raise EndedOtherwise(trial_id, session.status, session.reward, ", and is in the archive")
        return session

    async def settle(self, trial_id: str, *, now: float) -> None:
        members = self._unsettled.pop(
            trial_id, []
        )  # where it fails, the sweep settles what they announce, and withdraws them
        await self._accounts.settle(trial_id, now)
        for member in members:
            await self._index.withdraw(member)

    async def _came_late(self, trial_id: str, turn: Turn, now: float, recorded: Tokens | None = None) -> None:
        await self._accounts.came_late(trial_id, turn, now, recorded)

    async def delete(self, trial_id: str, *, now: float, tombstone_s: float) -> None:
        await self.departures.delete(trial_id, now=now, tombstone_s=tombstone_s)

    async def expire(self, *, now: float, retention_s: float) -> int:
        """Also finishes what crashes left undone (`sweep`)."""
        await self.sweep(now=now)
        return await self.departures.drop_ended(now=now, retention_s=retention_s)

    async def shelve(self, session: Session) -> None:
        await self._index.list_again(session)

    async def fullness(self) -> float | None:
        client, options = self._link.client, {}
        if self._link.cluster:
            options["target_nodes"] = type(client).PRIMARIES
        found = await self._link.call(client.info("memory", **options))
        nodes = found.values() if isinstance(next(iter(found.values()), None), dict) else [found]
        shares = [
            node["used_memory"] / most
            for node in nodes
            if (most := node.get("maxmemory") or node.get("total_system_memory"))
        ]
        return max(shares, default=None)

    def events(self, trial_id: str, *, after: str | None = None) -> AsyncGenerator[Event, None]:
        return self._events.of(trial_id, after=after)

    async def stats(self) -> dict[str, Any]:
        used = None
        if not self._link.cluster:
            used = (await self._link.call(self._link.client.info("memory")))["used_memory"]
        return {"backend": "redis", "sessions": await self._index.counts(), "used_bytes": used}

    async def sweep(self, *, now: float | None = None) -> int:
        """What crashed calls left undone: of sessions that have ended, in their runs; of all, in the index. Returns how many
        announcements it settled. `expire` does it too.

        Args: now: Unix seconds; None: by `clock` or by Redis's, whichever is behind."""
        return await self._index.sweep(self._settle_again, min(self.clock(), await self.now()) if now is None else now)

    async def _settle_again(self, trial_id: str, group_id: str | None) -> None:
        await self._accounts.settle(trial_id, self.clock())
        if group_id is not None:
            await self.departures.finish(trial_id, group_id)
