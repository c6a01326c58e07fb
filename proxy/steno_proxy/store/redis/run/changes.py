"""Changes of runs in Redis: read, decide, and write if what was read is still the same.

Of one run, one change of this process is under way at a time. Those that come meanwhile are read, decided and written together,
in their order: sixty-four ends at once cost four round trips. Another replica, also one of an older release, may change the
same meanwhile; then all is decided anew.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from steno.contracts.errors import Conflict, NotFound, StoreUnavailable
from steno_proxy.store.redis.link.batch import another
from steno_proxy.store.redis.link.redis_link import RedisLink, Script
from steno_proxy.store.redis.run.parts import NotRead, ReadParts, RedisRun, RunQuery
from steno_proxy.store.redis.schema import request_key, run_keys

ATTEMPTS = 32
"""Attempts to write a change. If several replicas change the same run at once, one of them succeeds each time."""
PAUSE_S = 0.002
"""The longest pause after the first attempt; after the n-th it is n times as long."""
CHANGES_AT_ONCE = 256
GROUPS_AT_ONCE = 64
"""Changes are decided together until they ask for so many groups: Redis, and then this process, does nothing else meanwhile."""

Decide = Callable[[RedisRun, float], Any]


@dataclass(eq=False, slots=True)
class _Change:
    query: RunQuery
    decide: Decide
    now: float | None
    new: bool
    reply: asyncio.Future[Any]


class RunChanges:
    """Carries out decisions on runs: reads what they need, and writes what they changed if that is still the same.

    Args: woke: is called after a group got ready.
    """

    def __init__(self, link: RedisLink, woke: Callable[[str | None], Awaitable[None]]) -> None:
        self._link = link
        self._woke = woke
        self._read, self._write = Script("run_read"), Script("run_write")
        self._waiting: dict[str | None, deque[_Change]] = {}
        self._lanes: set[asyncio.Task[None]] = set()

    async def __call__(
        self, run_id: str | None, query: RunQuery, decide: Decide, *, now: float | None, new: bool = False
    ) -> Any:
        """Carry out a decision. Returns what `decide` returns, once its changes are written. Cancel-safe: the changes may be
        written all the same.

        Args: query: the parts that `decide` looks at, as far as is known. now: Unix seconds; None: Redis's own time, which comes
            with the parts that are read. new: these parts most probably do not exist, so they are not read at first.

        Raises: NotFound, Conflict: as `decide` raises them. StoreUnavailable.
        """
        change = _Change(query, decide, now, new, asyncio.get_running_loop().create_future())
        if run_id in self._waiting:
            self._waiting[run_id].append(change)
        else:
            self._waiting[run_id] = deque([change])
            lane = asyncio.create_task(self._drain(run_id))
            self._lanes.add(lane)
            lane.add_done_callback(self._lanes.discard)
        return await change.reply

    async def close(self) -> None:
        """Whoever still waits is told."""
        lanes = list(self._lanes)
        for lane in lanes:
            lane.cancel()
        if lanes:
            await asyncio.wait(lanes)
        for waiting in self._waiting.values():  # of lanes that never began
            for change in waiting:
                _fail(change, StoreUnavailable("the store was closed"))

    async def _drain(self, run_id: str | None) -> None:
        """Until no change of this run waits."""
        waiting = self._waiting[run_id]
        batch: list[_Change] = []
        try:
            while waiting:
                batch = _next(waiting)
                if await self._changed(run_id, batch):
                    await self._woke(run_id)
        finally:  # in the step that saw nobody waiting
            del self._waiting[run_id]
            for change in (*batch, *waiting):
                _fail(change, StoreUnavailable("the store was closed"))

    async def _changed(self, run_id: str | None, batch: list[_Change]) -> bool:
        """Each is answered. Returns whether a group got ready."""
        try:
            return await self._commit(run_id, batch)
        except StoreUnavailable as error:
            for change in batch:
                _fail(change, another(error))
        except Exception as error:  # a record that can't be read, say: whoever does not need it goes on
            if len(batch) > 1:
                return any([await self._changed(run_id, [change]) for change in batch])
            _fail(batch[0], error)
        return False

    async def _commit(self, run_id: str | None, batch: list[_Change]) -> bool:
        requests = list(dict.fromkeys(name for change in batch for name in change.query.requests))
        keys = [*run_keys(run_id), *(request_key(run_id, name) for name in requests)]
        for attempt in range(ATTEMPTS):
            query, found = RunQuery(), ReadParts()
            for change in batch:
                if change.new and not attempt:
                    for part, names in (("groups", change.query.groups), ("taken", change.query.taken)):
                        found.parts[part].update(dict.fromkeys(names))
                else:
                    query.add(change.query)
                    if change.now is not None and (change.query.due or change.query.most):
                        query.at = max(query.at or 0.0, change.now)
            reads = 0
            while True:
                query.requests = requests
                if query:
                    found.add(
                        query, await self._link.run(self._read, keys, [msgspec.msgpack.encode(query)], writes=False)
                    )
                    reads += 1
                run = RedisRun(found)
                try:
                    answers = [_decided(change, run, found.now) for change in batch]
                except NotRead as more:
                    query = more.query
                else:
                    break
            plan, changes = run.plan(requests)
            # What was found done must be on replicas too, and what was read bit by bit may never have been there together.
            if not (changes or reads > 1 or self._link.waits) or await self._link.run(self._write, keys, [plan]):
                for change, answer in zip(batch, answers, strict=True):
                    if isinstance(answer, Exception):
                        _fail(change, answer)
                    elif not change.reply.done():
                        change.reply.set_result(answer)
                return run.got_ready()
            await asyncio.sleep(random.random() * PAUSE_S * (attempt + 1))
        raise StoreUnavailable(f"run {run_id} changes too often: {ATTEMPTS} attempts to change it met another change")


def _next(waiting: deque[_Change]) -> list[_Change]:
    batch: list[_Change] = []
    groups = 0
    while waiting and len(batch) < CHANGES_AT_ONCE and groups < GROUPS_AT_ONCE:
        change = waiting.popleft()
        if not change.reply.done():  # else its caller was cancelled
            batch.append(change)
            groups += change.query.most
    return batch


def _decided(change: _Change, run: RedisRun, now: float | None) -> Any:
    at = now if change.now is None else change.now
    assert at is not None
    try:
        return change.decide(run, at)
    except (NotFound, Conflict) as error:
        return error


def _fail(change: _Change, error: Exception) -> None:
    if not change.reply.done():
        change.reply.set_exception(error)
