"""One turn, from an agent's request to its last event: what `docs/architecture.md` calls "One turn, start to end".

    enter the session > the trial's sampling law > recognise > open a stream on a worker > started > deltas > finish
      > commit > the last event leaves > delivered

I3: the event that ends a choice leaves only after its turn is in the store, one that closes a block only after the turn so far
is, as an open turn that the whole one replaces. Whatever else happens (the client leaves, the
session is completed, the worker dies, the proxy is told to stop), what was sampled until then is committed as a partial turn.
Knows no HTTP: the client is a `Client`, the wire format a `Dialect`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from proxy import metrics, stored
from proxy.contracts.canonical import CanonicalRequest, Job
from proxy.contracts.errors import BudgetSpent, EngineFailed, Gone, StenoError
from proxy.contracts.records import IndexRow, Turn
from proxy.dialects.base import Breaker, Choice, Dialect, Header, Writer
from proxy.hub import Hub
from proxy.plan import Plan, plan
from proxy.record import Facts, turn_of
from proxy.recorder import Recorder, Recording
from proxy.sessions import law, limits
from proxy.store.base import Path
from proxy.streams import Stream
from proxy.transcript import Transcript

log = logging.getLogger(__name__)

ABORT_S = 2.0
"""After an abort, how long a turn may stay stuck in a write to a client that does not read. Seconds."""


class ClientLeft(StenoError):
    """The agent closed its connection. Nobody is told; 499 is nginx's word for it, for the metrics."""

    status = 499
    code = "client_left"


class Stopping(StenoError):
    """The proxy was told to stop, and its streams had their time."""

    status = 503
    code = "proxy_stopped"
    retryable = True


class Client(Protocol):
    """Who asked, as far as a turn cares. Writes after the client has left do nothing."""

    gone: bool

    def ready(self) -> None:
        """The prompt is accepted: from here on silences may be filled with keepalives."""
        ...

    async def write(self, data: bytes) -> None:
        """Some events; the first ones start the response."""
        ...

    async def end(self, data: bytes) -> None:
        """The last events."""
        ...

    async def answer(self, body: bytes) -> None:
        """The whole answer to a request that is not streamed."""
        ...


class Turns:
    """Runs requests. One per proxy."""

    def __init__(
        self,
        recorder: Recorder,
        hub: Hub,
        *,
        default_max_tokens: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.recorder = recorder
        self.hub = hub
        self.clock = clock
        self._default_max_tokens = default_max_tokens
        self._running: set[Request] = set()
        self._draining = False

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, and wait for those in flight; what still runs after `timeout_s` is kept as partial turns."""
        self._draining = True
        waits = [asyncio.ensure_future(request.done.wait()) for request in self._running]
        if waits:
            log.info("waiting up to %.0f s for %d requests", timeout_s, len(waits))
            await asyncio.wait(waits, timeout=timeout_s)
            for request in list(self._running):
                request.abort(Stopping("the proxy stopped"))
            await asyncio.wait(waits, timeout=2 * ABORT_S)
            for wait in waits:
                wait.cancel()

    async def open(self, trial_id: str, dialect: Dialect, asked: CanonicalRequest, client: Client) -> Request:
        """Make the request ready: its session entered, its place found, its streams open. Then `await request.run()`.

        Raises: StenoError, with nothing recorded and nothing sent.
        """
        queued = self.clock()
        if self._draining:
            raise Stopping("the proxy is about to stop")
        recording = await self.recorder.enter(trial_id)
        if asked.after or asked.refers:
            asked = await stored.whole(self.recorder, recording, asked)
        job, changed = self._allowed(recording, asked.job, asked.n)
        found = await plan(self.recorder, recording, job)
        await self._check_room(recording, asked.n)
        request = Request(self, recording, dialect, asked, client, found)
        facts = Facts(dialect.name, asked, changed, queued)
        try:
            for index in range(asked.n):
                request.choices.append(self._open(request, index, facts))
        except BaseException:
            for choice in request.choices:
                choice.stream.cancel("a sibling could not be started")
            raise
        recording.in_flight.add(request)
        self._running.add(request)
        request.start_clock(queued)
        return request

    def forget(self, request: Request) -> None:
        """The request is answered."""
        self._running.discard(request)

    async def _check_room(self, recording: Recording, n: int) -> None:
        """Raises: BudgetSpent: `n` more turns do not fit beside those in flight; with none in flight the session has ended."""
        session = recording.session
        assert session is not None
        running = sum(request.unrecorded()[0] for request in recording.in_flight)
        recorded = max(session.counts.turns, recording.turns)
        spent = limits.without_room(session.limits, session, n, recorded=recorded, running=running)
        if spent is not None and not recording.in_flight:
            raise await self.recorder.end(recording.trial_id, spent)
        if spent is not None:
            raise BudgetSpent(f"this trial's limit {spent} leaves no room for this beside what is running")

    def _allowed(self, recording: Recording, job: Job, n: int) -> tuple[Job, dict[str, object]]:
        """The job under the trial's sampling policy and within its budget, and what that changed."""
        session = recording.session
        assert session is not None
        job, changed = law.apply(session.sampling, False, job)
        sampling = job.sampling
        if sampling.max_tokens is None and self._default_max_tokens is not None:
            sampling = msgspec.structs.replace(sampling, max_tokens=self._default_max_tokens)
        left = limits.tokens_left(session.limits, session, n)
        if left is not None and (sampling.max_tokens is None or sampling.max_tokens > left):
            sampling = msgspec.structs.replace(sampling, max_tokens=max(left, 1))
        if sampling is not job.sampling:
            job = msgspec.structs.replace(job, sampling=sampling)
        return job, changed

    def _open(self, request: Request, index: int, facts: Facts) -> OpenChoice:
        found = request.plan
        job = found.job
        if index and job.sampling.seed is not None:
            # The same seed would draw the same completion n times.
            seed = (job.sampling.seed + index + 2**63) % 2**64 - 2**63
            job = msgspec.structs.replace(job, sampling=msgspec.structs.replace(job.sampling, seed=seed))
        turn_id = os.urandom(6).hex()
        stream = self.hub.open(
            trial_id=request.recording.trial_id,
            turn_id=turn_id,
            attempt=0,
            job=job,
            prefix_ids=found.prefix_ids,
            prefix_messages=found.prefix_messages,
            prefix_finish=found.prefix_finish,
        )
        metrics.STREAMS.inc()
        transcript = Transcript(turn_id, request.dialect.call_prefix, stream.card)
        return OpenChoice(index, stream, transcript, msgspec.structs.replace(facts))


class OpenChoice:
    """One completion of a request while it runs."""

    __slots__ = ("begun", "commit", "facts", "index", "plan", "saving", "stream", "transcript")

    def __init__(self, index: int, stream: Stream, transcript: Transcript, facts: Facts) -> None:
        self.index = index
        self.stream = stream
        self.transcript = transcript
        self.facts = facts
        self.plan: Plan | None = None  # set where it differs from the request's
        self.begun = False
        self.commit: asyncio.Task[None] | None = None
        self.saving: asyncio.Task[None] | None = None  # of the turn while it is open


class Request:
    """One request in flight, with its `n` choices. `recorder.InFlight` for those who end sessions."""

    def __init__(
        self,
        turns: Turns,
        recording: Recording,
        dialect: Dialect,
        asked: CanonicalRequest,
        client: Client,
        found: Plan,
    ) -> None:
        self.recording = recording
        self.dialect = dialect
        self.plan = found
        self.choices: list[OpenChoice] = []
        self.done = asyncio.Event()
        self._turns = turns
        self._asked = asked
        self._client = client
        self._aborted: StenoError | None = None
        self._clock: asyncio.TimerHandle | None = None  # of the wall time
        self._ending: asyncio.Task[None] | None = None
        self._task: asyncio.Task[object] | None = None
        self._writer: Writer | None = None
        self._max_tokens = recording.session.limits.max_tokens if recording.session is not None else None

    def abort(self, error: StenoError) -> None:
        """Stop; keep what was sampled as partial turns; `run` raises `error`. Idempotent, and too late once committing."""
        if self._aborted is not None or self.done.is_set():
            return
        self._aborted = error
        for choice in self.choices:
            choice.stream.cancel(error.code)
        if self._task is not None:
            asyncio.get_running_loop().call_later(ABORT_S, self._unstick, self._task)

    def start_clock(self, now: float) -> None:
        """The trial's wall time ends this request as well, if it comes to that."""
        session = self.recording.session
        left_s = limits.wall_left_s(session.limits, session, now) if session is not None else None
        if left_s is not None:
            self._clock = asyncio.get_running_loop().call_later(left_s, self._time_is_over)

    def _time_is_over(self) -> None:
        self._ending = asyncio.ensure_future(self._end("max_wall_s"))

    async def _end(self, spent: str) -> None:
        """The session ends, and this request with it, whether or not that can be written down now."""
        try:
            self.abort(await self._turns.recorder.end(self.recording.trial_id, spent))
        except StenoError as error:
            self.abort(error)

    def unrecorded(self) -> tuple[int, int]:
        """Turns that are not on record in any form yet, and the tokens sampled for them."""
        tokens = [
            choice.transcript.tokens for choice in self.choices if choice.commit is None and choice.saving is None
        ]
        return len(tokens), sum(tokens)

    def _unstick(self, task: asyncio.Task[object]) -> None:
        if not self.done.is_set():
            task.cancel()

    def broken(self, error: StenoError) -> bytes:
        """The events that end an answer which fails midway; b"": its connection is to be broken instead."""
        if isinstance(self._writer, Breaker):
            return self._writer.broken(error)
        return self.dialect.broken(error)

    async def run(self) -> None:
        """Answer the client. Returns when every choice is committed and its last event has left.

        Raises: StenoError: what the client should be told, if it can still be told; its turns are recorded as partial.
        """
        self._task = asyncio.current_task()
        try:
            await self._run()
        except asyncio.CancelledError:
            if self._aborted is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._aborted from None
        finally:
            if self._clock is not None:
                self._clock.cancel()
            pending = [choice.commit for choice in self.choices if choice.commit and not choice.commit.done()]
            if pending:
                await asyncio.wait(pending)
            if self.recording.running:
                for choice in self.choices:
                    self._turns.recorder.give_up(self.recording, choice.transcript.turn_id)
            metrics.STREAMS.dec(len(self.choices))
            self.recording.in_flight.discard(self)
            self._turns.forget(self)
            self.done.set()

    async def _run(self) -> None:
        header = Header(
            answer_id=self.choices[0].transcript.turn_id,
            created=int(self.choices[0].facts.queued),
            model=self._asked.model or self.choices[0].stream.card.name,
        )
        if self._asked.stream:
            self._writer = self.dialect.writer(self._asked, header)
        if len(self.choices) == 1:
            finished = [await self._choice(self.choices[0])]
        else:
            finished = await self._siblings()
        if self._writer is None:
            await self._client.answer(self.dialect.answer(self._asked, header, finished))
            if self._client.gone:
                await self._undelivered()
        elif len(finished) == 1:
            await self._client.end(self._last_of(finished[0]) + self._writer.end(finished))
        else:
            await self._client.end(self._writer.end(finished))

    async def _siblings(self) -> list[Choice]:
        tasks = [asyncio.ensure_future(self._sibling(choice)) for choice in self.choices]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _sibling(self, open_choice: OpenChoice) -> Choice:
        choice = await self._choice(open_choice)
        if self._writer is not None:
            await self._client.write(self._last_of(choice))
        return choice

    def _last_of(self, choice: Choice) -> bytes:
        """The events that end a choice, after the first one where nothing was ever said."""
        assert self._writer is not None
        return self._begin(self.choices[choice.index]) + self._writer.finish(choice)

    def _begin(self, choice: OpenChoice) -> bytes:
        """The events before a choice's first, once."""
        started = choice.transcript.started
        if choice.begun or started is None or self._writer is None:
            return b""
        choice.begun = True
        return self._writer.begin(choice.index, started.prompt_tokens, started.cached_tokens)

    async def _choice(self, choice: OpenChoice) -> Choice:
        """Stream one completion and commit it."""
        transcript = choice.transcript
        try:
            while transcript.finish is None:
                await self._take(choice, await choice.stream.next())
            if transcript.finish.reason in ("cancelled", "error"):
                raise self._aborted or EngineFailed(f"the worker ended the turn: {transcript.finish.reason}")
            if self._aborted is not None:
                raise self._aborted
        except asyncio.CancelledError:
            error = self._aborted or Stopping("the proxy stopped")
            choice.stream.cancel(error.code)
            await self._committed(choice, error)
            raise
        except StenoError as error:
            choice.stream.cancel(error.code)
            await self._committed(choice, error)
            raise
        await self._committed(choice, None)
        return transcript.choice(choice.index)

    async def _take(self, choice: OpenChoice, events: list) -> None:  # type: ignore[type-arg]
        """What has arrived together leaves together."""
        transcript, facts = choice.transcript, choice.facts
        out: list[bytes] = []
        for event in events:
            shown = transcript.tokens
            piece = transcript.take(event)
            if piece is None:
                if transcript.started is event:
                    await self._begun(choice)
                continue
            facts.last_token = self._turns.clock()
            if facts.first_token is None:
                facts.first_token = facts.last_token
            if self._writer is not None:
                if self._writer.closes(choice.index, piece):
                    if out:
                        await self._client.write(b"".join(out))
                        out.clear()
                    if not self._client.gone:
                        transcript.delivered = shown
                    await self._saved(choice)
                data = self._writer.piece(choice.index, piece)
                if data:
                    out.append(data if choice.begun else self._begin(choice) + data)
        if out:
            await self._client.write(b"".join(out))
        if self._writer is not None and not self._client.gone:
            transcript.delivered = transcript.tokens
        if self._max_tokens is not None and self._aborted is None:
            await self._check_tokens(self._max_tokens)

    async def _check_tokens(self, limit: int) -> None:
        """Each turn by itself is clamped to what was left when it began; those that run together may go beyond it together, by
        what is on its way from the workers."""
        session = self.recording.session
        assert session is not None
        running = sum(request.unrecorded()[1] for request in self.recording.in_flight)
        if session.counts.completion_tokens + running > limit:
            await self._end("max_tokens")

    async def _begun(self, choice: OpenChoice) -> None:
        """The worker has the prompt."""
        started, card, session = choice.transcript.started, choice.stream.card, self.recording.session
        assert started is not None and session is not None
        choice.facts.started = self._turns.clock()
        if self.plan.prefix_ids and not started.kept_tokens:
            choice.plan = self.plan.rerooted(started)
        if started.kept_tokens not in (0, len(self.plan.prefix_ids) // 4):
            raise EngineFailed(
                f"the worker kept {started.kept_tokens} of {len(self.plan.prefix_ids) // 4} recorded tokens"
            )
        marks = [mark for mark in ("synthetic", "text_only") if getattr(card, mark) and mark not in session.marks]
        if marks:
            await self._turns.recorder.store.add_marks(self.recording.trial_id, marks)
            session.marks.extend(marks)
        self._client.ready()

    # -- the record

    async def _saved(self, choice: OpenChoice) -> None:
        """Have the turn so far on record before a block closes. Raises: as `Recorder.commit`."""
        choice.saving = asyncio.ensure_future(self._save(choice))
        await asyncio.shield(choice.saving)

    async def _save(self, choice: OpenChoice) -> None:
        choice.transcript.closed = True
        turn, row = self._record(choice, None, still_open=True)
        found = choice.plan or self.plan
        if not found.settled:
            choice.plan = dataclasses.replace(found, fork_reason=turn.fork_reason, settled=True)
        await self._turns.recorder.commit(self.recording, turn, row)

    async def _committed(self, choice: OpenChoice, error: StenoError | None) -> None:
        """Commit, to the end even if this task is cancelled meanwhile: half a commit is none.

        Raises: what the commit failed with; nothing where the turn has failed already, since `error` is raised then.
        """
        if choice.transcript.started is None or choice.commit is not None:
            return
        choice.commit = asyncio.ensure_future(self._commit(choice, error))
        await asyncio.shield(choice.commit)

    async def _commit(self, choice: OpenChoice, error: StenoError | None) -> None:
        recorder, transcript = self._turns.recorder, choice.transcript
        if choice.saving is not None and not choice.saving.done():
            await asyncio.wait({choice.saving})
        if choice.saving is not None and error is not None:
            choice.saving.exception()  # `error` is what the client is told
        turn, row = self._record(choice, error)
        try:
            try:
                turn.index = await recorder.commit(self.recording, turn, row)
                self._keep_path(choice, turn)
            except Gone as gone:
                if turn.partial:
                    raise
                # Frozen while this turn ran, at another replica or in the instant before: it was in flight, so it is partial.
                turn, row = self._record(choice, gone)
                turn.index = await recorder.commit(self.recording, turn, row)
                raise
        except StenoError as failure:
            if turn.index < 0:
                metrics.UNRECORDED_TOKENS.labels(failure.code).inc(transcript.tokens)
                log.error(
                    "turn %s could not be recorded, %d tokens: %s", turn.turn_id, transcript.tokens, failure.message
                )
            if error is None:
                raise
        finally:
            if turn.index >= 0:
                self._count(choice, turn)

    def _record(
        self, choice: OpenChoice, error: StenoError | None, *, still_open: bool = False
    ) -> tuple[Turn, IndexRow]:
        return turn_of(
            self.recording, choice.index, choice.stream, choice.plan or self.plan, choice.transcript, choice.facts, error,
            self._delivered(choice, error), still_open,
        )  # fmt: skip

    def _delivered(self, choice: OpenChoice, error: StenoError | None) -> int:
        """Tokens that the client has. An answer in one piece leaves right after its commit: it counts as if it had, rather than
        being written a second time, and `_undelivered` takes back what did not leave."""
        if self._writer is not None or error is not None:
            return choice.transcript.delivered
        return 0 if self._client.gone else choice.transcript.tokens

    async def _undelivered(self) -> None:
        """The client of an answer in one piece had left by the time it was committed. A failure to note it is only counted."""
        for choice in self.choices:
            try:
                await self._turns.recorder.store.mark_delivered(self.recording.trial_id, choice.transcript.turn_id, 0)
            except StenoError as error:
                metrics.STORE_ERRORS.labels("mark_delivered").inc()
                log.warning("turn %s: delivery not noted: %s", choice.transcript.turn_id, error.message)

    def _keep_path(self, choice: OpenChoice, turn: Turn) -> None:
        """Where the conversation stands now: its next turn begins with this."""
        found = choice.plan or self.plan
        prefix = found.prefix_ids if turn.parent_id is not None else b""
        ids = b"".join((prefix, turn.new_prompt_ids, turn.completion_ids))
        self._turns.recorder.keep_path(self.recording, turn.index, Path(ids, turn.reply), found.parent)

    def _count(self, choice: OpenChoice, turn: Turn) -> None:
        dialect, tokens = self.dialect.name, choice.transcript.tokens
        metrics.TURNS.labels(dialect, turn.finish_reason).inc()
        metrics.PROMPT_TOKENS.inc(len(turn.new_prompt_ids) // 4)
        metrics.COMPLETION_TOKENS.inc(tokens)
        bent = sum(end - start for start, end in turn.constrained)
        if bent:
            metrics.CONSTRAINED_TOKENS.inc(bent)
        how = turn.fork_reason or ("continued" if turn.parent_id else "root")
        metrics.RECOGNISED.labels(dialect, str(how)).inc()
        if choice.facts.first_token is not None:
            metrics.TTFT.labels(dialect).observe(choice.facts.first_token - choice.facts.queued)
