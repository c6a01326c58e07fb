"""What was said in a trial, as the functions that score it are given it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from steno.client.client import AsyncClient
from steno.contracts.records import Session, Turn


class Transcript(Protocol):
    """What was said in a trial, as a reward function may ask for it."""

    @property
    def session(self) -> Session: ...
    @property
    def turns(self) -> list[Turn]:
        """In commit order: each with the messages that were new in it (`messages`) and what the policy replied (`reply`)."""
        ...

    @property
    def last_reply(self) -> str:
        """Text of the last answer; "" where there was none."""
        ...


@dataclass(frozen=True)
class RecordedTranscript:
    """As the proxy had it on record."""

    session: Session
    turns: list[Turn]

    @property
    def last_reply(self) -> str:
        return str(self.turns[-1].reply.get("content") or "") if self.turns else ""


async def read_transcript(client: AsyncClient, session: Session) -> Transcript:
    """As patient as the client is: the time that a reward function has does not run meanwhile. Raises: StenoError."""
    return RecordedTranscript(session, [turn async for turn in client.turns(session.trial_id)])
