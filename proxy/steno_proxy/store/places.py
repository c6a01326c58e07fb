"""Where an archived session is, and what a store asks of whoever keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from steno.contracts.errors import ArchiveUnreadable, Gone
from steno.contracts.records import Session, Turn


class ArchivePlace(NamedTuple):
    """Where a session is in the archive. name: of the object, DAY/DIGITS. offset, length: of the session's bytes in it;
    head_bytes: of the first, without turns."""

    name: str
    offset: int
    head_bytes: int
    length: int

    def encode(self) -> str:
        return ":".join(map(str, self))

    @classmethod
    def decode(cls, raw: bytes) -> ArchivePlace:
        name, offset, head, length = raw.decode().split(":")[:4]  # there was a fifth once
        return cls(name, int(offset), int(head), int(length))


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
