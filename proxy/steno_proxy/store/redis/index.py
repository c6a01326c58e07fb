"""The index of sessions in Redis: what lists show, by status and group, in order of creation.

It lives on another slot than the trials, so a trial and its place in the index cannot be written together. Hence three steps:

    1 announce   the trial goes on `pending` (index slot), with the time
    2 the write  register, complete, delete (trial's slot): the truth
    3 publish    the index is brought in line with what step 2 returned, and the announcement goes (index slot)

A crash between 1 and 2 leaves an announcement of nothing; between 2 and 3 a session that lists show late, or in its old
state (they read the truth before they show a session, so never wrongly). `sweep` ends both: whatever has been pending for longer
than any call may take is looked up and published. Any replica may run it at any time: publishing is idempotent, and
what was read earlier never undoes what was read later (publish.lua).

`timed` says when the sweep is to look at each open session, so that it reads only those whose time may be over. Releases before
it wrote no `timed`: what they left open is found by comparing two keys, at the start and every UNTIMED_EVERY_S.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

from steno.contracts.errors import StenoError, StoreUnavailable
from steno.contracts.lenient import read_json
from steno.contracts.records import Group, Session
from steno_proxy.store.encoding.head import Head, head_from_hash, session_of
from steno_proxy.store.facets import SessionFacets, SessionFilter, facets_of
from steno_proxy.store.redis.link.redis_link import RedisLink, Script
from steno_proxy.store.redis.schema import (
    ALL,
    DEAD,
    ENDED,
    FACETS,
    PENDING,
    STATUSES,
    TIMED,
    group_index_key,
    group_key,
    index_keys,
    status_key,
    trial_keys,
)
from steno_proxy.store.views import ListPosition

log = logging.getLogger(__name__)

GRACE_S = 30.0
"""How long an announcement is left alone: several times what a write may take (redis_link.CALL_TIMEOUT_S)."""
UNTIMED_EVERY_S = 600.0
_BATCH = 100


class RedisIndex:
    """The lists of sessions and groups, and what waits to be accounted for.

    Args: group_gone: is called when the last session of a group is gone, before its record goes. group_back: is called with that
        record where the group was made again meanwhile.
    """

    def __init__(
        self, link: RedisLink, clock: Callable[[], float], group_gone: Callable[[Group], Awaitable[None]],
        group_back: Callable[[bytes], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._link = link
        self._group_gone, self._group_back = group_gone, group_back
        self._clock = clock
        self._announce, self._publish, self._drop_same = Script("announce"), Script("publish"), Script("drop_same")
        self._untimed_at = -UNTIMED_EVERY_S

    async def announce(self, trial_ids: Iterable[str], group_id: str | None = None) -> dict[str, str]:
        """Step 1. Returns: for each trial the member of `pending` that its `publish` settles.

        Args: group_id: of a trial that goes: step 2 may leave nothing that says it.
        """
        named = "" if group_id is None else f"/{group_id}"
        members = {trial_id: f"{trial_id}/{secrets.token_hex(4)}{named}" for trial_id in trial_ids}
        await self._link.run(self._announce, [PENDING], [repr(self._clock()), *members.values()])
        return members

    async def publish(
        self,
        trial_id: str,
        head: Head | None,
        member: str = "",
        *,
        at: float = 0.0,
        until: float = 0.0,
        look_at: float | None = None,
        found_by: SessionFacets | None = None,
    ) -> None:
        """Step 3. Where the last session of a group is gone, its announcement goes after the group: a crash leaves both or none.

        Args: head: what step 2 left; None: nothing. at: when it was looked for, if there is nothing.
            until: when the tombstone expires, if there is one. look_at: when the sweep is to look at an open one first.
            found_by: of a session that lists show; None: as it was.
        """
        now = self._clock()
        created = head.created if head else at
        ended = "" if head is None or head.ended is None else repr(head.ended)
        status = head.status if head else "missing"
        gone = status in ("deleted", "missing")
        group = head.group if head else None
        if gone and group is None:
            group = _group_in(member)
        last = member if gone and group is not None else ""
        settles = "" if last else member
        args: list[str | bytes] = [trial_id, settles, status, repr(created), ended, repr(now), repr(until)]
        args += ["" if look_at is None else repr(look_at), b"" if found_by is None else found_by.line()]
        left = await self._link.run(self._publish, index_keys(group), args)
        if group is not None and left == 0:
            await self._let_go(group)
        if last:
            await self.withdraw(last)

    async def _let_go(self, group_id: str) -> None:
        """Forget a group that has no session any more. A `RedisStore.create_group` of this group at the same time may have found
        the record just before the run forgets the group. So it looks at the record once its sessions are listed, and this looks
        at the list once the record is gone: one of the two sees what the other did."""
        key = group_key(group_id)
        raw = await self._link.call(self._link.client.get(key))
        if raw is None:
            return
        await self._group_gone(read_json(Group, raw))
        if not await self.lists(group_id):
            await self._link.run(self._drop_same, [key], [raw])
        if await self.lists(group_id):
            await self._group_back(raw)

    async def lists(self, group_id: str) -> bool:
        """Whether any session of the group is listed."""
        return bool(await self._link.call(self._link.client.zcard(group_index_key(group_id))))

    async def withdraw(self, member: str) -> None:
        """Instead of step 3, when step 2 changed nothing."""
        await self._link.call(self._link.client.zrem(PENDING, member))

    async def settle(self, trial_id: str, member: str = "", *, at: float) -> None:
        """Publish what is on record of a trial now. `at`: when what is to be settled was noticed."""
        keys = trial_keys(trial_id)
        fields, doc, left_ms = await self._link.ask(
            ("HGETALL", keys.session), ("GET", keys.doc), ("PTTL", keys.session)
        )
        head = head_from_hash(fields) if fields else None
        found_by = None
        if head is not None and doc is not None and head.status != "deleted":
            with contextlib.suppress(ValueError):  # of another format: it is listed, and found by no filter
                found_by = facets_of(session_of(trial_id, head, doc))
        until = self._clock() + max(left_ms, 0) / 1000
        await self.publish(trial_id, head, member, at=at, until=until, found_by=found_by)

    async def sweep(self, before: Callable[[str, str | None], Awaitable[None]], now: float) -> int:
        """Finish what a crash left between the steps. Returns how many announcements it settled. One whose session can't be read,
        say, is logged and left for the next sweep.

        Args: before: what else is owed for a trial, to be done before its announcement goes; it is told the group of one that was
            about to go. now: Unix seconds, no later than the server's clock says: what is being written now is no leftover, and
            no tombstone that still stands is forgotten.
        """
        client, settled, left = self._link.client, 0, 0
        await self._link.call(client.zremrangebyscore(DEAD, "-inf", repr(now)))
        while True:
            bounds = {"byscore": True, "offset": left, "num": _BATCH, "withscores": True}
            due = await self._link.call(client.zrange(PENDING, "-inf", repr(now - GRACE_S), **bounds))
            for member, announced_at in due:
                trial_id = member.decode().partition("/")[0]
                try:
                    await before(trial_id, _group_in(member.decode()))
                    await self.settle(trial_id, member.decode(), at=announced_at)
                    settled += 1
                except StenoError:
                    raise
                except Exception as error:
                    left += 1
                    log.warning("can't settle trial %s: %s: %s", trial_id, type(error).__name__, error)
            if len(due) < _BATCH:
                return settled

    async def due(self, now: float) -> list[str]:
        """Trials that the sweep is to look at by now, soonest first. Open ones that it took out (`look_again`) though they are
        open, since it could not read them, come again UNTIMED_EVERY_S later."""
        client, since = self._link.client, self._clock()
        if since >= self._untimed_at + UNTIMED_EVERY_S:
            untimed = await self._link.call(client.zdiff([status_key("open"), TIMED]))
            for at in range(0, len(untimed), _BATCH):
                with contextlib.suppress(StoreUnavailable):  # as in `look_again`
                    await self._link.call(client.zadd(TIMED, dict.fromkeys(untimed[at : at + _BATCH], now), nx=True))
            self._untimed_at = since
        members = await self._link.call(client.zrange(TIMED, "-inf", repr(now), byscore=True))
        return [member.decode() for member in members]

    async def look_again(self, times: Mapping[str, float | None]) -> None:
        """When the sweep is to look at these trials next; None: never, they are not open any more."""
        client = self._link.client
        if later := {trial_id: at for trial_id, at in times.items() if at is not None}:
            # A full Redis refuses it: then the next sweep looks at them, too.
            with contextlib.suppress(StoreUnavailable):
                await self._link.call(client.zadd(TIMED, later, xx=True))
        if never := [trial_id for trial_id, at in times.items() if at is None]:
            await self._link.call(client.zrem(TIMED, *never))

    async def ended_before(self, cutoff: float, skip: int) -> list[tuple[str, float]]:
        """Some trials that ended at or before `cutoff`, and when, oldest first, after the first `skip`."""
        bounds = {"byscore": True, "offset": skip, "num": _BATCH, "withscores": True}
        members = await self._link.call(self._link.client.zrange(ENDED, "-inf", repr(cutoff), **bounds))
        return [(member.decode(), at) for member, at in members]

    async def others_here(self, group_id: str, trial_id: str) -> bool:
        """Whether a session of the group other than this one has not left for the archive yet."""
        key = group_index_key(group_id)
        opened, ended, *own = await self._link.ask(
            ("ZINTERCARD", 2, key, status_key("open"), "LIMIT", 1), ("ZINTERCARD", 2, key, ENDED, "LIMIT", 2),
            ("ZSCORE", key, trial_id), ("ZSCORE", ENDED, trial_id),
        )  # fmt: skip
        return bool(opened or ended > (None not in own))

    async def list_again(self, session: Session) -> None:
        """A session of the archive, in the lists of a Redis that does not know it."""
        client, trial = self._link.client, {session.trial_id: session.created_at}
        keys = [ALL, status_key(session.status)]
        if session.group_id is not None:
            keys.append(group_index_key(session.group_id))
        for key in keys:
            await self._link.call(client.zadd(key, trial, nx=True))
        await self._link.call(client.hsetnx(FACETS, session.trial_id, facets_of(session).line()))
        if await self._link.call(client.zscore(DEAD, session.trial_id)) is not None:  # deleted meanwhile
            for key in keys:
                await self._link.call(client.zrem(key, session.trial_id))
            await self._link.call(client.hdel(FACETS, session.trial_id))

    async def likely(self, places: Sequence[ListPosition], wanted: SessionFilter) -> list[int]:
        """Which of these places may be of sessions that are wanted: their numbers. What has no facets may be, as releases before
        them wrote none."""
        if not wanted.narrows or not places:
            return list(range(len(places)))
        [lines] = await self._link.ask(("HMGET", FACETS, *(place.trial_id for place in places)))
        return [number for number, line in enumerate(lines) if wanted.may_take(line)]

    async def counts(self) -> dict[str, int]:
        """Sessions by status."""
        return {status: await self._link.call(self._link.client.zcard(status_key(status))) for status in STATUSES}

    async def walk(
        self,
        *,
        status: str | None,
        group_id: str | None,
        since: float | None,
        until: float | None,
        after: ListPosition | None,
        newest_first: bool = False,
        batch: int = _BATCH,
    ) -> AsyncIterator[list[ListPosition]]:
        """Positions in order of creation, in batches, those after `after` in that order. A group's are of any status: the caller
        looks."""
        key = ALL if status is None else status_key(status)
        if group_id is not None:
            key = group_index_key(group_id)
        low = "-inf" if since is None else repr(since)
        high = "+inf" if until is None else f"({until!r}"
        start, ties = None, 0  # the creation time that the next batch begins at, and how many of it have been seen
        if after is not None:
            beyond = (
                until is not None and after.created >= until
                if newest_first
                else since is not None and after.created <= since
            )
            start = None if beyond else after.created
        while True:
            bounds = {"byscore": True, "offset": ties, "num": batch, "withscores": True, "desc": newest_first}
            ends = (
                (low, high if start is None else repr(start))
                if newest_first
                else (low if start is None else repr(start), high)
            )
            found = await self._link.call(
                self._link.client.zrange(key, *(reversed(ends) if newest_first else ends), **bounds)
            )
            places = [ListPosition(score, member.decode()) for member, score in found]
            yield [place for place in places if after is None or (place < after if newest_first else place > after)]
            if len(places) < batch:
                return
            # Go on from the last one's time, not by rank: sessions come and go meanwhile. Rank only counts among equals.
            last = places[-1].created
            ties = ties + batch if last == start else 0
            after = (min if newest_first else max)(places[-1], after or places[-1])
            start = last


def _group_in(member: str) -> str | None:
    """The group of a trial that goes, as it was announced (`announce`)."""
    return member.partition("/")[2].partition("/")[2] or None
