"""`GET /ui/sessions`: sessions that match what a person asks for, newest first, for as long as a person waits.

Nothing is indexed of what was said: sessions are read one after another, their texts in a thread, a few turns at a time, and what
streams has its turn in between. A search that has looked for long enough says how far it came, and goes on when it is asked to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel

from steno.contracts.errors import NotFound, StenoError
from steno.contracts.records import Session, Turn
from steno_proxy.api.common import encoded, known_query, reader, services
from steno_proxy.store.interface import SessionStore
from steno_proxy.store.views import ListPosition

LOOK_S = 2.0
"""How long one call looks."""
PAGE = 25
"""Sessions that are read at once."""
TURNS = 4
"""Turns whose texts are read at once: about a millisecond of work."""
REST = 2.0
"""After each piece of work, this many times as long for everybody else."""

router = APIRouter(include_in_schema=False)


class FoundSessions(BaseModel):
    """searched: sessions that this call has looked at. total: sessions on record. next_cursor: to go on; None: that was all."""

    items: list[Session]
    next_cursor: str | None = None
    searched: int = 0
    total: int = 0


class _Wanted:
    """What a session must have beside what lists are made by."""

    def __init__(
        self, end_reason: str | None, agent: str | None, mark: str | None, rewards: tuple[float | None, float | None]
    ) -> None:
        self.end_reason, self.agent, self.mark, (self.low, self.high) = end_reason, agent, mark, rewards

    def takes(self, session: Session) -> bool:
        return (
            self.end_reason in (None, session.end_reason)
            and self.agent in (None, session.metadata.get("agent"))
            and (self.mark is None or self.mark in session.marks)
            and self._takes_reward(session.reward)
        )

    def _takes_reward(self, reward: float | None) -> bool:
        if self.low is None and self.high is None:
            return True
        return reward is not None and not (
            (self.low is not None and reward < self.low) or (self.high is not None and reward > self.high)
        )


@router.get("/ui/sessions", dependencies=[Depends(reader), Depends(known_query)])
async def find_sessions(
    request: Request,
    status: Literal["open", "completed", "aborted"] | None = None,
    run_id: Annotated[str | None, Query(max_length=128)] = None,
    group_id: Annotated[str | None, Query(max_length=128)] = None,
    end_reason: Annotated[str | None, Query(max_length=128)] = None,
    agent: Annotated[str | None, Query(max_length=256)] = None,
    mark: Annotated[str | None, Query(max_length=128)] = None,
    min_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    max_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    text: Annotated[str | None, Query(min_length=2, max_length=200)] = None,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    store = services(request).store
    wanted = _Wanted(end_reason, agent, mark, (min_reward, max_reward))
    found = FoundSessions(items=[], total=sum((await store.stats())["sessions"].values()))
    until = time.monotonic() + LOOK_S
    sought = None if text is None else text.casefold()
    while True:
        page = await store.list_sessions(
            status=status,
            group_id=group_id,
            since=None,
            until=None,
            cursor=cursor,
            limit=PAGE,
            run_id=run_id,
            newest_first=True,
        )
        for session in page.items:
            if wanted.takes(session) and (sought is None or await _says(store, session, sought)):
                found.items.append(session)
            found.searched += 1
            if len(found.items) == limit or time.monotonic() > until or await request.is_disconnected():
                found.next_cursor = ListPosition(session.created_at, session.trial_id).cursor()
                return encoded(request, found)
        cursor = page.next_cursor
        if cursor is None:
            return encoded(request, found)
        await asyncio.sleep(0)


async def _says(store: SessionStore, session: Session, sought: str) -> bool:
    """Whether this stands in what was said to the policy or by it, or in the trial's id. Args: sought: case folded."""
    if sought in session.trial_id.casefold():
        return True
    for start in range(0, session.counts.turns, TURNS):
        began = time.monotonic()
        try:
            turns = await store.turns(session.trial_id, start=start, limit=TURNS)
        except NotFound:
            return False  # deleted meanwhile
        except StenoError as error:
            if error.retryable:
                raise
            return False
        if await asyncio.to_thread(_in_any, turns, sought):
            return True
        await asyncio.sleep(REST * (time.monotonic() - began))
    return False


def _in_any(turns: Iterable[Turn], sought: str) -> bool:
    return any(sought in text.casefold() for turn in turns for text in texts([turn.messages, turn.reply]))


def texts(value: Any) -> Iterator[str]:
    """All strings in a value of JSON, names of fields left out."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
