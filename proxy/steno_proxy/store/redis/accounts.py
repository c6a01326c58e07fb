"""Counts a trial that has ended in its group and its run, once (I4). Trial and run are on two slots of Redis: four steps.

    1 the end     the session is frozen, or deleted with a tombstone that keeps its turns (trial's slot)
    2 seal        its record takes no turn from here on (trial's slot)
    3 ended       its group and its run are told (run's slot); counted once, whoever says it and however often
    4 booked      the session knows that it has been counted; a tombstone lets go of the turns (trial's slot)

The record itself is the outbox: until step 4 it says that step 3 is owed, and the announcement that was made before step 1
(`RedisIndex`) has whoever sweeps do the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from steno.contracts.records import OPEN, Turn
from steno.contracts.runs.leases import NotTrained
from steno_proxy.store.encoding.head import Head, borrows, head_from_hash, run_of
from steno_proxy.store.redis.link.redis_link import RedisLink, Script
from steno_proxy.store.redis.runs import RedisRuns
from steno_proxy.store.redis.schema import trial_keys
from steno_proxy.store.runs.settlement import BOOKED, Tokens, accountable, ended, late_tokens, open_turns

_CHUNK = 256
"""Turns read in one reply, some 60 KB."""


class SettledSession(NamedTuple):
    """A session that was settled: its head at that time, and its run."""

    head: Head
    run_id: str | None


class RedisAccounts:
    """Tells runs of the trials that have ended (the module's docstring has the steps)."""

    def __init__(self, link: RedisLink, runs: RedisRuns) -> None:
        self._link = link
        self._runs = runs
        self._seal, self._booked = Script("seal"), Script("booked")

    async def settle(self, trial_id: str, now: float) -> SettledSession | None:
        """Steps 2 to 4. Idempotent. None: the session is open, is not there, or is in no group and no run."""
        keys = trial_keys(trial_id)
        fields, doc = await self._link.ask(("HGETALL", keys.session), ("GET", keys.doc))
        if not fields or doc is None:
            return None
        head, run_id = head_from_hash(fields), run_of(doc)
        if head.status == "open" or not accountable(head.group, run_id):
            return None
        sealed, doc = await self._link.run(self._seal, keys[:2], [])
        if not sealed or doc is None:
            return None  # deleted meanwhile, and accounted for
        head = head_from_hash(dict(zip(sealed[::2], sealed[1::2], strict=True)))
        turns: list[bytes] = [] if head.sealed == BOOKED and head.status != "deleted" else await self._turns(trial_id)
        trial = ended(trial_id, head, turns, borrowed=borrows(doc))
        await self._runs.ended(run_id, trial, now)
        late = {"run": run_id, "open": open_turns(turns)} if head.status == "deleted" else {}
        await self._link.run(self._booked, keys[:3], [repr(head.created), msgspec.json.encode(late)])
        await self._runs.settled(run_id, trial, now)
        return SettledSession(head, run_id)

    async def _turns(self, trial_id: str) -> list[bytes]:
        key = trial_keys(trial_id).turns
        turns: list[bytes] = []
        while True:
            [chunk] = await self._link.ask(("LRANGE", key, len(turns), len(turns) + _CHUNK - 1))
            turns += chunk
            if len(chunk) < _CHUNK:
                return turns

    async def came_late(self, trial_id: str, turn: Turn, now: float, recorded: Tokens | None = None) -> None:
        """A turn for a record that takes none any more: its tokens are booked, less what was counted of it while it was open.

        Args: recorded: what is on record of it for good, where that is why it was refused.
        """
        if turn.finish_reason == OPEN or (recorded is None and not turn.partial):
            return
        keys = trial_keys(trial_id)
        fields, doc = await self._link.ask(("HGETALL", keys.session), ("GET", keys.doc))
        if b"owed" in fields:
            await self.settle(trial_id, now)
            fields, doc = await self._link.ask(("HGETALL", keys.session), ("GET", keys.doc))
        if doc is not None and fields:
            run_id, reason = run_of(doc), NotTrained.LATE
            if not accountable(head_from_hash(fields).group, run_id):
                return
            if recorded is None:
                recorded = open_turns(await self._turns(trial_id)).get(turn.turn_id, {})
        elif b"late" in fields:
            found: dict[str, Any] = msgspec.json.decode(fields[b"late"])
            run_id, reason = found["run"], NotTrained.DELETED
            recorded = found["open"].get(turn.turn_id, {}) if recorded is None else recorded
        else:
            return
        if tokens := late_tokens(turn, recorded):
            await self._runs.came_late(run_id, trial_id, turn.turn_id, tokens, reason, now)
