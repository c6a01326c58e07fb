"""Sessions in Redis (I3, I5, I7): one script per write, one round trip per commit and per tail. The schema is keys.py.

Durable to the degree the server is: `appendfsync always` keeps every acknowledged turn through a power failure, the usual
`everysec` all but the last second of it. Through a failover, where each write waits for a replica. A write that raised
StoreUnavailable may or may not have happened; each may be repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from proxy.contracts.errors import Conflict, NotFound
from proxy.contracts.later import read_json
from proxy.contracts.records import Group, Session, Turn
from proxy.pace import Pace
from proxy.store.base import Page
from proxy.store.groups import same_group, with_recorded_ids
from proxy.store.head import doc_of, head_from_hash, head_of, head_to_hash, run_of, session_of
from proxy.store.keys import TrialKeys, group_key, kept_key, trial_keys
from proxy.store.redis_accounts import RedisAccounts
from proxy.store.redis_index import RedisIndex
from proxy.store.redis_link import RedisLink
from proxy.store.redis_policies import RedisPolicies
from proxy.store.redis_recordings import CHUNK_TURNS, CLOSED, MISSING, NO_ROWS, OTHER, RedisRecordings, pairs, refuse
from proxy.store.redis_runs import RedisRuns
from proxy.store.redis_wait import Wait
from proxy.store.tally import accountable
from proxy.store.text import to_json
from proxy.store.views import END, Event, Position, end_event, position, turn_events, turns_seen

WATCH_BLOCK_MS = 5_000  # how long a watcher waits before it looks again by itself
WATCH_TTL_S = 60  # how long the stream outlives its last watcher
CREATED_AT_ONCE = 256
"""Sessions of a group; a batch takes as many commands."""


class RedisStore(RedisRecordings):
    """Keeps the `SessionStore` protocol. Any number of replicas may use one Redis.

    Args: url: see `read_redis_url`. wait: how many replicas must have what is written before it counts as written, and for how
        long that is waited for. clock: wall clock, Unix seconds; only announcements and tombstones in the index are timed by it.
    """

    def __init__(
        self, url: str, *, wait: Wait | None = None, clock: Callable[[], float] = time.time, pace: Pace | None = None,
        **link_options: Any,
    ) -> None:  # fmt: skip
        super().__init__(RedisLink(url, wait=wait, **link_options), pace)
        # Watchers hold a connection while they wait: theirs are others than the commits'.
        self._watch_link = RedisLink(
            url,
            max_connections=1024,
            reply_timeout_s=WATCH_BLOCK_MS / 1000 + 2,
            call_timeout_s=WATCH_BLOCK_MS / 1000 + 5,
        )
        self.runs = RedisRuns(self._link, self._watch_link, self._living, WATCH_BLOCK_MS)
        self._accounts = RedisAccounts(self._link, self.runs)
        self._index = RedisIndex(self._link, clock, self._group_gone)
        self._watchers = 0
        self._unsettled: dict[str, list[str]] = {}  # announcements of ends that `settle` is to follow
        self._clock = clock
        self.waited_replicas = wait.replicas if wait else 0
        self.policies = RedisPolicies(self._link)

    async def open(self) -> None:
        await self.ping()

    async def close(self) -> None:
        await self.runs.close()
        await self._link.close()
        await self._watch_link.close()

    async def ping(self) -> None:
        await self._link.ping()

    async def now(self) -> float:
        seconds, micros = await self._link.call(self._link.client.time())
        return float(seconds) + float(micros) / 1e6

    async def keep(self, name: str, value: bytes) -> bytes:
        before: bytes | None = await self._run("once", [kept_key(name)], [value])
        return value if before is None else before

    # -- groups and sessions

    async def create_group(self, group: Group, sessions: Sequence[Session]) -> Group:
        written = group.model_dump_json().encode()
        before = await self._run("once", [group_key(group.group_id)], [written])
        if before is not None:
            recorded = read_json(Group, before)
            same_group(recorded, group)
            group, sessions = recorded, with_recorded_ids(recorded, sessions)
        await self.runs.open_group(group)
        members = await self._index.announce([session.trial_id for session in sessions])
        for at in range(0, len(sessions), CREATED_AT_ONCE):  # not all in one turn of the event loop
            some = sessions[at : at + CREATED_AT_ONCE]
            await asyncio.gather(*(self._create(session, members[session.trial_id]) for session in some))
        return group

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
        await self._index.publish(session.trial_id, head, member)
        return session_of(session.trial_id, head, doc)

    async def session(self, trial_id: str) -> Session:
        return (await self.tail(trial_id, NO_ROWS)).session

    async def list_sessions(
        self,
        *,
        status: str | None,
        group_id: str | None,
        since: float | None,
        until: float | None,
        cursor: str | None,
        limit: int,
    ) -> Page:
        found: list[Session] = []
        last = position(cursor)
        walk = self._index.walk(status=status, group_id=group_id, since=since, until=until, after=last)
        async for places in walk:
            for start in range(0, len(places), limit + 1):
                for session in await self._sessions_at(places[start : start + limit + 1]):
                    if status not in (None, session.status) or group_id not in (None, session.group_id):
                        continue
                    if len(found) == limit:
                        return Page(found, Position(found[-1].created_at, found[-1].trial_id).cursor())
                    found.append(session)
        return Page(found, None)

    async def _sessions_at(self, places: Sequence[Position]) -> list[Session]:
        """The sessions that the index has at these places; those that are gone, or live again elsewhere, left out."""
        if not places:
            return []
        pipe = self._link.client.pipeline(transaction=False)
        for place in places:
            keys = trial_keys(place.trial_id)
            pipe.hgetall(keys.session)
            pipe.get(keys.doc)
        replies = await self._link.call(pipe.execute())
        sessions = []
        for place, fields, doc in zip(places, replies[::2], replies[1::2], strict=True):
            if doc is not None and fields and fields[b"status"] != b"deleted":
                session = session_of(place.trial_id, head_from_hash(fields), doc)
                if session.created_at == place.created:
                    sessions.append(session)
        return sessions

    async def _living(self, lives: Sequence[tuple[str, str]]) -> list[Session]:
        return await self._sessions_at([Position(float(life), trial_id) for trial_id, life in lives])

    async def _group_gone(self, group: Group) -> None:
        await self.runs.forget(group, self._clock())

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
    ) -> Session:
        keys = trial_keys(trial_id)
        members = await self._index.announce([trial_id])
        posted = "" if reward is None else repr(float(reward))
        args = [status, posted, end_reason, to_json(metrics), repr(now), int(final)]
        reply = await self._run("complete", [keys.session, keys.doc, keys.events], args)
        if reply[0] != 1:
            await self._index.withdraw(members[trial_id])
            if reply[0] == OTHER:
                raise Conflict(f"session {trial_id} has ended with another status or reward")
            refuse(trial_id, reply[0])
        head = head_from_hash(pairs(reply[1]))
        if accountable(head.group, run_of(reply[2])):
            await self._index.publish(trial_id, head)
            self._unsettled.setdefault(trial_id, []).append(members[trial_id])
        else:
            await self._index.publish(trial_id, head, members[trial_id])
        return session_of(trial_id, head, reply[2])

    async def settle(self, trial_id: str, *, now: float) -> None:
        await self._accounts.settle(trial_id, now)
        for member in self._unsettled.pop(trial_id, []):
            await self._index.withdraw(member)

    async def _came_late(self, trial_id: str, turn: Turn, now: float) -> None:
        await self._accounts.came_late(trial_id, turn, now)

    async def delete(self, trial_id: str, *, now: float, tombstone_s: float) -> None:
        keys = trial_keys(trial_id)
        group, doc = await self._link.ask(("HGET", keys.session, "group"), ("GET", keys.doc))
        owed = doc is None or accountable(group and group.decode(), run_of(doc))
        members = await self._index.announce([trial_id])
        tombstone_ms = max(1, round(tombstone_s * 1000))
        reply = await self._run("delete", keys, [tombstone_ms, "", repr(now), int(owed)])
        if reply[0] == 1:
            head = head_from_hash(pairs(reply[1]))
            head.status = "deleted"
            await self._accounts.settle(trial_id, now)
            await self._index.publish(trial_id, head, members[trial_id], until=self._clock() + tombstone_s)
        else:
            # Deleted already, perhaps by a call that was cut short: what it left is not kept for a sweep.
            if reply[0] != MISSING:
                await self._accounts.settle(trial_id, now)
            await self._index.withdraw(members[trial_id])
            if reply[0] == MISSING:
                refuse(trial_id, MISSING)

    async def expire(self, *, now: float, retention_s: float) -> int:
        """Also finishes what crashes left undone (`sweep`)."""
        await self.sweep()
        dropped, kept, cutoff, seen = 0, 0, now - retention_s, set[str]()
        while trials := [trial for trial in await self._index.ended_before(cutoff, kept) if trial not in seen]:
            seen.update(trials)
            gone = [await self._drop(trial_id, cutoff, now) for trial_id in trials]
            dropped += sum(gone)
            kept += len(gone) - sum(gone)
        return dropped

    async def _drop(self, trial_id: str, cutoff: float, now: float) -> bool:
        """Drop a session that the index believes to be past its retention. False: it is not, or its group is not done with it."""
        found = await self._accounts.settle(trial_id, now)
        group = found.head.group if found is not None and found.head.status != "deleted" else None
        if found is not None and group is not None and not await self.runs.lets_go(found.run_id, group, now):
            return False
        args = [0, repr(cutoff), repr(now), int(found is not None)]
        reply = await self._run("delete", trial_keys(trial_id), args)
        if reply[0] != 1:
            await self._index.settle(trial_id, at=self._clock())
            return False
        head = head_from_hash(pairs(reply[1]))
        head.status = "missing"
        await self._index.publish(trial_id, head)
        return True

    # -- what watchers see

    async def events(self, trial_id: str, *, after: str | None = None) -> AsyncGenerator[Event, None]:
        """A lost wake-up delays an event by WATCH_BLOCK_MS at most: events are read from the record, not from the stream."""
        keys = trial_keys(trial_id)
        await self.session(trial_id)
        if after == END:
            return
        self._watchers += 1
        try:
            async for event in self._happening(keys, turns_seen(after)):
                yield event
        finally:
            self._watchers -= 1
            if not self._watchers:
                await self._watch_link.rest()

    async def _happening(self, keys: TrialKeys, seen: int) -> AsyncGenerator[Event, None]:
        watched = [keys.events, keys.session, keys.turns]
        while True:
            wake, fields, entries = await self._run("watch", watched, [seen, WATCH_TTL_S, CHUNK_TURNS], writes=False)
            head = head_from_hash(pairs(fields)) if fields else None
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
                self._watch_link.client.xread({keys.events: wake}, count=1, block=WATCH_BLOCK_MS)
            )

    async def stats(self) -> dict[str, Any]:
        used = None
        if not self._link.cluster:
            used = (await self._link.call(self._link.client.info("memory")))["used_memory"]
        return {"backend": "redis", "sessions": await self._index.counts(), "used_bytes": used}

    async def sweep(self) -> int:
        """What crashed calls left undone: of sessions that have ended, in their runs; of all, in the index. Returns how many
        announcements it settled. `expire` does it too."""
        return await self._index.sweep(self._settle_again)

    async def _settle_again(self, trial_id: str) -> None:
        await self._accounts.settle(trial_id, self._clock())
