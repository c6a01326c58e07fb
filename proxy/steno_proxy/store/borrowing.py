"""The turns of a recorded trial, written again under a trial that scores it anew: same ids, tokens, versions, texts (ADR 31).

What is on record of the new trial is whole by itself: the recorded one may be deleted, or expire. Nothing is sampled, so its run
counts these tokens as borrowed.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

from steno.contracts.errors import Conflict, Gone, NotFound
from steno.contracts.records import IndexRow, Session, Turn
from steno_proxy.store.interface import SessionStore

_NO_CONTEXT = bytes(8)


async def borrow_turns(store: SessionStore, session: Session, *, now: float) -> None:
    """Write the turns of `session.rescore_of` into an open session. Idempotent: where it was interrupted it goes on.

    Raises: Conflict: they are not on record any more; NotFound, Gone: the session is not open; StoreUnavailable.
    """
    assert session.rescore_of is not None
    origin = session.rescore_of
    try:
        found = await store.session(origin)
        turns = await store.turns(origin)
    except (NotFound, Gone):
        raise _lost(session) from None
    if found.created_at > session.created_at:
        raise _lost(session)
    numbers = {turn.turn_id: number for number, turn in enumerate(turns)}
    for turn in turns[session.counts.turns :]:
        await store.commit(session.trial_id, turn, _row(turn, numbers), now=now)
        await asyncio.sleep(0)  # its texts were packed, and others wait
    retries = {turn.turn_id: turn.retry_of for turn in turns}
    for turn in turns:
        if turn.superseded_by is not None and retries.get(turn.superseded_by) != turn.turn_id:
            await store.supersede(session.trial_id, turn.turn_id, turn.superseded_by)


def _lost(session: Session) -> Conflict:
    return Conflict(
        f"rescore_of: trial {session.rescore_of}, which {session.trial_id} scores anew, is not on record any more",
        field="rescore_of",
    )


def _row(turn: Turn, numbers: dict[str, int]) -> IndexRow:
    """The index row of a borrowed turn. Its digest matches no message, since no request goes on from such a turn."""
    return IndexRow(
        turn_id=turn.turn_id,
        parent=numbers.get(turn.parent_id or "", -1),
        digests=blake2b(turn.turn_id.encode(), digest_size=16).digest(),
        tools=_NO_CONTEXT,
        options=_NO_CONTEXT,
        finish=turn.finish_reason,
        partial=turn.partial,
        path_tokens=turn.prompt_tokens + turn.completion_tokens,
        own_call_ids=list(turn.call_ids.values()),
        completion_tokens=turn.completion_tokens,
        tokenizer=bytes.fromhex(turn.tokenizer),
    )
