"""How sessions leave Redis: deleted, past their retention, or for the archive, each counted in its run before (`accounts.py`)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from steno.contracts.errors import StenoError
from steno.contracts.lenient import read_json
from steno.contracts.records import Group, Session
from steno_proxy.store.encoding.head import Head, head_from_hash, head_of, run_of
from steno_proxy.store.places import ArchivePlace, ArchiveReader
from steno_proxy.store.redis.accounts import RedisAccounts
from steno_proxy.store.redis.archive import RedisArchive
from steno_proxy.store.redis.index import RedisIndex
from steno_proxy.store.redis.link.redis_link import RedisLink, Script
from steno_proxy.store.redis.recordings import MISSING, pairs, refuse
from steno_proxy.store.redis.runs import RedisRuns
from steno_proxy.store.redis.schema import group_key, side_keys, trial_keys
from steno_proxy.store.runs.decisions import holds
from steno_proxy.store.runs.settlement import BOOKED, accountable

log = logging.getLogger(__name__)


class RedisDepartures:
    """Takes sessions out of Redis, and out of the index where nobody is to find them any more."""

    def __init__(
        self, link: RedisLink, index: RedisIndex, archive: RedisArchive, shelf: ArchiveReader, accounts: RedisAccounts,
        runs: RedisRuns, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._link = link
        self._index = index
        self._archive = archive
        self._shelf = shelf
        self._accounts = accounts
        self._runs = runs
        self._clock = clock
        self._seal, self._delete = Script("seal"), Script("delete")

    async def delete(self, trial_id: str, *, now: float, tombstone_s: float) -> None:
        keys = trial_keys(trial_id)
        if place := (await self._archive.places([trial_id])).get(trial_id):
            await self._delete_archived(trial_id, place, now=now, tombstone_s=tombstone_s)
        group, doc = await self._link.ask(("HGET", keys.session, "group"), ("GET", keys.doc))
        owed = doc is None or accountable(group and group.decode(), run_of(doc))
        members = await self._index.announce([trial_id], group and group.decode())
        tombstone_ms = max(1, round(tombstone_s * 1000))
        reply = await self._link.run(
            self._delete, [*keys, *side_keys(trial_id)], [tombstone_ms, "", repr(now), int(owed)]
        )
        if reply[0] == 1:
            head = head_from_hash(pairs(reply[1]))
            head.status = "deleted"
            await self._accounts.settle(trial_id, now)
            await self._index.publish(trial_id, head, members[trial_id], until=self._clock() + tombstone_s)
        elif reply[0] != MISSING:
            # Deleted already, perhaps by a call that was cut short, or by this one, where its reply was lost: what it left is
            # not kept for a sweep.
            await self._accounts.settle(trial_id, now)
            await self._index.settle(trial_id, members[trial_id], at=self._clock())
        else:
            await self._index.withdraw(members[trial_id])
            place = (await self._archive.places([trial_id])).get(trial_id)
            if place is None:
                refuse(trial_id, MISSING)
            else:  # it has left meanwhile
                await self._delete_archived(trial_id, place, now=now, tombstone_s=tombstone_s)

    async def _delete_archived(self, trial_id: str, place: ArchivePlace, *, now: float, tombstone_s: float) -> None:
        """Delete an archived session: it can't be found any more, and the next round of the archiver overwrites its bytes."""
        [found] = await self._shelf.heads([(trial_id, place)])
        session = found if isinstance(found, Session) else None  # also one that can't be read may be deleted
        [member] = (await self._index.announce([trial_id], session.group_id if session else None)).values()
        await self._archive.forget(trial_id)
        created = session.created_at if session else now
        await self._archive.bury(trial_id, created, now=now, tombstone_ms=max(1, round(tombstone_s * 1000)))
        head = head_of(session) if session else Head(created=created, updated=now)
        head.status = "deleted"
        await self._index.publish(trial_id, head, member, until=self._clock() + tombstone_s)

    async def leaving(self, cutoff: float, skip: int) -> list[tuple[str, float]]:
        """Some sessions that ended at or before `cutoff`, and when, oldest first, after the first `skip`."""
        return await self._index.ended_before(cutoff, skip)

    async def held(self, trials: Sequence[tuple[str, float]], retained: float) -> set[str]:
        """The trials, of these, that may not leave yet: often nearly all. They are found by a few reads for all trials together;
        the caller then looks at each of the others (`prepare`, `drop_ended`), also at those that can't be read.

        Args: trials: each with when it ended. retained: a trial that ended at or before this waits neither for its group to end
            nor for its reward.
        """
        if not trials:
            return set()
        fields = await self._link.ask(*(("HGETALL", trial_keys(trial_id).session) for trial_id, _ in trials))
        held: set[str] = set()
        booked: dict[str, list[tuple[str, bool]]] = {}  # by group, and whether each is past its retention
        for (trial_id, ended_at), found in zip(trials, fields, strict=True):
            head, past = _head(found), ended_at <= retained
            if head is not None and head.awaits_reward and not past:
                held.add(trial_id)
            elif head is not None and head.group is not None and head.sealed == BOOKED and head.status != "deleted":
                booked.setdefault(head.group, []).append((trial_id, past))
        by_run: dict[str | None, list[str]] = {}
        for group, run_id in (await self._runs_of({name: some[0][0] for name, some in booked.items()})).items():
            by_run.setdefault(run_id, []).append(group)
        for run_id, groups in by_run.items():
            for group, status in (await self._runs.states(run_id, groups)).items():
                held.update(trial_id for trial_id, past in booked[group] if holds(status, serve=past))
        return held

    async def _runs_of(self, trials: dict[str, str]) -> dict[str, str | None]:
        """The runs of some groups, by a trial of each."""
        if not trials:
            return {}
        docs = await self._link.ask(*(("GET", trial_keys(trial_id).doc) for trial_id in trials.values()))
        found: dict[str, str | None] = {}
        for group, doc in zip(trials, docs, strict=True):
            with contextlib.suppress(Exception):  # who looks at its trials one by one says why
                if doc is not None:
                    found[group] = run_of(doc)
        return found

    async def prepare(self, trial_id: str, now: float, *, early: bool = False) -> str:
        """An ended session is to leave for the archive: it takes no turn from here on. Returns the digest of its state; "": it
        may not leave, or not yet.

        Args: early: it is not past its retention, and stays while its group runs.
        """
        found = await self._accounts.settle(trial_id, now)
        if found is not None and (group := found.head.group) is not None:
            gone = await self._runs.lets_go(found.run_id, group, now, serve=not early)
            if not gone:
                return ""
        await self._link.run(self._seal, trial_keys(trial_id)[:2], [])
        state = await self._archive.state(trial_id)
        if not state:
            await self._look_again(trial_id)
        return state

    async def _look_again(self, trial_id: str) -> None:
        """Correct the index, which is behind: the session has gone, say, and the call that removed it was cut short."""
        place = None
        if await self._archive.status(trial_id) is None:
            place = (await self._archive.places([trial_id])).get(trial_id)
        if place is None:
            await self._index.settle(trial_id, at=self._clock())
            return
        [found] = await self._shelf.heads([(trial_id, place)])
        if isinstance(found, Session):
            await self._end(trial_id, found.group_id)
        else:
            log.warning("session %s has left for the archive, and can't be read there: %s", trial_id, found.message)
            await self._index.settle(trial_id, at=self._clock())  # its announcement says which group it was of

    async def _end(self, trial_id: str, group_id: str | None, member: str = "") -> None:
        """A session is in the archive alone. If it is the last of its group here, its run lets go of the group first: as long as
        `ended` has the session, a round that comes after a crash does it again, and so does whoever settles `member`."""
        if group_id is not None:
            await self._let_go(trial_id, group_id)
        await self._index.settle(trial_id, member, at=self._clock())

    async def _let_go(self, trial_id: str, group_id: str) -> None:
        if not await self._index.others_here(group_id, trial_id):
            raw = await self._link.call(self._link.client.get(group_key(group_id)))
            if raw is not None:
                await self._runs.forget(read_json(Group, raw), self._clock(), archived=True)

    async def finish(self, trial_id: str, group_id: str) -> None:
        """What a crash may have left undone of a session that was about to go: if it has left for the archive, its group may be
        without any here. Idempotent."""
        if await self._archive.status(trial_id) is None and await self._archive.places([trial_id]):
            await self._let_go(trial_id, group_id)

    async def left(self, trial_id: str, group_id: str | None, state: str) -> bool:
        """The session's place is known: it leaves Redis. False: it has changed since `prepare`, and stays, or was deleted."""
        member = ""
        if group_id is not None:  # which nothing in Redis says once it has left
            [member] = (await self._index.announce([trial_id], group_id)).values()
        if not await self._archive.leave(trial_id, state):
            if await self._archive.status(trial_id) == "deleted":
                await self._archive.forget(trial_id)
            if member:
                await self._index.withdraw(member)
            return False
        await self._end(trial_id, group_id, member)
        return True

    async def drop_ended(self, *, now: float, retention_s: float) -> int:
        """Drop sessions that ended so long ago. Returns how many. One that can't be read, say, is logged and stays."""
        dropped, kept, cutoff, seen = 0, 0, now - retention_s, set[str]()
        while trials := [one for one in await self._index.ended_before(cutoff, kept) if one[0] not in seen]:
            seen.update(trial_id for trial_id, _ in trials)
            held = await self.held(trials, cutoff)
            gone = sum([await self._dropped(trial_id, cutoff, now) for trial_id, _ in trials if trial_id not in held])
            dropped += gone
            kept += len(trials) - gone
        return dropped

    async def _dropped(self, trial_id: str, cutoff: float, now: float) -> bool:
        try:
            return await self._drop(trial_id, cutoff, now)
        except StenoError:
            raise
        except Exception as error:
            log.warning("can't drop trial %s: %s: %s", trial_id, type(error).__name__, error)
            return False

    async def _drop(self, trial_id: str, cutoff: float, now: float) -> bool:
        """Drop a session that the index believes to be past its retention. False: it is not, or its group is not done with it."""
        found = await self._accounts.settle(trial_id, now)
        group = found.head.group if found is not None else None
        if found is not None and group is not None and found.head.status != "deleted":
            gone = await self._runs.lets_go(found.run_id, group, now)
            if not gone:
                return False
        [member] = (await self._index.announce([trial_id], group)).values()
        args = [0, repr(cutoff), repr(now), int(found is not None)]
        reply = await self._link.run(self._delete, [*trial_keys(trial_id), *side_keys(trial_id)], args)
        if reply[0] != 1:
            await self._index.settle(trial_id, member, at=self._clock())
            return False
        head = head_from_hash(pairs(reply[1]))
        head.status = "missing"
        await self._index.publish(trial_id, head, member)
        return True


def _head(fields: dict[bytes, bytes]) -> Head | None:
    """None: there is no session, or it can't be read."""
    try:
        return head_from_hash(fields) if fields else None
    except Exception:  # who looks at it by itself says why
        return None
