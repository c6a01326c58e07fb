"""`GET /ui/sessions`: sessions that match what a person asks for, newest first, for as long as a person waits.

Filters use an index (`facets.py`). Texts have no index: they are read one session after another, a few turns at a time, long
ones in a thread, with pauses in which streams go on. After LOOK_S a search answers with what it has found and with a cursor, from
which the next call goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, Field

from steno.contracts.errors import ArchiveUnreadable, Gone, NotFound, StenoError
from steno.contracts.records import Session
from steno_proxy.api.common import encoded, known_query, reader, services
from steno_proxy.store.facets import SessionFilter
from steno_proxy.store.interface import SessionStore
from steno_proxy.store.places import InArchive
from steno_proxy.store.views import ListPosition

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""How long one call looks."""
PAGE = 25
"""Sessions whose texts are looked at before the next ones are listed."""
LINES = 2000
"""Sessions that a filter passes over before it says how far it came, if its time is up."""
TURNS = 4
"""Turns whose texts are read at once: a tenth of a millisecond of work, if they are as short as most."""
INLINE_LETTERS = 1 << 16
"""Texts of more than so many are searched in a thread; fewer take a tenth of a millisecond, and a thread would cost more."""
REST = 2.0
"""After each piece of work, this many times as long for everybody else."""

router = APIRouter(include_in_schema=False)


class FoundSessions(BaseModel):
    """searched: sessions that this call has looked at. total: sessions on record. next_cursor: to go on; None: that was all.
    unreadable: trials that the archive can't read now, which may belong here."""

    items: list[Session]
    next_cursor: str | None = None
    searched: int = 0
    total: int = 0
    unreadable: list[str] = Field(default_factory=list)


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
    wanted = SessionFilter(run_id, end_reason, agent, mark, min_reward, max_reward)
    found = FoundSessions(items=[], total=sum((await store.stats())["sessions"].values()))
    until = time.monotonic() + LOOK_S
    sought = None if text is None else text.casefold()
    while True:
        left = limit - len(found.items)
        page = await store.list_sessions(
            status=status, group_id=group_id, since=None, until=None, cursor=cursor,
            limit=left if sought is None else min(left, PAGE), wanted=wanted, newest_first=True, most_looked=LINES,
        )  # fmt: skip
        counted = 0
        for session, passed in zip(page.items, page.passed, strict=True):
            try:
                if sought is None or await _says(store, session, sought):
                    found.items.append(session)
            except StenoError as error:
                if error.retryable and not isinstance(error, ArchiveUnreadable):
                    raise
                log.warning("a search left out session %s: %s", session.trial_id, error.message)
                found.unreadable.append(session.trial_id)
            found.searched, counted = found.searched + passed - counted, passed
            if sought is not None and (
                len(found.items) == limit or time.monotonic() > until or await request.is_disconnected()
            ):
                found.next_cursor = ListPosition(session.created_at, session.trial_id).cursor()
                return encoded(request, found)
        found.searched += page.looked - counted
        found.unreadable += page.unreadable
        cursor = page.next_cursor
        if cursor is None or len(found.items) == limit or time.monotonic() > until or await request.is_disconnected():
            found.next_cursor = cursor
            return encoded(request, found)
        await asyncio.sleep(0)


async def _says(store: SessionStore, session: Session, sought: str) -> bool:
    """Whether this stands in what was said to the policy or by it, or in the trial's id. Args: sought: case folded."""
    if sought in session.trial_id.casefold():
        return True
    try:
        for start in range(0, session.counts.turns, TURNS):
            began = time.monotonic()
            said = await store.conversation(session.trial_id, range(start, min(start + TURNS, session.counts.turns)))
            if await _in(said, sought):
                return True
            await asyncio.sleep(REST * (time.monotonic() - began))
    except InArchive:  # which reads a session whole
        turns = await store.turns(session.trial_id)
        return await _in([[turn.messages, turn.reply] for turn in turns], sought)
    except (NotFound, Gone):
        pass  # deleted meanwhile
    return False


async def _in(said: list[Any], sought: str) -> bool:
    found = list(texts(said))
    if sum(map(len, found)) > INLINE_LETTERS:
        return await asyncio.to_thread(_in_any, found, sought)
    return _in_any(found, sought)


def _in_any(found: Iterable[str], sought: str) -> bool:
    return any(sought in text.casefold() for text in found)


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
