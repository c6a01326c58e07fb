"""Writes notes on sessions to the store once a second: why requests were refused, with counts.

A trial that is refused a hundred thousand times costs one small write a second and the memory of MOST_NOTES short texts, here and
in the store. Nobody waits for a note, and none makes a session.
"""

from __future__ import annotations

import asyncio
import logging

from steno.contracts.errors import Forbidden, Gone, NotFound, StenoError, StoreUnavailable, Unauthorized
from steno.contracts.notes import MOST_NOTES, Note, short
from steno_proxy.store.interface import SessionStore

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Between two writes for one trial."""
MOST_TRIALS = 512
"""How many trials may have notes that wait for the next write; until then, notes of other trials are not kept."""
OTHERS = "others like it"
"""The text of a note, once a trial has said MOST_NOTES different things in one round."""
_UNSAID = (Forbidden, NotFound, StoreUnavailable, Unauthorized)
"""Refusals that are not the trial's: a wrong key, no such trial, no store to write to."""


class NoteWriter:
    """Collects notes on sessions, and writes them to the store once a second."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._waiting: dict[str, dict[tuple[str, str], Note]] = {}
        self._some = asyncio.Event()

    def refused(self, trial_id: str, error: StenoError) -> bool:
        """A request of this trial was refused, with a key that opens it. Returns: whether it is worth a line in the log; the same
        again within a round is not."""
        return isinstance(error, _UNSAID) or self.add(trial_id, error.code, error.message)

    def add(self, trial_id: str, kind: str, text: str) -> bool:
        """Keep a note for the next write. Returns: True if none of its kind and text is kept yet, or there is no room."""
        notes = self._waiting.get(trial_id)
        if notes is None:
            if len(self._waiting) >= MOST_TRIALS:
                return True
            notes = self._waiting[trial_id] = {}
        key = kind, short(text)
        if key not in notes and len(notes) >= MOST_NOTES:
            key = kind, OTHERS
        known = notes.pop(key, None)
        notes[key] = Note(
            kind=kind, text=key[1], times=known.times + 1 if known else 1, at=round(self._store.clock(), 3)
        )
        self._some.set()
        return known is None

    async def run(self) -> None:
        """Write what waits, for as long as the proxy runs."""
        while True:
            await self._some.wait()
            await asyncio.sleep(EVERY_S)
            try:
                await self.flush()
            except Exception:  # recorded: notes that come later are still written
                log.exception("can't write notes on sessions; they are lost")

    async def flush(self) -> None:
        """Notes that the store does not take now are lost: a store that is away is not made busier when it comes back."""
        self._some.clear()
        waiting, self._waiting = self._waiting, {}
        for trial_id, notes in waiting.items():
            for note in notes.values():
                if note.times > 1:
                    log.info("trial %s: %s %d times: %s", trial_id, note.kind, note.times, note.text)
            try:
                await self._store.note(trial_id, list(notes.values()))
            except (NotFound, Gone):
                continue
            except StoreUnavailable as error:
                log.warning("notes on %d sessions are lost: %s", len(waiting), error.message)
                return
