"""A worker as the proxy holds it: its channel, the streams on it, and the socket that carries it just now.

The reading loop never waits for a consumer; what is sent in one turn of the event loop is written together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from steno.contracts.chat import Job
from steno.contracts.errors import (
    BadRequest,
    EngineFailed,
    ProtocolError,
    StenoError,
    TooManyRequests,
    UnsoundOutput,
    WorkerLost,
)
from steno.contracts.records import bytes_to_ids
from steno.contracts.wire.frames import (
    Announce,
    Chunk,
    Count,
    Counted,
    Delta,
    Failed,
    Finish,
    Frame,
    Generate,
    Hello,
    ModelCard,
    Progress,
    Started,
)
from steno.contracts.wire.packets import PROTOCOL_ERROR
from steno.contracts.wire.peer import BULK_SHARE, REQUESTS_SHARE, ChannelLost, DropSocket, Event, PeerState
from steno.contracts.wire.peer_ends import ProxyPeer
from steno.contracts.worker_view import Load, WorkerView
from steno_proxy import metrics
from steno_proxy.workers.channel_socket import ChannelSocket
from steno_proxy.workers.relay_settings import RelayCounts
from steno_proxy.workers.soundness import ExpectedAnswer
from steno_proxy.workers.stream import Stream, rebuild
from steno_proxy.workers.suspicion import FORGET_S, Suspicion

logger = logging.getLogger(__name__)
MAX_COUNTS = 64
"""Prompts that one worker may be asked to count at the same time: they are rendered where turns are, and turns come first."""


class Watcher(Protocol):
    """Is told what happens to workers, at once and in order; what it decides is in `WorkerChannel.behind` (`policies/`)."""

    def admitted(self, worker: WorkerChannel) -> None:
        """A channel has got a socket: a new channel, or one that is resumed."""
        ...

    def announced(self, worker: WorkerChannel) -> None:
        """The worker has announced what it serves, which may be the same as before."""
        ...

    def progressed(self, worker: WorkerChannel, said: Progress) -> None:
        """Raises ProtocolError."""
        ...

    def lost(self, worker: WorkerChannel) -> None: ...


class NullWatcher:
    """A watcher where no policy is ever updated."""

    def admitted(self, worker: WorkerChannel) -> None: ...
    def announced(self, worker: WorkerChannel) -> None: ...
    def progressed(self, worker: WorkerChannel, said: Progress) -> None: ...
    def lost(self, worker: WorkerChannel) -> None: ...


class WorkerChannel:
    """One channel: a boot of a worker, its streams, and the socket it has just now. Told apart from its successor by identity.

    Args: number: of this channel, among all of this proxy.
    Attributes: process, channel: name this boot of the worker, and this channel; a boot may have several, one after another.
    """

    def __init__(
        self, hello: Hello, peer: ProxyPeer, clock: Callable[[], float], counts: RelayCounts, number: int
    ) -> None:
        self.id = hello.worker_id
        self.process = f"{hello.worker_id}/{hello.boot_id}"
        self.channel = f"{self.process}/{number}"
        self.max_streams = hello.max_streams
        self.models = hello.models
        self.healthy = True
        self.draining = False
        self.peer = peer
        self.link: ChannelSocket | None = None
        self.key = ""  # that it has shown
        self.address = ""  # whence it dialled
        self.streams: dict[int, Stream] = {}
        self.since = time.time()
        self.behind: frozenset[str] = frozenset()  # policies of which it serves no version that may generate now (I10)
        self.watcher: Watcher = NullWatcher()
        self.on_lost: Callable[[WorkerChannel], None] = lambda worker: None
        self.on_change: Callable[[], None] = lambda: None  # it may be able to take more than a moment ago
        self._clock = clock
        self._counts = counts
        self._next_stream = 0
        self._counting: dict[int, asyncio.Future[Counted]] = {}
        self._refused_at: int | None = None  # what had been acknowledged when there was no room for a request
        self._suspicion = Suspicion()
        self._elsewhere = 0  # streams that other proxies had on it at its last heartbeat
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")

    @property
    def load(self) -> int:
        return len(self.streams) + self._elsewhere

    @property
    def eligible(self) -> bool:
        return self.peer.state is PeerState.OPEN and self.healthy and not self.draining and bool(self.models)

    @property
    def suspect(self) -> bool:
        """Whether it sent impossible data for several turns: new turns go to other workers while these can take them."""
        return self._suspicion.suspect(self._clock())

    def trust(self, why: str) -> None:
        """Forget its bad turns, so that it is no longer suspect."""
        if self._suspicion.clear():
            logger.info("worker %s is trusted again: %s", self.id, why)
            self.on_change()

    def serves(self, card: ModelCard) -> bool:
        """Whether new turns may go to this one of its models."""
        return card.policy not in self.behind

    def open(self, generate: Generate, card: ModelCard, at_least: int = 0) -> Stream:
        """Open a stream and send its Generate. Args: at_least: bytes that the request is known to have, if it was refused before.

        Raises: BadRequest, BodyTooLarge: the request can't be sent to this worker, or is a prompt of ids that the model does not
            have. TooManyRequests: no room until the worker acknowledges more; `on_change` is called then. After each of these
            there is no stream, and nothing was sent.
        """
        check_prompt_ids(generate.job, card)
        generate.stream = self._next_stream = self._next_stream + 1
        self._request(generate, at_least)
        stream = Stream(
            generate.stream, self.id, card, generate.window_tokens, len(generate.prefix_ids) >> 2,
            self.send, self._forget, ExpectedAnswer.of(generate),
        )  # fmt: skip
        stream.channel, stream.process = self.channel, self.process
        stream.trial_id, stream.packet = generate.trial_id, self.peer.channel.last
        self.streams[generate.stream] = stream
        self._touch()
        return stream

    async def count(self, asked: Count) -> Counted:
        """The answer to `asked`, whose stream is numbered here. Cancel-safe.

        Raises: BadRequest (the template refuses), TooManyRequests, WorkerLost, BodyTooLarge, EngineFailed.
        """
        if len(self._counting) >= MAX_COUNTS:
            raise TooManyRequests(f"the worker is busy counting: at most {MAX_COUNTS} prompts at a time")
        asked.stream = number = self._next_stream = self._next_stream + 1
        self._request(asked)
        self._touch()
        counted: asyncio.Future[Counted] = asyncio.get_running_loop().create_future()
        self._counting[number] = counted
        # A question whose caller was cancelled is still at the worker, and keeps its place here until it is answered.
        return await counted

    def send(self, frame: Frame) -> None:
        self.peer.send(frame, self._clock())
        self._touch()

    def offer(self, chunk: Chunk) -> None:
        """Bytes of weights. Raises: TooManyRequests: too much waits to be acknowledged. BodyTooLarge: they fit in no packet."""
        self.peer.offer(chunk, BULK_SHARE)
        self._touch()

    def _request(self, frame: Generate | Count, at_least: int = 0) -> None:
        try:
            self.peer.offer(frame, REQUESTS_SHARE, at_least)
        except TooManyRequests:
            self._refused_at = self.peer.channel.acked
            raise

    def receive(self, data: bytes) -> None:
        """Take in one packet. Raises ProtocolError: the caller must then call `fail`."""
        counts, streams = self._counts, self.streams
        for event in self.peer.receive(data, self._clock()):
            kind = type(event)
            if kind is Delta or kind is Started or kind is Finish or kind is Failed:
                stream = streams.get(event.stream)  # type: ignore[union-attr]
                if stream is not None:
                    unsound = False
                    try:
                        stream.deliver(event)  # type: ignore[arg-type]
                    except UnsoundOutput as error:
                        unsound = True
                        self._refuse(stream, error, len(event.ids) >> 2 if kind is Delta else 0)  # type: ignore[union-attr]
                    except ProtocolError as error:  # the others' turns may come back to this worker, this one may not
                        stream.fail(EngineFailed(f"the worker broke the protocol: {error.message}"))
                        raise
                    if kind is Failed and event.code == UnsoundOutput.code:  # type: ignore[union-attr]
                        self._bad_turn(stream, event.message)  # type: ignore[union-attr]
                    if kind is not Delta:
                        continue
                    if stream.ended and not unsound:  # over a bound: it was not taken
                        counts.late_tokens += len(event.ids) >> 2  # type: ignore[union-attr]
                    else:
                        counts.tokens += len(event.ids) >> 2  # type: ignore[union-attr]
                elif not 0 < event.stream <= self._next_stream:  # type: ignore[union-attr]
                    raise ProtocolError("a frame of an unknown stream")
                elif kind is Delta:
                    counts.late_tokens += len(event.ids) >> 2  # type: ignore[union-attr]
                elif kind is Failed:
                    self._counted(event)  # type: ignore[arg-type]
            elif isinstance(event, Counted):
                self._counted(event)
            elif isinstance(event, Announce):
                self.models, self.healthy, self.draining = event.models, event.healthy, event.draining
                state = "draining" if event.draining else "healthy" if event.healthy else "not healthy"
                logger.info("worker %s announces: %s %s", self.id, state, event.reason)
                self.watcher.announced(self)
                self.on_change()
            elif isinstance(event, Progress):
                self.watcher.progressed(self, event)
            else:
                self._handle(event)
        if self._refused_at is not None and self.peer.channel.acked > self._refused_at:
            self._refused_at = None
            self.on_change()
        self._touch()

    def tick(self) -> None:
        """Let the peer do what is due; then wait for its next deadline."""
        self._disarm()
        for event in self.peer.handle_timeout(self._clock()):
            self._handle(event)
        self._touch()

    def fail(self, reason: str) -> None:
        """It broke the protocol: the channel ends, and the other end is told."""
        self.peer.fail(reason, self._clock())
        self.lose(WorkerLost("the worker broke the protocol"))

    def lose(self, error: StenoError) -> None:
        """The channel is over: every stream ends in this error."""
        self._counts.channels["lost"] += 1
        self._disarm()
        for stream in list(self.streams.values()):
            stream.fail(error)
        for counted in self._counting.values():
            if not counted.done():
                counted.set_exception(error)
        self.on_lost(self)

    def view(self) -> WorkerView:
        return WorkerView(
            self.id, self.models, Load.of(self.peer.remote_load), len(self.streams), self.max_streams,
            self.peer.state is PeerState.OPEN, self.healthy, self.draining, self.since,
            round(self._clock() - self.peer.heard_at, 3), sorted(self.behind),
            suspect=self._suspicion.reason if self.suspect else "", address=self.address,
        )  # fmt: skip

    def _refuse(self, stream: Stream, error: UnsoundOutput, tokens: int) -> None:
        """End a stream on which impossible data came. tokens: how many came with the data; no record will hold them (I4)."""
        if tokens:
            metrics.UNRECORDED_TOKENS.labels(error.code).inc(tokens)
        stream.refuse(error)
        self._bad_turn(stream, error.message)

    def _bad_turn(self, stream: Stream, reason: str) -> None:
        metrics.UNSOUND.inc()
        logger.warning("worker %s, trial %s: it sent invalid data for a turn: %s", self.id, stream.trial_id, reason)
        if self._suspicion.bad_turn(stream.trial_id, reason[:500], self._clock()):
            words = "worker %s is suspect: new turns go to others while others can take them, for %.0f s at most"
            logger.warning(words, self.id, FORGET_S)

    def _counted(self, answer: Counted | Failed) -> None:
        """An answer to `count`; one that nobody waits for any more is late, not wrong. Raises ProtocolError."""
        if not 0 < answer.stream <= self._next_stream:
            raise ProtocolError("an answer to an unknown request")
        counted = self._counting.pop(answer.stream, None)
        if counted is None or counted.done():
            return
        if isinstance(answer, Failed):
            counted.set_exception(rebuild(answer))
        elif answer.prompt_tokens < 0:
            raise ProtocolError("Counted: a negative number of tokens")
        else:
            counted.set_result(answer)

    def _handle(self, event: Frame | Event) -> None:
        if isinstance(event, ChannelLost):
            logger.warning("worker %s is lost: %s (%s)", self.id, event.code, event.reason)
            if event.code == PROTOCOL_ERROR:
                self._blame(event.reason)
            self.lose(WorkerLost(f"the worker went away: {event.reason or event.code}"))
        elif isinstance(event, DropSocket):
            if self.link is not None:
                self.link.close(event.close_code, event.reason)
        else:  # Heartbeat
            beat = self.peer.remote_load
            self._elsewhere = max(0, beat.running + beat.waiting - len(self.streams))
            self.on_change()

    def _blame(self, reason: str) -> None:
        """Fail the requests in the packet that the worker could not read, the first unacknowledged one: no other gets them."""
        packet = self.peer.channel.acked + 1
        for stream in list(self.streams.values()):
            if stream.packet == packet:
                stream.fail(BadRequest(f"the worker could not read this request: {reason}"))

    def _touch(self) -> None:
        """Have the writer write, and the timer be right; cheap when nothing changed."""
        if self.link is not None and self.peer.wants_write:
            self.link.dirty.set()
        deadline = self.peer.next_deadline()
        if deadline is not None and deadline < self._timer_at:
            self._disarm()
            self._timer_at = deadline
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self._clock()), self.tick)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, float("inf")

    def _forget(self, number: int) -> None:
        self.streams.pop(number, None)
        self.on_change()


def check_prompt_ids(job: Job, card: ModelCard, field: str = "prompt") -> None:
    """Check a client's prompt ids, so that its mistake does not look like a fault of the worker. Raises: BadRequest: of this
    field."""
    if job.prompt_ids and card.vocabulary_size:
        ids = bytes_to_ids(job.prompt_ids)
        wrong = min(ids) if min(ids) < 0 else max(ids)
        if not 0 <= wrong < card.vocabulary_size:
            raise BadRequest(f"token id {wrong} is not in the vocabulary of {card.vocabulary_size} tokens", field=field)
