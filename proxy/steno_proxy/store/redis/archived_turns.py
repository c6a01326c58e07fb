"""Turns of archived sessions, page by page. The archive gives a session whole, and unpacking 3,000 turns takes a second: that is
done once for all pages, not for each."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from steno.contracts.records import Turn
from steno_proxy.store.places import ArchivePlace, ArchiveReader

KEPT_BYTES, KEPT_TURNS = 16 << 20, 5_000
"""Packed bytes, and turns, of all that is kept: a turn takes some 10 KB of memory, or three times its packed bytes. The session
that was read last is kept in any case."""
KEPT_S = 30.0
"""Seconds that a session is kept after a page of it was asked for."""


class ArchivedTurns:
    """An archived session does not change. What is kept of it is let go once its last page was read, or `KEPT_S` later."""

    def __init__(self, shelf: ArchiveReader) -> None:
        self._shelf = shelf
        self._kept: OrderedDict[ArchivePlace, tuple[list[Turn], asyncio.TimerHandle]] = OrderedDict()

    async def page(self, trial_id: str, place: ArchivePlace, start: int, limit: int) -> list[Turn]:
        """A page of a session's turns: copies, which the caller may change, for a fork, say. Raises: ArchiveUnreadable."""
        turns = self._let_go(place)
        if turns is None:
            _, turns = await self._shelf.read(trial_id, place)
        if start + limit < len(turns):
            self._keep(place, turns)
        return [turn.model_copy() for turn in turns[start : start + limit]]

    def _keep(self, place: ArchivePlace, turns: list[Turn]) -> None:
        self._let_go(place)  # two may have read it at once
        self._kept[place] = turns, asyncio.get_running_loop().call_later(KEPT_S, self._let_go, place)
        while len(self._kept) > 1 and self._is_too_much():
            self._let_go(next(iter(self._kept)))

    def _is_too_much(self) -> bool:
        turns = sum(len(turns) for turns, _ in self._kept.values())
        return turns > KEPT_TURNS or sum(place.length for place in self._kept) > KEPT_BYTES

    def _let_go(self, place: ArchivePlace) -> list[Turn] | None:
        if place not in self._kept:
            return None
        turns, timer = self._kept.pop(place)
        timer.cancel()
        return turns
