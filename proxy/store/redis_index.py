"""The index of sessions in Redis: what lists show, by status and group, in order of creation.

It lives on another slot than the trials, so a trial and its place in the index cannot be written together. Hence three steps:

    1 announce   the trial goes on `pending` (index slot), with the time
    2 the write  register, complete, delete (trial's slot): the truth
    3 publish    the index is brought in line with what step 2 returned, and the announcement goes (index slot)

A crash between 1 and 2 leaves an announcement of nothing; between 2 and 3 a session that lists show late, or in its old
state (they read the truth before they show a session, so never wrongly). `sweep` ends both: whatever has been pending for longer
than any call may take is looked up and published. Any replica may run it at any time: publishing is idempotent, and
what was read earlier never undoes what was read later (publish.lua).
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from proxy.contracts.later import read_json
from proxy.contracts.records import Group
from proxy.store.head import Head, head_from_hash
from proxy.store.keys import (
    ALL,
    DEAD,
    ENDED,
    PENDING,
    STATUSES,
    group_index_key,
    group_key,
    index_keys,
    status_key,
    trial_keys,
)
from proxy.store.redis_link import RedisLink, Script
from proxy.store.views import Position

GRACE_S = 30.0
"""How long an announcement is left alone: several times what a write may take (redis_link.CALL_TIMEOUT_S), and clocks differ."""
_BATCH = 100


class RedisIndex:
    """Args: group_gone: is called when the last session of a group is gone, and its record with it."""

    def __init__(
        self, link: RedisLink, clock: Callable[[], float], group_gone: Callable[[Group], Awaitable[None]]
    ) -> None:
        self._link = link
        self._group_gone = group_gone
        self._clock = clock
        self._publish = Script("publish")

    async def announce(self, trial_ids: Iterable[str]) -> dict[str, str]:
        """Step 1. Returns: for each trial the member of `pending` that its `publish` settles."""
        members = {trial_id: f"{trial_id}/{secrets.token_hex(4)}" for trial_id in trial_ids}
        now = repr(self._clock())
        scored = [part for member in members.values() for part in (now, member)]
        await self._link.write("ZADD", PENDING, *scored)
        return members

    async def publish(
        self, trial_id: str, head: Head | None, member: str = "", *, at: float = 0.0, until: float = 0.0
    ) -> None:
        """Step 3.

        Args: head: what step 2 left; None: nothing. at: when it was looked for, if there is nothing.
            until: when the tombstone expires, if there is one.
        """
        now = self._clock()
        group = head.group if head else None
        created = head.created if head else at
        ended = "" if head is None or head.ended is None else repr(head.ended)
        status = head.status if head else "missing"
        args = [trial_id, member, status, repr(created), ended, repr(now), repr(until)]
        left = await self._link.run(self._publish, index_keys(group), args)
        if group is not None and left == 0:
            raw = await self._link.call(self._link.client.getdel(group_key(group)))
            if raw is not None:
                await self._group_gone(read_json(Group, raw))

    async def withdraw(self, member: str) -> None:
        """Instead of step 3, when step 2 changed nothing."""
        await self._link.call(self._link.client.zrem(PENDING, member))

    async def settle(self, trial_id: str, member: str = "", *, at: float) -> None:
        """Publish what is on record of a trial now. `at`: when what is to be settled was noticed."""
        key = trial_keys(trial_id).session
        fields = await self._link.call(self._link.client.hgetall(key))
        left_ms = await self._link.call(self._link.client.pttl(key))
        head = head_from_hash(fields) if fields else None
        await self.publish(trial_id, head, member, at=at, until=self._clock() + max(left_ms, 0) / 1000)

    async def sweep(self, before: Callable[[str], Awaitable[None]]) -> int:
        """Finish what a crash left between the steps. Returns how many announcements it settled.

        Args: before: what else is owed for a trial, to be done before its announcement goes.
        """
        client, settled, now = self._link.client, 0, self._clock()
        await self._link.call(client.zremrangebyscore(DEAD, "-inf", repr(now)))
        while True:
            bounds = {"byscore": True, "offset": 0, "num": _BATCH, "withscores": True}
            due = await self._link.call(client.zrange(PENDING, "-inf", repr(now - GRACE_S), **bounds))
            for member, announced_at in due:
                await before(member.decode().partition("/")[0])
                await self.settle(member.decode().partition("/")[0], member.decode(), at=announced_at)
            settled += len(due)
            if len(due) < _BATCH:
                return settled

    async def ended_before(self, cutoff: float, skip: int = 0) -> list[str]:
        """Some trials that ended at or before `cutoff`, oldest first, after the first `skip`."""
        members = await self._link.call(
            self._link.client.zrange(ENDED, "-inf", repr(cutoff), byscore=True, offset=skip, num=_BATCH)
        )
        return [member.decode() for member in members]

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
        after: Position | None,
    ) -> AsyncIterator[list[Position]]:
        """Positions in order of creation, in batches. A group's are of any status: the caller looks."""
        key = ALL if status is None else status_key(status)
        if group_id is not None:
            key = group_index_key(group_id)
        high = "+inf" if until is None else f"({until!r}"
        low, ties = since, 0
        if after is not None and (since is None or after.created > since):
            low = after.created
        while True:
            bounds = {"byscore": True, "offset": ties, "num": _BATCH, "withscores": True}
            found = await self._link.call(
                self._link.client.zrange(key, "-inf" if low is None else repr(low), high, **bounds)
            )
            places = [Position(score, member.decode()) for member, score in found]
            yield [place for place in places if after is None or place > after]
            if len(places) < _BATCH:
                return
            # Go on from the last one's time, not by rank: sessions come and go meanwhile. Rank only counts among equals.
            last = places[-1].created
            ties = ties + _BATCH if last == low else 0
            after, low = max(places[-1], after) if after else places[-1], last
