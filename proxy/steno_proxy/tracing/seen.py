"""What is handed over to be traced: references to what is on record anyway, copied by nobody."""

from __future__ import annotations

from typing import NamedTuple

from steno.contracts.records import Session, Turn


class TurnMove(NamedTuple):
    """Another worker took a turn over. at: Unix seconds. how: `moved`, `taken_over` or `restarted`. error: what the worker before
    ended with. tokens: sampled until then. worker_id: of the one before."""

    at: float
    how: str
    error: str
    tokens: int
    worker_id: str


class SeenTurn(NamedTuple):
    """A turn that is on record. traceparent: as its agent sent it, or ""."""

    session: Session
    turn: Turn
    traceparent: str
    moves: tuple[TurnMove, ...]


class SeenEnd(NamedTuple):
    """A session has ended."""

    session: Session


class SeenRefusal(NamedTuple):
    """A request was refused, with nothing on record. at: Unix seconds."""

    session: Session
    at: float
    status: int
    code: str
    message: str


Seen = SeenTurn | SeenEnd | SeenRefusal
