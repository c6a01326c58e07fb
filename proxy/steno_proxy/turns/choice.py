"""One completion of a request on its way to the record: what has come of it, and the commits that make it durable (I3).

A turn is committed once it has ended, however it did, and before that, as an open turn, when a block of it is about to close.
Knows nothing of who listens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from steno.contracts.errors import Gone, StenoError
from steno.contracts.records import IndexRow, Turn, tokenizer_key
from steno.contracts.wire.frames import Delta, Started
from steno_proxy import metrics
from steno_proxy.dialects.base import Choice, Piece
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.session_state import Recording
from steno_proxy.store.interface import RecordedOtherwise, TokenPath
from steno_proxy.turns.continuation import Plan
from steno_proxy.turns.transcript import ChoiceTranscript
from steno_proxy.turns.turn_record import TurnFacts, turn_of
from steno_proxy.workers.placement import Order
from steno_proxy.workers.stream import Stream

log = logging.getLogger(__name__)


@dataclass(slots=True)
class FullEngines:
    """Engines that refused a turn because they were full, since its last attempt that ended in another way.

    processes: those asked since the last pause. since: when the first one refused, by the event loop's clock; None: none has.
    pause_s: of the last pause.
    """

    processes: frozenset[str] = frozenset()
    since: float | None = None
    pause_s: float = 0.0


class OpenChoice:
    """One completion while it runs.

    order, stream: of the attempt that runs.
    failures: failed attempts that count towards MAX_ATTEMPTS (`failover.py`). full: engines that refused it as full.
    plan: the request's plan, until the worker's answer or a commit changes it.
    finished: what its clients are to see; set once its whole turn is on record. commit, saving: the tasks that write the ended
    turn, and the open one. recorded: it has ended, and is on record. begun_again: an earlier attempt is on record by itself.
    """

    __slots__ = (
        "_in_one_piece", "_recorder", "_recording", "begun_again", "commit", "facts", "failures", "finished", "full", "index",
        "order", "plan", "recorded", "saving", "stream", "transcript",
    )  # fmt: skip

    def __init__(
        self, recorder: Recorder, recording: Recording, index: int, order: Order, stream: Stream, transcript: ChoiceTranscript,
        facts: TurnFacts, plan: Plan,
    ) -> None:  # fmt: skip
        self._recorder = recorder
        self._recording = recording
        self.index = index
        self.order = order
        self.stream = stream
        self.transcript = transcript
        self.facts = facts
        self.plan = plan
        self.finished: Choice | None = None
        self.failures = 0
        self.full = FullEngines()
        self._in_one_piece = False
        self.commit: asyncio.Task[None] | None = None
        self.saving: asyncio.Task[None] | None = None
        self.recorded = self.begun_again = False

    @property
    def prompt_tokens(self) -> int:
        """Of the whole prompt."""
        return self._started.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self._started.cached_tokens

    @property
    def prompt_ids(self) -> bytes:
        """Of the whole prompt, int32 LE, once the worker has said which it is."""
        return self.plan.prefix.ids[: 4 * self._started.kept_tokens] + self._started.new_ids

    @property
    def _started(self) -> Started:
        assert self.transcript.started is not None
        return self.transcript.started

    def pieces(self) -> Sequence[Piece] | None:
        """What has come so far, as pieces, for a client that joins now. None: it has not begun."""
        return self.transcript.pieces() if self.transcript.started is not None else None

    def finish(self, now: float) -> Choice:
        """Return what clients are to see of it; its whole turn is on record. now: its end if it has no token, Unix seconds."""
        finished = self.finished = self.transcript.choice(self.index)
        finished.ended = self.facts.last_token or now
        if self.facts.asked.returns_ids:
            finished.ids, finished.prompt_ids = bytes(self.transcript.ids), self.prompt_ids
        return finished

    # -- attempts (failover.py)

    @property
    def tokenizer(self) -> bytes:
        """The key of the tokenizer that its ids are of."""
        return tokenizer_key(self.stream.card.tokenizer_digest)

    def moved(self, order: Order, stream: Stream) -> None:
        """Another worker has it."""
        self.transcript.taken_over(self.stream.worker_id, stream.card)
        if not self.transcript.is_empty():
            stream.mixed_kv = self.stream.mixed_kv
        self.order, self.stream = order, stream

    async def restart(self, error: StenoError, plan: Plan) -> None:
        """Begin again from nothing. What was sampled is recorded as a broken turn of its own (I4). That turn supersedes what this
        one would have superseded, and this one supersedes that turn. Raises: as `Recorder.commit`."""
        transcript = self.transcript
        facts = msgspec.structs.replace(self.facts, answer_id=None, request=None)
        lost = OpenChoice(
            self._recorder, self._recording, self.index, self.order, self.stream, transcript, facts, self.plan
        )
        fresh = ChoiceTranscript(transcript.turn_id, transcript.call_prefix, self.stream.card)
        transcript.turn_id = os.urandom(6).hex()
        self.transcript, self.plan = fresh, plan
        await lost.committed(error)
        self.begun_again = self.begun_again or lost.recorded
        repeats = transcript.turn_id if lost.recorded else self.facts.retry_of
        self.facts = msgspec.structs.replace(self.facts, retry_of=repeats, first_token=None, last_token=None)

    # -- the record

    @property
    def closed(self) -> bool:
        """A block of the answer is about to close, or has been closed."""
        return self.saving is not None

    def note_delivered(self, tokens: int) -> None:
        """So many of its tokens have left for a client, in events."""
        self.transcript.delivered = tokens

    async def saved(self) -> None:
        """Have the turn so far on record, before a block closes. Raises: as `Recorder.commit`."""
        if self.commit is not None:
            await asyncio.shield(self.commit)
            return
        self.saving = _to_its_end(self._save(self.saving))
        await asyncio.shield(self.saving)

    async def _save(self, before: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():
            await asyncio.wait({before})
        turn, row = self._record(None, self.transcript.delivered, still_open=True)
        if not self.plan.fork_is_final:
            self.plan = dataclasses.replace(self.plan, fork_reason=turn.fork_reason, fork_is_final=True)
        await self._recorder.commit(self._recording, turn, row, self.facts.request)

    def cut_off(self, reason: str) -> None:
        """Cancel the generation. Tokens that had arrived still belong to the turn (I4), though no client gets them. If the turn
        has not begun (its `Started` was not taken yet, or had a wrong prompt (I2)), they are counted as late."""
        if self.transcript.started is None or self.facts.started is None:
            self.stream.discard(reason)
            return
        self.stream.cancel(reason)
        for event in self.stream.leftover():
            if type(event) is Delta:
                self.transcript.take(event)

    async def committed(self, error: StenoError | None, *, in_one_piece: bool = False) -> None:
        """Commit the turn. The commit runs to its end even if this task is cancelled meanwhile. A turn that failed before its
        first token with a retryable error is not recorded.

        Args: in_one_piece: a client gets the whole answer right after this. All its tokens are recorded as delivered, which saves
            a second write; `undelivered` takes that back.
        Raises: the error of the commit; nothing if `error` is given, since the caller raises that.
        """
        if self.transcript.started is None or self.commit is not None:
            return
        if error is not None and error.retryable and self.saving is None and self.transcript.is_empty():
            return  # nothing was sampled, and a second try shall not be its sibling
        self._in_one_piece = in_one_piece
        self.commit = _to_its_end(self._commit(error, in_one_piece))
        await asyncio.shield(self.commit)

    async def _commit(self, error: StenoError | None, in_one_piece: bool) -> None:
        recorder, transcript = self._recorder, self.transcript
        if self.saving is not None and not self.saving.done():
            await asyncio.wait({self.saving})
        turn, row = self._record(error, transcript.tokens if in_one_piece else transcript.delivered)
        try:
            try:
                turn.index = await recorder.commit(self._recording, turn, row, self.facts.request)
                self._keep_path(turn)
            except Gone as gone:
                if turn.partial:
                    raise
                # Frozen while this turn ran, at another replica or in the instant before: it was in flight, so it is partial.
                turn, row = self._record(gone, transcript.delivered)
                turn.index = await recorder.commit(self._recording, turn, row, self.facts.request)
                raise
        except RecordedOtherwise as other:
            self._count_late(other.recorded_tokens)
            if error is None:
                raise
        except StenoError as failure:
            if turn.index < 0:
                metrics.UNRECORDED_TOKENS.labels(failure.code).inc(transcript.tokens)
                # A session that is deleted takes what runs in it along.
                level = logging.INFO if isinstance(failure, Gone) else logging.ERROR
                words = "can't record turn %s (%d tokens): %s"
                log.log(level, words, turn.turn_id, transcript.tokens, failure.message)
            if error is None:
                raise
        finally:
            self.recorded = turn.index >= 0
            if self.recorded:
                self._count(turn)
                self._trace(turn)

    def _record(self, error: StenoError | None, delivered: int, *, still_open: bool = False) -> tuple[Turn, IndexRow]:
        return turn_of(self._recording, self, error, delivered, still_open)

    async def undelivered(self) -> None:
        """Note that the client did not get the recorded turn in one piece: it has left, or the request has failed. Does nothing
        if the turn was not committed as such an answer. A failure to note it is only counted and logged."""
        if not self._in_one_piece or self.commit is None or self.commit.exception() is not None:
            return
        delivered = self.transcript.delivered  # in events
        try:
            await self._recorder.store.mark_delivered(self._recording.trial_id, self.transcript.turn_id, delivered)
        except StenoError as error:
            metrics.STORE_ERRORS.labels("mark_delivered").inc()
            log.warning("turn %s: can't record how much was delivered: %s", self.transcript.turn_id, error.message)

    def _keep_path(self, turn: Turn) -> None:
        """Keep the path that this turn ends in the cache: the next turn's prompt begins with its ids."""
        prefix = self.plan.prefix.ids if turn.parent_id is not None else b""
        ids = b"".join((prefix, turn.new_prompt_ids, turn.completion_ids))
        self._recorder.keep_path(self._recording, turn.turn_id, TokenPath(ids, turn.reply), turn.parent_id)

    def _trace(self, turn: Turn) -> None:
        session = self._recording.session
        if self._recorder.traces is not None and session is not None:
            facts = self.facts
            self._recorder.traces.turn(session, turn, traceparent=facts.asked.traceparent, moves=facts.moves)

    def _count_late(self, recorded_tokens: int) -> None:
        """Count the tokens of a turn that its client has gone on from at another replica: those not on record then are late."""
        tokens = self.transcript.tokens
        late = max(tokens - recorded_tokens, 0)
        metrics.COMPLETION_TOKENS.inc(tokens - late)
        metrics.LATE_TOKENS.inc(late)
        words = "turn %s: %d of its %d tokens came after its client had gone on from it at another replica"
        log.info(words, self.transcript.turn_id, late, tokens)

    def _count(self, turn: Turn) -> None:
        dialect, tokens = turn.dialect, self.transcript.tokens
        metrics.TURNS.labels(dialect, turn.finish_reason).inc()
        metrics.PROMPT_TOKENS.inc(len(turn.new_prompt_ids) // 4)
        metrics.COMPLETION_TOKENS.inc(tokens)
        bent = sum(end - start for start, end in turn.constrained)
        if bent:
            metrics.CONSTRAINED_TOKENS.inc(bent)
        how = turn.fork_reason or ("continued" if turn.parent_id else "root")
        metrics.RECOGNISED.labels(dialect, str(how)).inc()
        if self.plan.echoed_as is not None:
            metrics.ECHOES.labels(dialect, str(self.plan.echoed_as)).inc()
        if self.facts.first_token is not None:
            metrics.TTFT.labels(dialect).observe(max(0.0, self.facts.first_token - self.facts.queued))


def _to_its_end(write: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a write as a task that goes on if its caller is cancelled. An error is for the caller: if nobody awaits the task any
    more, it is dropped, since the store and `_commit` have logged it."""
    task = asyncio.ensure_future(write)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
