"""An answer given again from its record, in its dialect, streamed or not: the same ids, the same text, nothing sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from proxy import metrics
from proxy.answering import Client
from proxy.contracts.canonical import CanonicalRequest
from proxy.contracts.errors import StenoError
from proxy.contracts.records import Turn
from proxy.dialects.base import Choice, Dialect, Header
from proxy.store.base import SessionStore
from proxy.transcript import pieces_of


class Replay:
    """`Answering` from the record. turns: whole, in order of their choices."""

    def __init__(
        self,
        store: SessionStore,
        trial_id: str,
        dialect: Dialect,
        asked: CanonicalRequest,
        client: Client,
        turns: Sequence[Turn],
    ) -> None:
        self.done = asyncio.Event()
        self._store = store
        self._trial_id = trial_id
        self._dialect = dialect
        self._asked = asked
        self._client = client
        self._turns = turns

    def abort(self, error: StenoError) -> None:
        """Nothing runs, and nothing is lost."""

    def broken(self, error: StenoError) -> bytes:
        return self._dialect.broken(error)

    async def run(self) -> None:
        try:
            first = self._turns[0]
            header = Header(first.turn_id, int(first.timings.queued), self._asked.model or first.served_model)
            choices = [_choice(i, turn) for i, turn in enumerate(self._turns)]
            if self._asked.stream:
                await self._client.end(self._stream(header, choices))
            else:
                await self._client.answer(self._dialect.answer(self._asked, header, choices))
            if not self._client.gone:
                await self._note_delivery()
        finally:
            self.done.set()

    def _stream(self, header: Header, choices: Sequence[Choice]) -> bytes:
        """All events. Everything is on record, so nothing has to wait (I3)."""
        writer = self._dialect.writer(self._asked, header)
        out = []
        for choice in choices:
            out.append(writer.begin(choice.index, choice.prompt_tokens, choice.cached_tokens))
            for piece in pieces_of(choice.message):
                writer.closes(choice.index, piece)
                out.append(writer.piece(choice.index, piece))
            out.append(writer.finish(choice))
        return b"".join([*out, writer.end(choices)])

    async def _note_delivery(self) -> None:
        """The client has now what it had not. A failure to note it is only counted."""
        for turn in self._turns:
            if turn.delivered is not None and turn.delivered >= turn.completion_tokens:
                continue
            try:
                await self._store.mark_delivered(self._trial_id, turn.turn_id, turn.completion_tokens)
            except StenoError:
                metrics.STORE_ERRORS.labels("mark_delivered").inc()


def _choice(index: int, turn: Turn) -> Choice:
    return Choice(
        index=index,
        message=turn.reply,
        finish_reason=turn.finish_reason,
        prompt_tokens=turn.prompt_tokens,
        completion_tokens=turn.completion_tokens,
        cached_tokens=turn.cached_tokens,
        stop=turn.stop,
        reasoning_tokens=turn.reasoning_tokens,
    )
