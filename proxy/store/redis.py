"""Sessions in Redis (I3, I5, I7): one script per write, one round trip per commit and per tail. The schema is keys.py.

Durable to the degree the server is: `appendfsync always` keeps every acknowledged turn through a power failure, the usual
`everysec` all but the last second of it. A write that raised StoreUnavailable may or may not have happened; each may be repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NoReturn

from proxy.contracts.errors import Conflict, Gone, NotFound
from proxy.contracts.records import Group, IndexRow, Session, Turn
from proxy.store.base import Page, Path, Tail
from proxy.store.codec import EncodedTurn, decode_entry, decode_row, decode_turn, encode_turn, pack_id, path_ids
from proxy.store.groups import same_group, with_recorded_ids
from proxy.store.head import Head, doc_of, head_from_hash, head_of, head_to_hash, session_of
from proxy.store.keys import TrialKeys, group_key, trial_keys
from proxy.store.known import KnownTexts
from proxy.store.redis_index import RedisIndex
from proxy.store.redis_link import RedisLink, Script
from proxy.store.text import pack, to_json, unpack
from proxy.store.views import END, Event, Position, end_event, position, turn_events, turns_seen

MISSING, CLOSED, RESEND, OTHER = -1, -2, -3, -4
"""Outcomes of the scripts, as in their headings."""
CHUNK_TURNS = 64  # turns read at once: a long session must not hold up the server, nor arrive whole
WATCH_BLOCK_MS = 5_000  # how long a watcher waits before it looks again by itself
WATCH_TTL_S = 60  # how long the stream outlives its last watcher


class RedisStore:
    """Keeps the `SessionStore` protocol. Any number of replicas may use one Redis.

    Args: url: see RedisLink. clock: wall clock, Unix seconds; only announcements and tombstones in the index are timed by it.
    """

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time, **link_options: Any) -> None:
        self._link = RedisLink(url, **link_options)
        # Watchers hold a connection while they wait: theirs are others than the commits'.
        self._watch_link = RedisLink(
            url,
            max_connections=1024,
            reply_timeout_s=WATCH_BLOCK_MS / 1000 + 2,
            call_timeout_s=WATCH_BLOCK_MS / 1000 + 5,
        )
        self._index = RedisIndex(self._link, clock)
        self._clock = clock
        self._known = KnownTexts()
        self._scripts = {
            name: Script(name) for name in ("commit", "register", "complete", "delete", "delivered", "marks", "watch")
        }

    async def open(self) -> None:
        await self.ping()

    async def close(self) -> None:
        await self._link.close()
        await self._watch_link.close()

    async def ping(self) -> None:
        await self._link.call(self._link.client.ping())

    async def _run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await self._link.run(self._scripts[name], keys, args)

    # -- groups and sessions

    async def create_group(self, group: Group, sessions: Sequence[Session]) -> Group:
        written = group.model_dump_json().encode()
        before = await self._link.call(self._link.client.set(group_key(group.group_id), written, nx=True, get=True))
        if before is not None:
            recorded = Group.model_validate_json(before)
            same_group(recorded, group)
            group, sessions = recorded, with_recorded_ids(recorded, sessions)
        members = await self._index.announce([session.trial_id for session in sessions])
        await asyncio.gather(*(self._create(session, members[session.trial_id]) for session in sessions))
        return group

    async def group(self, group_id: str) -> Group:
        raw = await self._link.call(self._link.client.get(group_key(group_id)))
        if raw is None:
            raise NotFound(f"no group {group_id}")
        return Group.model_validate_json(raw)

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
            _refuse(session.trial_id, CLOSED)
        if reply[0] == 0:
            head, doc = head_from_hash(_pairs(reply[1])), reply[2]
        await self._index.publish(session.trial_id, head, member)
        return session_of(session.trial_id, head, doc)

    async def session(self, trial_id: str) -> Session:
        return (await self.tail(trial_id, _NO_ROWS)).session

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
            for session in await self._sessions_at(places):
                if len(found) == limit:
                    return Page(found, Position(found[-1].created_at, found[-1].trial_id).cursor())
                if status in (None, session.status) and group_id in (None, session.group_id):
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
            if doc is not None and fields:
                session = session_of(place.trial_id, head_from_hash(fields), doc)
                if session.created_at == place.created:
                    sessions.append(session)
        return sessions

    async def complete(
        self,
        trial_id: str,
        *,
        status: str,
        reward: float | None,
        end_reason: str,
        metrics: dict[str, float],
        now: float,
    ) -> Session:
        keys = trial_keys(trial_id)
        members = await self._index.announce([trial_id])
        posted = "" if reward is None else repr(float(reward))
        args = [status, posted, end_reason, to_json(metrics), repr(now)]
        reply = await self._run("complete", [keys.session, keys.doc, keys.events], args)
        if reply[0] != 1:
            await self._index.withdraw(members[trial_id])
            if reply[0] == OTHER:
                raise Conflict(f"session {trial_id} has ended with another status or reward")
            _refuse(trial_id, reply[0])
        head = head_from_hash(_pairs(reply[1]))
        await self._index.publish(trial_id, head, members[trial_id])
        return session_of(trial_id, head, reply[2])

    async def delete(self, trial_id: str, *, now: float, tombstone_s: float) -> None:
        members = await self._index.announce([trial_id])
        tombstone_ms = max(1, round(tombstone_s * 1000))
        reply = await self._run("delete", trial_keys(trial_id), [tombstone_ms, "", repr(now)])
        if reply[0] == 1:
            head = head_from_hash(_pairs(reply[1]))
            head.status = "deleted"
            await self._index.publish(trial_id, head, members[trial_id], until=self._clock() + tombstone_s)
        else:
            await self._index.withdraw(members[trial_id])
            if reply[0] == MISSING:
                _refuse(trial_id, MISSING)

    async def expire(self, *, now: float, retention_s: float) -> int:
        """Also finishes what crashes left undone in the index (`RedisIndex.sweep`)."""
        await self._index.sweep()
        dropped, cutoff, seen = 0, now - retention_s, set[str]()
        while trials := [trial for trial in await self._index.ended_before(cutoff) if trial not in seen]:
            seen.update(trials)
            for trial_id in trials:
                reply = await self._run("delete", trial_keys(trial_id), [0, repr(cutoff), repr(now)])
                if reply[0] == 1:
                    dropped += 1
                    head = head_from_hash(_pairs(reply[1]))
                    head.status = "missing"
                    await self._index.publish(trial_id, head)
                else:
                    await self._index.settle(trial_id, at=self._clock())
        return dropped

    # -- the recording

    async def tail(self, trial_id: str, start: int) -> Tail:
        keys = trial_keys(trial_id)
        pipe = self._link.client.pipeline(transaction=False)
        pipe.hgetall(keys.session)
        pipe.get(keys.doc)
        if start != _NO_ROWS:
            pipe.lrange(keys.turns, start, -1)
        fields, doc, *rows = await self._link.call(pipe.execute())
        head = _alive(trial_id, fields, doc)
        return Tail(session_of(trial_id, head, doc), [decode_row(raw) for raw in rows[0]] if rows else [])

    async def path(self, trial_id: str, numbers: Sequence[int]) -> Path:
        if not numbers:
            return Path(b"", {})
        keys = trial_keys(trial_id)
        pipe = self._link.client.pipeline(transaction=False)
        for first, last in _runs(numbers):
            pipe.lrange(keys.ids, first, last)
        pipe.lindex(keys.turns, numbers[-1])
        *runs, entry = await self._link.call(pipe.execute())
        elements = [element for run in runs for element in run]
        if entry is None or len(elements) != len(numbers):
            await self.session(trial_id)
            raise NotFound(f"session {trial_id} has no turns {list(numbers)}")
        reply_at = decode_entry(entry).refs[-1]
        packed = await self._link.call(self._link.client.lindex(keys.texts, reply_at))
        if packed is None:
            _refuse(trial_id, CLOSED)
        return Path(path_ids(elements), unpack(packed))

    async def commit(self, trial_id: str, turn: Turn, row: IndexRow, *, now: float) -> int:
        encoded = encode_turn(turn, row)
        keys = trial_keys(trial_id)
        reply = await self._run("commit", keys, _commit_args(encoded, self._known.packed(trial_id, encoded), now))
        if reply[0] == RESEND:
            everything = [pack(text.raw) for text in encoded.texts]
            reply = await self._run("commit", keys, _commit_args(encoded, everything, now))
        number: int = reply[0]
        if number < 0:
            _refuse(trial_id, number)
        self._known.add(trial_id, encoded)
        turn.index = number
        return number

    async def mark_delivered(self, trial_id: str, turn_id: str, delivered: int) -> None:
        await self._run("delivered", [trial_keys(trial_id).numbers], [pack_id(turn_id), delivered])

    async def add_marks(self, trial_id: str, marks: Sequence[str]) -> None:
        outcome = await self._run("marks", [trial_keys(trial_id).session], list(marks))
        if outcome != 1:
            _refuse(trial_id, outcome)

    async def turns(self, trial_id: str, *, start: int = 0, limit: int | None = None) -> list[Turn]:
        await self.session(trial_id)
        turns: list[Turn] = []
        while limit is None or len(turns) < limit:
            wanted = CHUNK_TURNS if limit is None else min(CHUNK_TURNS, limit - len(turns))
            chunk = await self._chunk(trial_id, trial_keys(trial_id), start + len(turns), wanted)
            turns += chunk
            if len(chunk) < wanted:
                break
        return turns

    async def _chunk(self, trial_id: str, keys: TrialKeys, start: int, count: int) -> list[Turn]:
        pipe = self._link.client.pipeline(transaction=False)
        for key in (keys.turns, keys.ids, keys.logprobs):
            pipe.lrange(key, start, start + count - 1)
        raw, ids, logprobs = await self._link.call(pipe.execute())
        if not raw:
            return []
        entries = [decode_entry(element) for element in raw]
        positions = sorted({ref for entry in entries for ref in entry.refs})
        pipe = self._link.client.pipeline(transaction=False)
        pipe.hmget(keys.numbers, [pack_id(entry.row.turn_id) for entry in entries])
        for first, last in _runs(positions):
            pipe.lrange(keys.texts, first, last)
        numbers, *runs = await self._link.call(pipe.execute())
        packed = [element for run in runs for element in run]
        if len(packed) != len(positions) or not len(raw) == len(ids) == len(logprobs):
            _refuse(trial_id, CLOSED)
        texts = dict(zip(positions, packed, strict=True))
        return [
            decode_turn(start + i, entry, ids[i], logprobs[i], lambda at: unpack(texts[at]), _delivered(numbers[i]))
            for i, entry in enumerate(entries)
        ]

    # -- what watchers see

    async def events(self, trial_id: str, *, after: str | None = None) -> AsyncIterator[Event]:
        """A lost wake-up delays an event by WATCH_BLOCK_MS at most: events are read from the record, not from the stream."""
        keys = trial_keys(trial_id)
        await self.session(trial_id)
        if after == END:
            return
        seen = turns_seen(after)
        watched = [keys.events, keys.session, keys.turns]
        while True:
            wake, fields, entries = await self._run("watch", watched, [seen, WATCH_TTL_S, CHUNK_TURNS])
            for event in turn_events(seen, entries):
                yield event
            seen += len(entries)
            if len(entries) == CHUNK_TURNS:
                continue
            head = head_from_hash(_pairs(fields)) if fields else None
            if head is None or head.status != "open":
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
        """See RedisIndex.sweep; `expire` does it too."""
        return await self._index.sweep()


_NO_ROWS = -1


def _commit_args(encoded: EncodedTurn, packed: Sequence[bytes], now: float) -> list[Any]:
    args: list[Any] = [
        pack_id(encoded.turn_id), b"1" if encoded.partial else b"0", encoded.row, encoded.meta, encoded.ids, encoded.logprobs,
        encoded.new_prompt_tokens, encoded.completion_tokens, encoded.constrained_tokens, b"1" if encoded.fork else b"0",
        repr(encoded.began_at), repr(now),
    ]  # fmt: skip
    for text, rest in zip(encoded.texts, packed, strict=True):
        args += (text.digest, rest)
    args[-2] = b""  # the reply: its own, never looked up
    return args


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """HGETALL as a script returns it."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as inclusive ranges, in the order given."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _delivered(known: bytes | None) -> int | None:
    _, marked, count = (known or b"").partition(b":")
    return int(count) if marked else None


def _alive(trial_id: str, fields: dict[bytes, bytes], doc: bytes | None) -> Head:
    if not fields:
        _refuse(trial_id, MISSING)
    if doc is None or fields[b"status"] == b"deleted":
        _refuse(trial_id, CLOSED)
    return head_from_hash(fields)


def _refuse(trial_id: str, outcome: int) -> NoReturn:
    """What a script's refusal means to the caller."""
    if outcome == MISSING:
        raise NotFound(f"no session {trial_id}")
    raise Gone(f"session {trial_id} is closed")
