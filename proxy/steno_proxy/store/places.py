"""Where an archived session is, and what a store asks of whoever keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol
from urllib.parse import quote

from steno.contracts.errors import ArchiveUnreadable, Gone
from steno.contracts.records import Session, Turn


class ArchivePlace(NamedTuple):
    """Where a session is in the archive. name: of the object, DAY/DIGITS. offset, length: of the session's bytes in it;
    head_bytes: of the first, without turns.
    run: of the session, as `run_mark` writes it; None: not noted."""

    name: str
    offset: int
    head_bytes: int
    length: int
    run: str | None = None

    def encode(self) -> str:
        return ":".join(map(str, self if self.run is not None else self[:4]))

    @classmethod
    def decode(cls, raw: bytes) -> ArchivePlace:
        name, offset, head, length, *run = raw.decode().split(":")
        return cls(name, int(offset), int(head), int(length), run[0] if run else None)

    def may_be_of(self, run_id: str) -> bool:
        return self.run in (None, run_mark(run_id))


def run_mark(run_id: str | None) -> str:
    """A run's id as `ArchivePlace` has it: percent-encoded; empty: of no run."""
    return quote(run_id or "", safe="")


class InArchive(Gone):
    """The session has ended and left Redis: what is read of it is read there, and it changes no more."""

    def __init__(self, trial_id: str, place: ArchivePlace) -> None:
        super().__init__(f"session {trial_id} has ended and is in the archive: it can be read, and not changed")
        self.place = place


class ArchiveReader(Protocol):
    """Reads sessions that are in the archive."""

    async def read(self, trial_id: str, place: ArchivePlace) -> tuple[Session, list[Turn]]:
        """Raises: ArchiveUnreadable."""
        ...

    async def heads(self, places: Sequence[tuple[str, ArchivePlace]]) -> list[Session | ArchiveUnreadable]: ...


class NoArchive:
    """The `ArchiveReader` where no archive is set: every session that is in one is unreadable."""

    async def read(self, trial_id: str, place: ArchivePlace) -> tuple[Session, list[Turn]]:
        raise self._error(trial_id)

    async def heads(self, places: Sequence[tuple[str, ArchivePlace]]) -> list[Session | ArchiveUnreadable]:
        return [self._error(trial_id) for trial_id, _ in places]

    def _error(self, trial_id: str) -> ArchiveUnreadable:
        return ArchiveUnreadable(f"session {trial_id} is in the archive, and this proxy has none: set archive")
