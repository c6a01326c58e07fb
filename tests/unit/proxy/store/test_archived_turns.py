"""An archived session that is read page by page is read once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from steno.contracts.errors import ArchiveUnreadable
from steno.contracts.records import Session, Turn
from steno_proxy.store.places import ArchivePlace
from steno_proxy.store.redis import archived_turns
from steno_proxy.store.redis.archived_turns import KEPT_BYTES, ArchivedTurns
from tests.support.records.recordings import session, turn


class Shelf:
    """250 turns of any session. reads: whose was read, in order."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.fails = False
        self.turns = [turn(1, index=number) for number in range(250)]

    async def read(self, trial_id: str, place: ArchivePlace) -> tuple[Session, list[Turn]]:
        await asyncio.sleep(0)
        if self.fails:
            raise ArchiveUnreadable("spoilt")
        self.reads.append(trial_id)
        return session(trial_id), list(self.turns)

    async def heads(self, places: Sequence[tuple[str, ArchivePlace]]) -> list[Session | ArchiveUnreadable]:
        raise NotImplementedError


def place(trial_id: str, length: int = 1000) -> ArchivePlace:
    return ArchivePlace(f"2026-11-30/{trial_id}", 0, 10, length)


async def indices(turns: ArchivedTurns, trial_id: str, start: int, length: int = 1000) -> list[int]:
    return [turn.index for turn in await turns.page(trial_id, place(trial_id, length), start, 100)]


async def test_all_pages_are_of_one_read_and_nothing_is_kept_of_it() -> None:
    turns = ArchivedTurns(shelf := Shelf())
    found = [index for start in (0, 100, 200) for index in await indices(turns, "t", start)]
    assert (found, shelf.reads, turns._kept) == (list(range(250)), ["t"], {})
    assert await indices(turns, "t", 300) == [] and turns._kept == {}


async def test_what_a_reader_makes_of_its_turns_is_not_read_by_the_next_one() -> None:
    """A trial that was forked from this one puts a path before a turn's ids. The second one found it there, and put it twice."""
    turns = ArchivedTurns(shelf := Shelf())
    for _ in range(2):
        [one] = await turns.page("t", place("t"), 0, 1)
        assert one.new_prompt_ids == turn(1, index=0).new_prompt_ids
        one.new_prompt_ids += b"more"
    assert shelf.reads == ["t"]


async def test_of_several_the_newest_are_kept_as_far_as_there_is_room() -> None:
    turns = ArchivedTurns(shelf := Shelf())
    for start in (0, 100):
        for trial_id in "abc":
            await indices(turns, trial_id, start, KEPT_BYTES // 2)
    assert shelf.reads == list("abcabc"), "there is room for two"
    for trial_id in "bc":
        await indices(turns, trial_id, 0, KEPT_BYTES // 2)
    assert shelf.reads == list("abcabc")
    for start in (0, 100, 200):
        await indices(turns, "large", start, 5 * KEPT_BYTES)
    assert shelf.reads == [*"abcabc", "large"]


async def test_turns_that_pack_well_have_a_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archived_turns, "KEPT_TURNS", 500)
    turns = ArchivedTurns(shelf := Shelf())
    for trial_id in "abc":
        await indices(turns, trial_id, 0, 1)
    for trial_id in "bca":
        await indices(turns, trial_id, 100, 1)
    assert shelf.reads == list("abca")


async def test_what_nobody_asks_for_any_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archived_turns, "KEPT_S", 0.01)
    turns = ArchivedTurns(Shelf())
    await indices(turns, "t", 0)
    async with asyncio.timeout(60):
        while turns._kept:
            await asyncio.sleep(0.01)


async def test_two_that_read_one_at_once_get_what_they_ask_for() -> None:
    turns = ArchivedTurns(shelf := Shelf())
    shelf_reads = await asyncio.gather(indices(turns, "t", 0), indices(turns, "t", 100), indices(turns, "t", 200))
    assert shelf_reads == [list(range(start, min(start + 100, 250))) for start in (0, 100, 200)]
    shelf.fails = True
    with pytest.raises(ArchiveUnreadable):
        await indices(turns, "other", 0)
