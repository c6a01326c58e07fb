"""Lists of sessions: their places in order of creation, of all and of each group, and pages of them."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator

from steno.contracts.records import Session
from steno_proxy.store.interface import SessionListPage
from steno_proxy.store.views import ListPosition

LOOKED_AT_ONCE = 200
"""Sessions that a list looks at between two turns of the event loop: about half a millisecond, where none of them match."""


class MemoryLists:
    """Sessions in the order in which they were made: all of them, and by group."""

    def __init__(self) -> None:
        self._places: list[ListPosition] = []
        self._group_places: dict[str, list[ListPosition]] = {}

    def add(self, place: ListPosition, group_id: str | None) -> None:
        """Add a session."""
        for places in self._places_of(group_id):
            insort(places, place)

    def remove(self, place: ListPosition, group_id: str | None) -> bool:
        """Remove a session. Returns: whether it was the last of its group."""
        for places in self._places_of(group_id):
            del places[bisect_left(places, place)]
        if group_id is None or self._group_places[group_id]:
            return False
        del self._group_places[group_id]
        return True

    def _places_of(self, group_id: str | None) -> Iterator[list[ListPosition]]:
        yield self._places
        if group_id is not None:
            yield self._group_places.setdefault(group_id, [])

    async def page(
        self, take: Callable[[str], Session | None], *, group_id: str | None, since: float | None, until: float | None,
        after: ListPosition | None, limit: int, newest_first: bool, most_looked: int | None,
    ) -> SessionListPage:  # fmt: skip
        """One page of the sessions that `take` gives (`SessionStore.list_sessions`)."""
        last, looked = after, 0
        found: list[Session] = []
        passed: list[int] = []
        while True:
            places = self._next(group_id, since, until, last, newest_first)
            for place in places:
                if (session := take(place.trial_id)) is not None:
                    if len(found) == limit and last is not None:
                        return SessionListPage(found, last.cursor(), (), passed, looked)
                    found.append(session)
                    passed.append(looked + 1)
                last, looked = place, looked + 1
            if len(places) < LOOKED_AT_ONCE or last is None:
                return SessionListPage(found, None, (), passed, looked)
            if most_looked is not None and looked >= most_looked:
                return SessionListPage(found, last.cursor(), (), passed, looked)
            await asyncio.sleep(0)

    def _next(
        self, group_id: str | None, since: float | None, until: float | None, last: ListPosition | None, newest_first: bool
    ) -> list[ListPosition]:  # fmt: skip
        """Some places after `last`, in the order asked for; fewer than LOOKED_AT_ONCE: there are no more."""
        places = self._places if group_id is None else self._group_places.get(group_id, [])
        low = 0 if since is None else bisect_left(places, ListPosition(since, ""))
        high = len(places) if until is None else bisect_left(places, ListPosition(until, ""))
        if last is not None and newest_first:
            high = min(high, bisect_left(places, last))
        elif last is not None:
            low = max(low, bisect_right(places, last))
        if newest_first:
            return places[max(low, high - LOOKED_AT_ONCE) : high][::-1]
        return places[low : min(high, low + LOOKED_AT_ONCE)]
