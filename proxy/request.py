"""One request in flight: its completions as they stream, who listens, and how it ends ("One turn" in docs/architecture.md).

    started > deltas > finish > commit > the last event leaves

I3: the event that ends a choice leaves only after its turn is in the store, one that closes a block only after the turn so
far is, as an open turn that the whole one replaces. Whatever else happens (the clients leave, the session is completed, the
worker dies, the proxy is told to stop), what was sampled until then is committed as a partial turn.
Knows no HTTP: a client is a `Client`, the wire format a `Dialect`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

from proxy import metrics
from proxy.answering import ABORT_S, Client, ClientLeft, Stopping
from proxy.choice import OpenChoice
from proxy.contracts.canonical import CanonicalRequest
from proxy.contracts.errors import EngineFailed, StenoError, TooManyRequests
from proxy.contracts.frames import StreamEvent
from proxy.dialects.base import Breaker, Choice, Dialect, Header, Piece, Writer
from proxy.failover import PASSING, go_on
from proxy.hub import Hub
from proxy.joined import Joined
from proxy.plan import Plan
from proxy.recorder import Recorder
from proxy.recording import Recording
from proxy.retries import Sought
from proxy.sessions import limits

STALL_S = 2.0
"""How long the client that came first may hold up those who joined its request, once. Seconds."""
MOST_JOINED = 16
"""Clients beside the first. Each may have events waiting for it; SDKs leave the connection before they ask again."""


class Host(Protocol):
    """What runs requests, as far as one of them cares."""

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
    """One request in flight, with its `n` choices. `recorder.InFlight` for those who end sessions.

    again: it is a retry of what may be on record, or run at another replica.
    """

    def __init__(
        self,
        turns: Host,
        recording: Recording,
        dialect: Dialect,
        asked: CanonicalRequest,
        client: Client,
        found: Plan,
        *,
        again: bool = False,
    ) -> None:
        self.again = again
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
        self._over = False  # all is on record, or it has failed: no one can join
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
            asyncio.get_running_loop().call_later(ABORT_S, self._unstick)

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
        """Turns that the recording does not count yet, and the tokens of all that it does not."""
        turns, tokens = 0, 0
        for choice in self.choices:
            more = self.recording.unrecorded(choice.transcript.turn_id, choice.transcript.tokens)
            turns, tokens = turns + more[0], tokens + more[1]
        return turns, tokens

    def _unstick(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def broken(self, error: StenoError) -> bytes:
        """The events that end an answer which fails midway; b"": its connection is to be broken instead."""
        if isinstance(self._writer, Breaker):
            unsent = [choice.opening for choice in self.choices if not choice.begun]
            return b"".join([*unsent, self._writer.broken(error)])
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
            # From here on nothing is stuck in a write. It must not be cancelled: sessions count on `done`. The task holds this
            # coroutine, which holds us: nothing but the collector would end that.
            self._task, self._over = None, True
            failure = sys.exception()
            for joined in self._joined:
                joined.fail(
                    failure if isinstance(failure, StenoError) else Stopping("the request that was joined failed")
                )
            if failure is not None and not any(choice.commit or choice.saving for choice in self.choices):
                await self._turns.refused(self)
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
                for choice in self.choices:
                    await choice.undelivered()
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
        Raises: TooManyRequests.
        """
        if self._telling and not self._joined:
            self.abort(ClientLeft("the client asked again"))
        if self._over or self._aborted is not None:
            return None
        if len(self._joined) >= MOST_JOINED:
            raise TooManyRequests(f"{MOST_JOINED} retries of this request wait for its answer already")
        joined = Joined(self, self.dialect, asked, client, self._header())
        for choice in self.choices:
            if choice.transcript.started is not None:
                joined.catch_up(choice.index, choice.transcript.started, choice.transcript.pieces())
            if choice.finished is not None:
                joined.finish(choice.finished)
        self._joined.append(joined)
        self.recording.in_flight.add(joined)
        self._shared = True
        return joined

    def leave(self, joined: Joined) -> None:
        """This client has its answer, or has left."""
        self._joined.remove(joined)
        self.recording.in_flight.discard(joined)
        if self._client.gone and not self._joined and not self._over:
            self.abort(ClientLeft("the client closed the connection"))

    async def saved(self, index: int) -> None:
        """What has come so far of a choice is on record. Raises: as `Recorder.commit`."""
        await self.choices[index].saved()

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
        opening = self._begin(self.choices[choice.index])
        self.choices[choice.index].begun = True
        return opening + self._writer.finish(choice)

    def _begin(self, choice: OpenChoice) -> bytes:
        """The events before a choice's first, until that has left; made before it is, since events may be numbered."""
        started = choice.transcript.started
        if choice.begun or started is None or self._writer is None:
            return b""
        if not choice.opening:
            choice.opening = self._writer.begin(choice.index, started.prompt_tokens, started.cached_tokens)
        return choice.opening

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
                raise self._aborted or EngineFailed(f"the worker ended the turn: {reason}")
            if self._aborted is not None:
                raise self._aborted
        except asyncio.CancelledError:
            error = self._aborted or Stopping("the proxy stopped")
            choice.cut_off(error.code)
            await choice.committed(error)
            raise
        except Exception as error:
            told = error if isinstance(error, StenoError) else StenoError("the proxy failed at this turn")
            choice.cut_off(told.code)
            await choice.committed(told)
            raise
        await choice.committed(None, in_one_piece=self._has_whole())
        choice.finished = choice.transcript.choice(choice.index)
        for joined in self._joined:
            joined.finish(choice.finished)
        return choice.finished

    async def _events(self, choice: OpenChoice) -> list[StreamEvent]:
        """What comes next, from whichever worker (I9). Raises: StenoError: nothing more will."""
        while True:
            try:
                return await choice.stream.next()
            except PASSING as error:
                if self._aborted is not None:
                    raise
                untold = not (choice.begun or self._shared or choice.saving)
                await go_on(self._turns.hub, choice, self.plan, error, untold=untold)
                if self._aborted is not None:
                    choice.stream.cancel(self._aborted.code)

    async def _take(self, choice: OpenChoice, events: Iterator[StreamEvent]) -> None:
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
                    await choice.saved()
                for joined in listening:
                    assert transcript.started is not None
                    joined.piece(choice.index, piece, transcript.started)
                if self._writer is not None:
                    opening = self._begin(choice)
                    if data := self._writer.piece(choice.index, piece):
                        out.append(opening + data)
                        choice.begun = True
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
        running = sum(request.unrecorded()[1] for request in self.recording.in_flight)
        if self.recording.tokens + running > limit:
            await self._end("max_tokens")

    async def _begun(self, choice: OpenChoice) -> None:
        """The worker has the prompt."""
        started, card, session = choice.transcript.started, choice.stream.card, self.recording.session
        assert started is not None and session is not None
        began, choice.facts.started = self._turns.clock(), None  # another attempt may have begun before
        if self.plan.prefix_ids and not started.kept_tokens:
            choice.plan = choice.plan.refused_by(started)
        if started.kept_tokens not in (0, len(self.plan.prefix_ids) // 4):
            raise EngineFailed(
                f"the worker kept {started.kept_tokens} of {len(self.plan.prefix_ids) // 4} recorded tokens"
            )
        marks = [mark for mark in ("synthetic", "text_only") if getattr(card, mark) and mark not in session.marks]
        if marks:
            await self._turns.recorder.store.add_marks(self.recording.trial_id, marks)
            session.marks.extend(marks)
        choice.facts.started = began
        self._client.ready()
        for joined in self._joined:
            joined.accept()
