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
import sys
import time
from collections.abc import Callable

import msgspec

from proxy import metrics, retries, stored
from proxy.answering import Answering, Client, ClientLeft, Stopping
from proxy.contracts.canonical import CanonicalRequest, Job
from proxy.contracts.errors import BudgetSpent, EngineFailed, Gone, StenoError
from proxy.contracts.records import IndexRow, Turn
from proxy.dialects.base import Breaker, Choice, Dialect, Header, Piece, Writer
from proxy.hub import Hub
from proxy.joined import Joined
from proxy.plan import Plan, plan
from proxy.record import Facts, turn_of
from proxy.recorder import Recorder, Recording
from proxy.replay import Replay
from proxy.retries import Sought
from proxy.sessions import law, limits
from proxy.store.base import Path
from proxy.streams import Stream
from proxy.transcript import Transcript

log = logging.getLogger(__name__)

ABORT_S = 2.0
"""After an abort, how long a turn may stay stuck in a write to a client that does not read. Seconds."""
STALL_S = 2.0
"""How long the client that came first may hold up those who joined its request, once. Seconds."""


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
        self._refusals = retries.Refusals()

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

    async def open(
        self, trial_id: str, dialect: Dialect, asked: CanonicalRequest, client: Client, *, again: bool = False
    ) -> Answering:
        """Make the request ready: its session entered, its place found, its streams open. Then `await` its `run()`.

        Args: again: the client says that it has sent this before (`retries.py`).
        Raises: StenoError, with nothing recorded and nothing sent.
        """
        queued = self.clock()
        if self._draining:
            raise Stopping("the proxy is about to stop")
        recording = await self.recorder.enter(trial_id, again=again)
        if asked.after or asked.refers:
            asked = await stored.whole(self.recorder, recording, asked)
        job, changed = self._allowed(recording, asked.job, asked.n)
        found = await plan(self.recorder, recording, job)
        superseded: dict[int, str] = {}
        if again:
            earlier = await self._earlier(recording, dialect, Sought(dialect.name, asked, found), client)
            if not isinstance(earlier, dict):
                return earlier
            superseded = earlier
            await self.recorder.check(recording)
        await self._check_room(recording, asked.n)
        request = Request(self, recording, dialect, asked, client, found)
        facts = Facts(dialect.name, asked, changed, queued)
        try:
            for index in range(asked.n):
                facts.retry_of = superseded.get(index)
                request.choices.append(self._open(request, index, facts))
        except BaseException as error:
            for choice in request.choices:
                choice.stream.cancel("a sibling could not be started")
            if isinstance(error, StenoError):
                self.refused(request)
            raise
        recording.in_flight.add(request)
        self._running.add(request)
        request.start_clock(queued)
        return request

    async def _earlier(
        self, recording: Recording, dialect: Dialect, sought: Sought, client: Client
    ) -> Answering | dict[int, str]:
        """What answers a retry: a request that runs, or a recorded answer; or the turns, by choice, that a new one supersedes."""
        trial_id, count = recording.trial_id, metrics.RETRIES.labels
        if self._refusals.take(sought.key(trial_id), self.clock()):
            count(dialect.name, "new").inc()
            return {}
        running = [one for one in recording.in_flight if isinstance(one, Request) and one.sought.same(sought)]
        for request in sorted(running, key=Request.urgency):
            joined = request.join(sought.asked, client)
            if joined is not None:
                count(dialect.name, "joined").inc()
                return joined
            await request.done.wait()
        earlier = await retries.on_record(self.recorder, recording, sought, self.clock())
        if earlier is None:
            count(dialect.name, "new").inc()
            return {}
        if earlier.whole:
            count(dialect.name, "replayed").inc()
            turns = [earlier.turns[choice] for choice in range(sought.asked.n)]
            return Replay(self.recorder.store, trial_id, dialect, sought.asked, client, turns)
        count(dialect.name, "superseded").inc()
        return {choice: turn.turn_id for choice, turn in earlier.turns.items()}

    def refused(self, request: Request) -> None:
        """The request ended with nothing on record. If it was no retry of what is, its own retry is not either."""
        if not any(choice.facts.retry_of for choice in request.choices):
            self._refusals.note(request.sought.key(request.recording.trial_id), self.clock())

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
        first = request.choices[0].transcript.turn_id if index else turn_id
        facts = msgspec.structs.replace(facts, answer_id=first if request.sought.asked.n > 1 else None)
        return OpenChoice(index, stream, transcript, facts)


class OpenChoice:
    """One completion of a request while it runs."""

    __slots__ = ("begun", "commit", "facts", "finished", "index", "plan", "saving", "stream", "transcript")

    def __init__(self, index: int, stream: Stream, transcript: Transcript, facts: Facts) -> None:
        self.index = index
        self.stream = stream
        self.transcript = transcript
        self.facts = facts
        self.plan: Plan | None = None  # set where it differs from the request's
        self.begun = False
        self.finished: Choice | None = None  # once it is on record, whole
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
        self.sought = Sought(dialect.name, asked, found)
        self._turns = turns
        self._asked = asked
        self._client = client
        self._aborted: StenoError | None = None
        self._clock: asyncio.TimerHandle | None = None  # of the wall time
        self._ending: asyncio.Task[None] | None = None
        self._task: asyncio.Task[object] | None = None
        self._writer: Writer | None = None
        self._joined: list[Joined] = []
        self._shared = False  # somebody has joined
        self._telling = False  # a write to the client waits for it to read
        self._over = False  # all is on record, and no one can join
        self._max_tokens = recording.session.limits.max_tokens if recording.session is not None else None

    def abort(self, error: StenoError) -> None:
        """Stop; keep what was sampled as partial turns; `run` raises `error`. Idempotent, and too late once committing. A client
        that leaves does not stop it for those who joined."""
        if self._aborted is not None or self.done.is_set() or (isinstance(error, ClientLeft) and self._joined):
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
            failure = sys.exception()
            for joined in self._joined:
                joined.fail(
                    failure if isinstance(failure, StenoError) else Stopping("the request that was joined failed")
                )
            if failure is not None and not any(choice.commit or choice.saving for choice in self.choices):
                self._turns.refused(self)
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

    def _header(self) -> Header:
        first = self.choices[0]
        model = self._asked.model or first.stream.card.name
        return Header(first.transcript.turn_id, int(first.facts.queued), model)

    async def _run(self) -> None:
        header = self._header()
        if self._asked.stream:
            self._writer = self.dialect.writer(self._asked, header)
        if len(self.choices) == 1:
            finished = [await self._choice(self.choices[0])]
        else:
            finished = await self._siblings()
        self._over = True
        for joined in self._joined:
            joined.end(finished)
        if self._writer is None:
            await self._client.answer(self.dialect.answer(self._asked, header, finished))
            if self._client.gone and not self._shared:
                await self._undelivered()
        elif len(finished) == 1:
            await self._client.end(self._last_of(finished[0]) + self._writer.end(finished))
        else:
            await self._client.end(self._writer.end(finished))

    # -- retries of a request that runs

    def urgency(self) -> tuple[bool, float]:
        """Sorts the requests that a retry may mean: first those that have lost their client, then the oldest."""
        return not (self._client.gone or self._telling), self.choices[0].facts.queued

    def join(self, asked: CanonicalRequest, client: Client) -> Joined | None:
        """One more client for this answer, from its beginning. None: this one is about to end, and `done` tells when it has.

        A client that a write waits for reads no longer, and has asked again: the turn ends there, and its retry is a new attempt.
        """
        if self._telling and not self._joined:
            self.abort(ClientLeft("the client asked again"))
        if self._over or self._aborted is not None:
            return None
        joined = Joined(self, self.dialect, asked, client, self._header())
        for choice in self.choices:
            if choice.transcript.started is not None:
                joined.catch_up(choice.index, choice.transcript.started, choice.transcript.pieces())
            if choice.finished is not None:
                joined.finish(choice.finished)
        self._joined.append(joined)
        self._shared = True
        return joined

    def leave(self, joined: Joined) -> None:
        """This client has its answer, or has left."""
        self._joined.remove(joined)
        if self._client.gone and not self._joined and not self._over:
            self.abort(ClientLeft("the client closed the connection"))

    async def saved(self, index: int) -> None:
        """What has come so far of a choice is on record. Raises: as `Recorder.commit`."""
        choice = self.choices[index]
        if choice.commit is not None:
            await asyncio.shield(choice.commit)
        else:
            await self._saved(choice)

    async def _tell(self, data: bytes) -> None:
        """Some events to the client that came first. It must not hold up those who joined."""
        self._telling = True
        try:
            if self._joined:
                async with asyncio.timeout(STALL_S):
                    await self._client.write(data)
            else:
                await self._client.write(data)
        except TimeoutError:
            self._client.gone = True
        finally:
            self._telling = False

    def _has_whole(self) -> bool:
        """Whether somebody gets the answer in one piece, which leaves right after the commit."""
        pieces = self._writer is None and not self._client.gone
        return pieces or any(not joined.streams and not joined.client.gone for joined in self._joined)

    def _is_read(self) -> bool:
        """Whether somebody gets events as they come."""
        events = self._writer is not None and not self._client.gone
        return events or any(joined.streams and not joined.client.gone for joined in self._joined)

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
            await self._tell(self._last_of(choice))
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
        choice.finished = transcript.choice(choice.index)
        for joined in self._joined:
            joined.finish(choice.finished)
        return choice.finished

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
            if self._writer is not None or self._joined:
                listening = tuple(self._joined)  # those who join while this waits have it from the transcript
                if self._close(choice.index, piece, listening):
                    if out:
                        await self._tell(b"".join(out))
                        out.clear()
                    if self._is_read():
                        transcript.delivered = shown
                    await self._saved(choice)
                for joined in listening:
                    assert transcript.started is not None
                    joined.piece(choice.index, piece, transcript.started)
                data = self._writer.piece(choice.index, piece) if self._writer is not None else b""
                if data:
                    out.append(data if choice.begun else self._begin(choice) + data)
        if out:
            await self._tell(b"".join(out))
        if self._is_read():
            transcript.delivered = transcript.tokens
        if self._max_tokens is not None and self._aborted is None:
            await self._check_tokens(self._max_tokens)

    def _close(self, index: int, piece: Piece, listening: tuple[Joined, ...]) -> bool:
        """Whether the piece closes a block for anybody. Each writer is asked, once."""
        closes = self._writer is not None and self._writer.closes(index, piece)
        for joined in listening:
            closes = joined.closes(index, piece) or closes
        return closes

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
        for joined in self._joined:
            joined.accept()

    # -- the record

    async def _saved(self, choice: OpenChoice) -> None:
        """Have the turn so far on record before a block closes. Raises: as `Recorder.commit`."""
        choice.saving = asyncio.ensure_future(self._save(choice, choice.saving))
        await asyncio.shield(choice.saving)

    async def _save(self, choice: OpenChoice, before: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():
            await asyncio.wait({before})
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
        if error is None and self._has_whole():
            return choice.transcript.tokens
        return choice.transcript.delivered

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
