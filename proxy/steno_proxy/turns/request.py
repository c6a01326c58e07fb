"""One request in flight: streams its completions to its clients, and commits them ("One turn" in docs/architecture.md).

    started > deltas > finish > commit > the last event leaves

What its clients are told is `answer_log.py`. Whatever happens (the clients leave, the session is completed, the worker dies, the
proxy is told to stop), what was sampled until then is committed as a partial turn.
Knows no HTTP: a client is a `TurnClient`, the wire format a `Dialect`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

from steno.contracts.chat import CanonicalRequest
from steno.contracts.errors import EngineFailed, StenoError, TooManyRequests
from steno.contracts.wire.frames import StreamEvent
from steno_proxy import metrics
from steno_proxy.dialects.base import Choice, Dialect, Header
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.session_state import AnswerSoFar, Recording
from steno_proxy.sessions import limits
from steno_proxy.turns.answer_log import AnswerLog, LogReader
from steno_proxy.turns.choice import OpenChoice
from steno_proxy.turns.continuation import Plan
from steno_proxy.turns.failover import PASSING, go_on
from steno_proxy.turns.interfaces import ABORT_S, ClientLeft, ProxyStopping, TurnClient
from steno_proxy.turns.joined import JoinedReader, give_up_slowest
from steno_proxy.workers.hub import Hub

MOST_JOINED = 16
"""Clients beside the first. SDKs leave the connection before they ask again."""


class RequestRunner(Protocol):
    """What a request needs of the service that runs it."""

    recorder: Recorder
    hub: Hub
    clock: Callable[[], float]

    def forget(self, request: Request) -> None:
        """The request is answered."""
        ...

    async def refused(self, request: Request) -> None:
        """The request ended with nothing on record."""
        ...


class Request:
    """One request in flight, with its `n` choices. Whoever ends sessions sees it as a `session_state.RunningRequest`.

    again: it is a retry: the first try may be on record, or still run at another replica.
    """

    def __init__(
        self, turns: RequestRunner, recording: Recording, dialect: Dialect, plan: Plan, *, again: bool = False
    ) -> None:
        self.again = again
        self.recording = recording
        self.dialect = dialect
        self.plan = plan
        self.choices: list[OpenChoice] = []  # at least one, from `begin` on
        self.log: AnswerLog  # from `begin` on
        self.done = asyncio.Event()
        self._turns = turns
        self._failure: StenoError | None = None  # what it was aborted with, or has failed with
        self._answered = False  # all clients were told the end
        self._clock: asyncio.TimerHandle | None = None  # of the wall time
        self._ending: asyncio.Task[None] | None = None  # what ends the session then; held, or it may be collected
        self._task: asyncio.Task[object] | None = None  # that runs it
        self._resamples = plan.resamples
        recording.resampling += self._resamples

    @property
    def asked(self) -> CanonicalRequest:
        return self.choices[0].facts.asked

    @property
    def key(self) -> bytes:
        """Equal for equal requests of a trial (`retry_matching.py`)."""
        known = self.choices[0].facts.request
        assert known is not None
        return known.key

    @property
    def _over(self) -> bool:
        """Whether all choices are on record. No client can join then."""
        return all(choice.finished is not None for choice in self.choices)

    def abort(self, error: StenoError) -> None:
        """Stop; keep what was sampled as partial turns; `run` raises `error`. Idempotent, and too late once committing. A client
        that leaves does not stop it for those who joined."""
        if self._failure is not None or self.done.is_set() or (isinstance(error, ClientLeft) and self.log.joined):
            return
        self._failure = error
        for choice in self.choices:
            choice.stream.cancel(error.code)
        if self._task is not None:
            asyncio.get_running_loop().call_later(ABORT_S, self._unstick)

    def begin(self, client: TurnClient, now: float) -> None:
        """Begin: its streams are open. Also starts the timer of the trial's `max_wall_s`, which ends this request.

        Args: now: when it came, Unix seconds.
        """
        self.log = AnswerLog(LogReader(self.dialect, self.asked, client, self._header()))
        session = self.recording.session
        left_s = limits.wall_left_s(session.limits, session, now) if session is not None else None
        if left_s is not None:
            left_s -= self._turns.clock() - now  # spent with the store, and in the queue
            self._time_is_over_in(left_s, on_record=session is not None and session.first_turn_at is not None)

    def let_go(self) -> None:
        """Note that it no longer samples the turn of the trial's fork: its turn is on record, or it has failed. Idempotent."""
        self.recording.resampling -= self._resamples
        self._resamples = False

    def _time_is_over_in(self, left_s: float, *, on_record: bool) -> None:
        """Start the timer of the wall time. Args: on_record: the session's first turn is on record, perhaps timed by
        another clock; False: the wall time began with this request."""

        def over() -> None:
            self._ending = asyncio.ensure_future(self._end_in_time() if on_record else self._end("max_wall_s"))

        self._clock = asyncio.get_running_loop().call_later(max(0.0, left_s), over)

    async def _end_in_time(self) -> None:
        """End the session if its wall time is over by the store's clock as well; if not, look again when it may be."""
        try:
            now = await self._turns.recorder.store.earliest()
        except StenoError as error:
            self.abort(error)
            return
        session = self.recording.session
        left_s = limits.wall_left_s(session.limits, session, now) if session is not None else None
        if not left_s:
            await self._end("max_wall_s")
        elif not self.done.is_set():
            self._time_is_over_in(left_s, on_record=True)

    async def _end(self, spent: str) -> None:
        """End the session and this request. If the store fails now, the request ends all the same."""
        try:
            self.abort(await self._turns.recorder.end(self.recording.trial_id, spent))
        except StenoError as error:
            self.abort(error)

    def unrecorded(self) -> tuple[int, int]:
        """Return how many turns and tokens of this request the recording does not count yet."""
        turns, tokens = 0, 0
        for choice in self.choices:
            more = self.recording.unrecorded(choice.transcript.turn_id, choice.transcript.tokens)
            turns, tokens = turns + more[0], tokens + more[1]
        return turns, tokens

    def under_way(self, most: int) -> list[AnswerSoFar]:
        return [
            choice.transcript.newest(choice.facts.queued, most) for choice in self.choices if choice.finished is None
        ]

    def _unstick(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def broken(self, error: StenoError) -> bytes:
        """Return the events that end an answer which fails midway. b"": the connection must be broken instead."""
        return self.log.first.broken(error)

    async def run(self) -> None:
        """Answer the client. Returns when every choice is committed and its last event has left.

        Raises: StenoError: what the client should be told, if it can still be told; its turns are recorded as partial.
        """
        self._task = asyncio.current_task()
        try:
            await self._run()
        except asyncio.CancelledError:
            if self._failure is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._failure from None
        finally:
            await self._leave_off(sys.exception())

    async def _leave_off(self, failure: BaseException | None) -> None:
        """Clean up after the answer or its failure. Always sets `done`: sessions wait for it."""
        # From here on nothing is stuck in a write, and it must not be cancelled. The task holds this coroutine, which holds us:
        # nothing but the collector would end that.
        self._task = None
        if failure is not None:
            told = failure if isinstance(failure, StenoError) else None
            self._failure = told or ProxyStopping("the request that this retry had joined failed")
        try:
            if self._failure is not None:
                for joined in self.log.joined:
                    joined.fail(self._failure)
            if failure is not None and not any(
                choice.commit or choice.saving or choice.begun_again for choice in self.choices
            ):
                await self._turns.refused(self)
            if self._clock is not None:
                self._clock.cancel()
            pending = [choice.commit for choice in self.choices if choice.commit and not choice.commit.done()]
            if pending:
                await asyncio.wait(pending)
            if failure is not None and not self._answered:  # no answer in one piece has left
                for choice in self.choices:
                    await choice.undelivered()
        finally:
            if self.recording.open_here:
                for choice in self.choices:
                    self._turns.recorder.give_up(self.recording, choice.transcript.turn_id)
            metrics.STREAMS.dec(len(self.choices))
            self.recording.in_flight.discard(self)
            self.let_go()
            self._turns.forget(self)
            self.done.set()

    def _header(self) -> Header:
        first = self.choices[0]
        model = self.asked.model or first.stream.card.name
        return Header(first.transcript.turn_id, int(first.facts.queued), model)

    async def _run(self) -> None:
        if len(self.choices) == 1:
            finished = [await self._choice(self.choices[0])]
        else:
            finished = await self._siblings()
        self.log.end(finished)
        self._answered = True
        first = self.log.first
        await self.log.flush()
        if first.whole and first.client.gone and not self.log.shared:
            for choice in self.choices:
                await choice.undelivered()

    # -- retries of a request that runs

    def urgency(self) -> tuple[bool, float]:
        """Sorts the requests that a retry may mean: first those that have lost their client, then the oldest."""
        return not (self.log.first.client.gone or self.log.first.writing), self.choices[0].facts.queued

    def join(self, asked: CanonicalRequest, client: TurnClient) -> JoinedReader | None:
        """Add a client, which gets this answer from its beginning.

        Returns: None: this request is about to end; wait for `done`.
        If a write waits for the first client (and no other has joined), that client has stopped reading and has sent the request
        again: this turn ends, and the retry is a new attempt.
        Raises: TooManyRequests.
        """
        if self.log.first.writing and not self.log.joined:
            self.abort(ClientLeft("the client sent the request again"))
        if self._over or self._failure is not None:
            return None
        if len(self.log.joined) >= MOST_JOINED:
            raise TooManyRequests(f"{MOST_JOINED} retries of this request wait for its answer already")
        joined = JoinedReader(self, self.dialect, asked, client, self._header())
        joined.on_record = self.log.add(joined, self.choices)
        self.recording.in_flight.add(joined)
        return joined

    def leave(self, joined: JoinedReader) -> None:
        """Remove a client that has its answer, or has left."""
        self.log.remove(joined)
        self.recording.in_flight.discard(joined)
        if self.log.first.client.gone and not self.log.joined and not self._over:
            self.abort(ClientLeft("the client closed the connection"))

    def more_waits(self) -> None:
        give_up_slowest(reader for reader in self.log.joined if isinstance(reader, JoinedReader))

    async def _siblings(self) -> list[Choice]:
        tasks = [asyncio.ensure_future(self._sibling(choice)) for choice in self.choices]
        try:
            return list(await asyncio.gather(*tasks))
        except Exception as error:
            self._failure = self._failure or _told(error)  # what ends the others too
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _sibling(self, open_choice: OpenChoice) -> Choice:
        choice = await self._choice(open_choice)
        await self.log.flush()
        return choice

    async def _choice(self, choice: OpenChoice) -> Choice:
        """Stream one completion and commit it."""
        try:
            while choice.transcript.finish is None:
                events = await self._events(choice)
                untaken = iter(events)
                try:
                    await self._take(choice, untaken)
                except BaseException:
                    choice.stream.put_back(list(untaken))
                    raise
            reason = choice.transcript.finish.reason
            if reason in ("cancelled", "error"):
                raise self._failure or EngineFailed(f"the worker ended the turn: {reason}")
            if self._failure is not None:
                raise self._failure
        except asyncio.CancelledError:
            error = self._failure or ProxyStopping("the proxy stopped")
            choice.cut_off(error.code)
            await choice.committed(error)
            raise
        except Exception as error:
            told = _told(error)
            choice.cut_off(told.code)
            await choice.committed(told)
            raise
        return await self.log.finish(choice, self._turns.clock())

    async def _events(self, choice: OpenChoice) -> list[StreamEvent]:
        """Return the next events, of this worker or of the one that replaces it (I9). Raises: StenoError: there are no more."""
        while True:
            try:
                return await choice.stream.next()
            except PASSING as error:
                if self._failure is not None:
                    raise
                untold = self.log.nothing_written(choice.index) and not choice.saving
                before = choice.transcript
                await go_on(self._turns.hub, choice, self.plan, error, untold=untold, at=self._turns.clock())
                if choice.transcript is not before:
                    self.log.restart(choice.index)
                if self._failure is not None:
                    choice.stream.cancel(self._failure.code)

    async def _take(self, choice: OpenChoice, events: Iterator[StreamEvent]) -> None:
        """Take in events that arrived together, and send what they bring together."""
        transcript, facts = choice.transcript, choice.facts
        for event in events:
            before = transcript.tokens
            piece = transcript.take(event)
            if piece is None:
                if transcript.started is event:
                    await self._begun(choice)
                continue
            facts.last_token = self._turns.clock()
            if facts.first_token is None:
                facts.first_token = facts.last_token
            if (said := self.log.piece(choice, piece, before)) is not None:
                await said
        await self.log.flush()
        if self.log.is_read():
            transcript.delivered = transcript.tokens
        session = self.recording.session
        if session is not None and (limit := session.limits.max_tokens) is not None and self._failure is None:
            await self._check_tokens(limit)

    async def _check_tokens(self, limit: int) -> None:
        """End the session if its running turns have used up `max_tokens`. Each turn is clamped to what was left when it began, so
        turns that run together may exceed the limit together, by the tokens that are on their way from workers."""
        running = sum(request.unrecorded()[1] for request in self.recording.in_flight)
        if self.recording.sampled_tokens + running > limit:
            await self._end("max_tokens")

    async def _begun(self, choice: OpenChoice) -> None:
        """Take in `Started`: the worker has accepted the prompt."""
        started, card, session = choice.transcript.started, choice.stream.card, self.recording.session
        assert started is not None and session is not None
        began, choice.facts.started = self._turns.clock(), None  # another attempt may have begun before
        if self.plan.prefix.ids and not started.kept_tokens:
            choice.plan = choice.plan.refused_by(started)
        if started.kept_tokens not in (0, len(self.plan.prefix.ids) // 4):
            raise EngineFailed(
                f"Started: kept_tokens: got {started.kept_tokens}, must be 0 or {len(self.plan.prefix.ids) // 4} recorded tokens"
            )
        marks = [mark for mark in ("synthetic", "text_only") if getattr(card, mark) and mark not in session.marks]
        if marks:
            await self._turns.recorder.store.add_marks(self.recording.trial_id, marks)
            session.marks.extend(marks)
        choice.facts.started = began
        self.log.accept()


def _told(error: Exception) -> StenoError:
    """What is on record of a failure."""
    return error if isinstance(error, StenoError) else StenoError("unhandled exception in the proxy")
