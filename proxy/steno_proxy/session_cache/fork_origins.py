"""What this process knows of the trials that others were forked from: read once, page by page, and kept as digests."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from steno.contracts.errors import StoreUnavailable
from steno.contracts.records import ForkOf, Session, Turn
from steno_proxy.sessions.origin import ForkOrigin, RecordedTurn
from steno_proxy.store.interface import SessionStore

MOST = 64
"""Origins that are kept: each is read again for a few milliseconds a hundred turns."""
PAGE = 20
"""Turns that are in memory at a time."""


class ForkOrigins:
    """Least recently used dropped first. An origin has ended, so that it does not change."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._known: OrderedDict[str, ForkOrigin] = OrderedDict()

    async def of(self, session: Session | None, fork: ForkOf) -> ForkOrigin:
        """Return the origin of a fork, read unless it is known. Args: session: the origin's, if it was read already.

        Raises: NotFound (no such trial, or turn), Gone (deleted), Conflict (no fork can be there), ArchiveUnreadable,
            StoreUnavailable."""
        name = fork.model_dump_json()
        found = self._known.get(name)
        if found is None:
            session = session or await self._store.session(fork.trial_id)
            found = await self._read(fork, session.counts.turns)
            self._known[name] = found
            if len(self._known) > MOST:
                self._known.popitem(last=False)
        elif name in self._known:
            self._known.move_to_end(name)
        return found

    async def turn(self, fork: ForkOf, known: RecordedTurn) -> Turn:
        """A turn of the origin, whole. Raises: NotFound, Gone, ArchiveUnreadable, StoreUnavailable, also where the store has
        lost it."""
        for turn in await self._store.turns(fork.trial_id, start=known.number, limit=1):
            if turn.turn_id == known.turn_id:
                return turn
        self._known.pop(fork.model_dump_json(), None)  # to be read anew
        raise StoreUnavailable("the trial that this one was forked from has lost turns that were on record")

    async def _read(self, fork: ForkOf, count: int) -> ForkOrigin:
        origin, last = ForkOrigin(fork), None
        for start in range(0, count, PAGE):
            for turn in await self._store.turns(fork.trial_id, start=start, limit=PAGE):
                origin.add(turn)
                last = turn if turn.turn_id == fork.turn_id else last
                await asyncio.sleep(0)  # its texts are compared, and others wait
        origin.settle(last)
        return origin
