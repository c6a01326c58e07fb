"""An answer given again from its record, in its dialect, streamed or not: the same ids, the same text, nothing sampled. One
`LogReader` is told the record; there is no `AnswerLog`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from steno.contracts.chat import CanonicalRequest
from steno.contracts.errors import StenoError
from steno.contracts.records import Turn
from steno_proxy import metrics
from steno_proxy.dialects.base import Choice, Dialect, Header
from steno_proxy.store.interface import SessionStore
from steno_proxy.turns.answer_log import LogReader
from steno_proxy.turns.interfaces import TurnClient
from steno_proxy.turns.transcript import pieces_of


class Replay:
    """`RunningAnswer` from the record. turns: whole, in order of their choices. prefix_ids: the ids of the parent's path,
    for turns that have a parent."""

    def __init__(
        self,
        store: SessionStore,
        trial_id: str,
        dialect: Dialect,
        asked: CanonicalRequest,
        client: TurnClient,
        turns: Sequence[Turn],
        prefix_ids: bytes = b"",
    ) -> None:
        self.done = asyncio.Event()
        self._store = store
        self._trial_id = trial_id
        self._dialect = dialect
        self._asked = asked
        self._client = client
        self._turns = turns
        self._prefix_ids = prefix_ids

    def abort(self, error: StenoError) -> None:
        """Nothing runs, and nothing is lost."""

    def broken(self, error: StenoError) -> bytes:
        return self._dialect.broken(error)

    async def run(self) -> None:
        try:
            first = self._turns[0]
            header = Header(first.turn_id, int(first.timings.queued), self._asked.model or first.served_model)
            choices = [self._choice(i, turn) for i, turn in enumerate(self._turns)]
            reader = LogReader(self._dialect, self._asked, self._client, header)
            for choice in choices:
                _say(reader, choice)
            reader.end(choices)
            await reader.flush()
            if not self._client.gone:
                await self._note_delivery()
        finally:
            self.done.set()

    def _choice(self, index: int, turn: Turn) -> Choice:
        choice = Choice.on_record(index, turn)
        if self._asked.returns_ids:
            said = len(turn.new_prompt_ids) - 4 * (turn.replayed or 0)
            choice.prompt_ids = (self._prefix_ids if turn.parent_id is not None else b"") + turn.new_prompt_ids[:said]
        return choice

    async def _note_delivery(self) -> None:
        """Record that the client has been sent all tokens of the turns. A failure to note it is only counted."""
        for turn in self._turns:
            if turn.delivered is not None and turn.delivered >= turn.completion_tokens:
                continue
            try:
                await self._store.mark_delivered(self._trial_id, turn.turn_id, turn.completion_tokens)
            except StenoError:
                metrics.STORE_ERRORS.labels("mark_delivered").inc()


def _say(reader: LogReader, choice: Choice) -> None:
    """A choice from its beginning to its end. It is on record, so nothing has to wait (I3)."""
    for piece in pieces_of(choice.message, choice.ids):
        reader.closes(choice.index, piece)
        reader.piece(choice.index, piece, choice)
    reader.finish(choice)
