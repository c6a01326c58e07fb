"""Notes on sessions: many refusals are few writes and bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from steno.contracts.errors import BadRequest, Forbidden, StoreUnavailable
from steno.contracts.notes import MOST_CHARS, MOST_NOTES, Note, short
from steno.contracts.records import Session
from steno_proxy.session_cache import note_writer as module
from steno_proxy.session_cache.note_writer import MOST_TRIALS, OTHERS, NoteWriter
from steno_proxy.store.memory.store import MemoryStore
from tests.support.waiting import until


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.away = False

    async def note(self, trial_id: str, seen: Sequence[Note]) -> None:
        if self.away:
            raise StoreUnavailable("away")
        self.writes += 1
        await super().note(trial_id, seen)


async def opened(*trial_ids: str) -> Counting:
    store = Counting()
    for trial_id in trial_ids:
        await store.register(Session(trial_id=trial_id, created_at=1.0, updated_at=1.0))
    return store


async def test_100_000_refusals_are_one_write_of_bounded_size() -> None:
    store = await opened("t")
    notes = NoteWriter(store)
    worth = [notes.refused("t", BadRequest(f"field{n % 1000}: " + "x" * 500)) for n in range(100_000)]
    assert sum(worth) == MOST_NOTES + 1  # lines in the log
    await notes.flush()
    assert store.writes == 1
    found = await store.notes("t")
    assert found is not None and found.counts == {"invalid_request": 100_000}
    assert len(found.newest) == MOST_NOTES and max(len(note.text) for note in found.newest) == MOST_CHARS
    assert found.newest[-1].text == OTHERS and sum(note.times for note in found.newest) <= 100_000


async def test_trials_that_wait_are_bounded_and_unknown_ones_make_no_session() -> None:
    store = await opened()
    notes = NoteWriter(store)
    for n in range(MOST_TRIALS + 100):
        notes.refused(f"t{n}", BadRequest("no"))
    await notes.flush()
    assert store.writes == MOST_TRIALS
    page = await store.list_sessions(status=None, group_id=None, since=None, until=None, cursor=None, limit=10)
    assert page.items == []


async def test_a_wrong_key_leaves_no_note() -> None:
    store = await opened("t")
    notes = NoteWriter(store)
    assert notes.refused("t", Forbidden("this key has no access to this route"))
    await notes.flush()
    assert store.writes == 0 and await store.notes("t") is None


async def test_notes_that_the_store_does_not_take_are_dropped() -> None:
    store = await opened("t")
    notes = NoteWriter(store)
    store.away = True
    notes.add("t", "invalid_request", "first")
    await notes.flush()
    store.away = False
    notes.add("t", "invalid_request", "second")
    await notes.flush()
    found = await store.notes("t")
    assert found is not None and [note.text for note in found.newest] == ["second"]


async def test_it_writes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.0)
    store = await opened("t")
    notes = NoteWriter(store)
    running = asyncio.create_task(notes.run())
    for expected in (1, 2):
        notes.add("t", "invalid_request", "no")
        while store.writes < expected:
            await asyncio.sleep(0)
    running.cancel()
    found = await store.notes("t")
    assert found is not None and found.counts == {"invalid_request": 2}


async def test_a_write_that_fails_unforeseen_is_logged_and_the_next_one_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.0)
    store = await opened("t")
    real, failed = store.note, False

    async def note(trial_id: str, seen: Sequence[Note]) -> None:
        nonlocal failed
        if not failed:
            failed = True
            raise RuntimeError("unforeseen")
        await real(trial_id, seen)

    monkeypatch.setattr(store, "note", note)
    notes = NoteWriter(store)
    running = asyncio.create_task(notes.run())
    notes.add("t", "invalid_request", "first")
    await until(lambda: failed)
    notes.add("t", "invalid_request", "second")
    await until(lambda: store.writes == 1)
    running.cancel()
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "unforeseen" in caplog.text


def test_texts_are_one_short_line_that_can_be_stored() -> None:
    assert short("a\n\tb\x00c\ud800d") == "a b c d"
    assert len(short("x" * 10_000)) == MOST_CHARS
