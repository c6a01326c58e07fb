"""What sessions are found by: a line for each, so that a filter looks at lines, and reads the records of those that match alone.

In Redis the line is a field of a hash (`publish.lua`); in memory it is made of the record when somebody looks. A line may be
behind its record, never ahead of it; so whoever shows a session asks its record again (`SessionFilter.takes`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from steno.contracts.records import Session
from steno_proxy.store.encoding.texts import to_json

MOST_LETTERS = 256
"""Of an agent's name: a longer one is found by no filter."""


class SessionFacets(msgspec.Struct, array_like=True, frozen=True):
    """The facets of one session. known: how many of end, reward and marks are set. It only grows during a session's life, so of
    two lines of one life the one with the larger number is the later one. agent: `metadata.agent`, if that is a text. marks:
    final once the session has ended; an open one may get more."""

    known: int
    run: str | None
    agent: str | None
    ended: bool
    end_reason: str | None
    reward: float | None
    marks: tuple[str, ...]

    def line(self) -> bytes:
        """As it rests in Redis: a list in JSON, its first value `known`."""
        return to_json(msgspec.to_builtins(self))


_decoder = msgspec.json.Decoder(SessionFacets)


def facets_of(session: Session) -> SessionFacets:
    ended = session.status != "open"
    return SessionFacets(
        int(ended) + int(session.reward is not None) + len(session.marks),
        session.run_id,
        agent_of(session.metadata),
        ended,
        session.end_reason,
        session.reward,
        tuple(session.marks),
    )


def agent_of(metadata: dict[str, Any]) -> str | None:
    found = metadata.get("agent")
    return found if isinstance(found, str) and len(found) <= MOST_LETTERS else None


class SessionFilter(NamedTuple):
    """What sessions must have. None: anything. Rewards: at least `min_reward`, at most `max_reward`; a session without one has
    neither."""

    run_id: str | None = None
    end_reason: str | None = None
    agent: str | None = None
    mark: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None

    @property
    def narrows(self) -> bool:
        return any(value is not None for value in self)

    def takes(self, session: Session) -> bool:
        return self.takes_facets(facets_of(session))

    def takes_facets(self, facets: SessionFacets) -> bool:
        return self._takes_known(facets) and (self.mark is None or self.mark in facets.marks)

    def may_take(self, line: bytes | None) -> bool:
        """Whether the session of this line may match, as far as the line knows. None: there is no line."""
        if line is None:
            return True
        try:
            facets = _decoder.decode(line)
        except msgspec.DecodeError:  # lone surrogates, which JSON may escape and UTF-8 can't carry
            return True
        return self._takes_known(facets) and (self.mark is None or not facets.ended or self.mark in facets.marks)

    def _takes_known(self, facets: SessionFacets) -> bool:
        return (
            self.run_id in (None, facets.run)
            and self.end_reason in (None, facets.end_reason)
            and self.agent in (None, facets.agent)
            and self._takes_reward(facets.reward)
        )

    def _takes_reward(self, reward: float | None) -> bool:
        if self.min_reward is None and self.max_reward is None:
            return True
        return (
            reward is not None
            and (self.min_reward is None or reward >= self.min_reward)
            and (self.max_reward is None or reward <= self.max_reward)
        )


EVERY_SESSION = SessionFilter()
