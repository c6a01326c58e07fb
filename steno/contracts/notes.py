"""What a session says beside its turns: requests that were refused, parts of requests that were left out. Bounded.

Notes are for people who ask why a trial went as it did. Nothing depends on them: they are written some time after, and lost with
a proxy that is killed meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

MOST_NOTES = 32
"""Of a session: the newest. Also of one trial that wait to be written."""
MOST_CHARS = 200
"""Of a note's text."""


class Note(BaseModel):
    """One thing that was seen, as often as it was. kind: the code of an error (`invalid_request`, `budget_spent`, …) or another
    stable word. at: the last time, Unix seconds."""

    model_config = ConfigDict(extra="forbid")
    kind: str
    text: str
    times: int = Field(1, ge=1)
    at: float


class Notes(BaseModel):
    """newest: at most 32, oldest first; the same again counts up its note. counts: by kind, of all there ever were."""

    model_config = ConfigDict(extra="forbid")
    counts: dict[str, int] = Field(default_factory=dict)
    newest: list[Note] = Field(default_factory=list)


def short(text: str) -> str:
    """One line of at most MOST_CHARS characters that can be stored and shown."""
    line = text[: 2 * MOST_CHARS]
    if not line.isprintable():
        line = "".join(char if char.isprintable() else " " for char in line)
    line = " ".join(line.split())
    return line if len(line) <= MOST_CHARS else line[: MOST_CHARS - 1] + "…"


def merged(known: Notes, seen: Sequence[Note]) -> Notes:
    """`lua/note.lua` does the same."""
    counts, newest = dict(known.counts), {(note.kind, note.text): note for note in known.newest}
    for note in seen:
        counts[note.kind] = counts.get(note.kind, 0) + note.times
        before = newest.pop((note.kind, note.text), None)
        times = note.times + (before.times if before else 0)
        newest[note.kind, note.text] = note.model_copy(update={"times": times})
    return Notes(counts=counts, newest=list(newest.values())[-MOST_NOTES:])
