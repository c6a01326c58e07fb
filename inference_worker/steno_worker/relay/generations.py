"""Runs the generations of one channel, one task each, which reads from the engine as fast as its credit allows.

Owns what happens between a Generate frame and its last frame. Knows nothing of sockets: frames leave by the channel's outlet.
Each stream ends in exactly one Finish or Failed, whatever happens to it; only if the whole channel is lost, nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from steno.contracts.errors import DEFAULT_RETRY_AFTER_S, ContextOverflow, EngineFailed, ProtocolError, StenoError
from steno.contracts.wire.frames import (
    Cancel,
    Count,
    Counted,
    Credit,
    Delta,
    Failed,
    Finish,
    Frame,
    Generate,
    Started,
    StreamEvent,
)
from steno_worker.interfaces import Engine
from steno_worker.metrics import WorkerMetrics
from steno_worker.weights.gate import WeightsGate

logger = logging.getLogger(__name__)
MAX_MESSAGE_CHARS = 2000


class Outlet(Protocol):
    """Sends the frames of one channel. Once the channel is over, they are dropped.

    full: so many bytes are unacknowledged that Started, Delta and the answer to a Count with `wants` must wait for `room`; small
        frames may still leave.
    """

    @property
    def full(self) -> bool: ...
    def __call__(self, frame: Frame) -> None: ...
    async def room(self) -> None: ...


class Generations:
    """Runs the generations of one channel.

    Args: send: the outlet of this channel alone: on the next channel its stream numbers have no meaning.
    on_trouble: called after an error which may mean that the engine is dead.
    gate: every event passes it; it is shut while new weights are being proved.
    """

    def __init__(
        self, engine: Engine, send: Outlet, metrics: WorkerMetrics, on_trouble: Callable[[], None],
        gate: WeightsGate | None = None,
    ) -> None:  # fmt: skip
        self._gate = gate or WeightsGate()
        self._engine = engine
        self._send = send
        self._metrics = metrics
        self._on_trouble = on_trouble
        self._running: dict[int, _Generation] = {}
        self._counting: set[asyncio.Task[None]] = set()
        self._last = 0

    def __len__(self) -> int:
        return len(self._running)

    def handle(self, frame: Frame) -> None:
        """Handle a Generate, Cancel, Credit or Count. Cancel and Credit are ignored if their stream has ended. Raises
        ProtocolError."""
        if isinstance(frame, Credit):
            if not 0 < frame.tokens < 2**31:
                raise ProtocolError(f"Credit: tokens: got {frame.tokens}, must be 1 to 2**31 - 1")
            if (stream := self._running.get(frame.stream)) is not None:
                stream.grant(frame.tokens)
        elif isinstance(frame, Cancel):
            if (stream := self._running.get(frame.stream)) is not None:
                stream.stop(None)
        elif isinstance(frame, Generate):
            if frame.window_tokens < 1:
                raise ProtocolError("Generate: window_tokens must be positive")
            self._number(frame.stream)
            self._start(frame)
        elif isinstance(frame, Count):
            self._number(frame.stream)
            task = asyncio.create_task(self._count(frame), name=f"count {frame.stream}")
            self._counting.add(task)
            task.add_done_callback(self._counting.discard)
        else:
            raise ProtocolError(f"unexpected frame from the proxy: {type(frame).__name__}")

    def fail_all(self, error: StenoError) -> None:
        """Stop every generation, each ending in this error."""
        for stream in list(self._running.values()):
            stream.stop(error)

    def abandon(self) -> set[asyncio.Task[None]]:
        """The channel is gone: stop everything, at once. Nobody hears of it, since the outlet drops what is still said.

        Returns: tasks that end once the engine has been told.
        """
        tasks = {stream.task for stream in self._running.values()} | self._counting
        for counting in self._counting:
            counting.cancel()
        for stream in self._running.values():
            stream.stop(None)
        self._running = {}
        return tasks

    async def finished(self) -> None:
        """Wait until there is none. Cancel-safe."""
        while self._running:
            await asyncio.wait([stream.task for stream in self._running.values()])

    def _number(self, number: int) -> None:
        if number <= self._last:
            raise ProtocolError("Generate, Count: stream numbers must ascend")
        self._last = number

    async def _count(self, asked: Count) -> None:
        """Answer one Count, in one frame whatever happens."""
        try:
            if asked.wants:
                counted = await self._engine.tokenize(asked)
                while self._send.full:
                    await self._send.room()
            else:
                counted = Counted(asked.stream, await self._engine.count(asked.job))
            self._send(counted)
        except StenoError as error:
            _say_failed(self._send, asked.stream, error)
        except Exception:  # recorded: the answer is an error, and the log has its traceback
            logger.exception("unhandled exception while counting a prompt")
            self._send(
                Failed(
                    asked.stream,
                    EngineFailed.code,
                    "the engine failed on this prompt; the worker's log has the details",
                )
            )

    def _start(self, request: Generate) -> None:
        stream = _Generation(request, self._engine, self._send, self._metrics, self._on_trouble, self._gate)
        self._running[request.stream] = stream
        self._metrics.streams.inc()
        stream.task.add_done_callback(lambda task: self._ended(request.stream, stream))

    def _ended(self, number: int, stream: _Generation) -> None:
        self._metrics.streams.dec()
        self._metrics.generations.labels(stream.end).inc()
        if self._running.get(number) is stream:
            del self._running[number]


class _Generation:
    """One generation.

    Attributes:
        end: how it ended, for metrics.
    """

    def __init__(
        self, request: Generate, engine: Engine, send: Outlet, metrics: WorkerMetrics,
        on_trouble: Callable[[], None], gate: WeightsGate,
    ) -> None:  # fmt: skip
        self.end = "cancelled"
        self._number = request.stream
        self._engine = engine
        self._credit = request.window_tokens
        self._credited = asyncio.Event()
        self._send = send
        self._metrics = metrics
        self._on_trouble = on_trouble
        self._gate = gate
        self._era = gate.era
        self._sent_tokens = 0
        self._stopped_by: StenoError | None = None
        self._begun = False
        self._closed = False
        self.task = asyncio.create_task(self._run(engine, request), name=f"stream {request.stream}")

    def grant(self, tokens: int) -> None:
        self._credit += tokens
        if self._credit > 0:
            self._credited.set()

    def stop(self, error: StenoError | None) -> None:
        """Cancel the generation; it ends in `Finish(cancelled)`, or in the error. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stopped_by = error
        if self._begun:
            self.task.cancel()

    async def _run(self, engine: Engine, request: Generate) -> None:
        if self._closed:  # stopped before its first step: a task cancelled then would send no last frame
            self._say_stopped()
            return
        self._begun = True
        events = engine.generate(request)
        try:
            await self._pump(events)
        except asyncio.CancelledError:
            if not self._closed:
                raise  # the loop is being torn down
            self._say_stopped()
        except StenoError as error:
            self._fail(error)
            if isinstance(error, EngineFailed):
                self._on_trouble()
        except Exception:  # recorded: the stream ends in an error, and the log has its traceback
            logger.exception("turn %s attempt %d failed in the engine", request.turn_id, request.attempt)
            self._fail(EngineFailed("the engine failed on this request; the worker's log has the details"))
            self._on_trouble()
        finally:
            self._closed = True
            await _close(events, request)

    async def _pump(self, events: AsyncIterator[StreamEvent]) -> None:
        """Engine to channel, up to the Finish. Without credit nothing is pulled: the engine's own buffer holds this stream."""
        async for event in events:
            event.stream = self._number
            if self._gate.shut or self._gate.era != self._era or self._send.full:
                await self._passed(event)
            if type(event) is Delta:
                tokens = len(event.ids) >> 2
                self._sent_tokens += tokens
                self._credit -= tokens or 1
                self._metrics.sent(tokens)
                self._send(event)
                if self._credit <= 0:
                    await self._await_credit()
            elif type(event) is Finish:
                self._closed = True
                if event.completion_tokens != self._sent_tokens and not self._is_text_only():
                    raise EngineFailed(
                        f"the engine reported {event.completion_tokens} completion tokens, the worker sent {self._sent_tokens}"
                    )
                self.end = event.reason
                self._send(event)
                return
            elif type(event) is Started:
                self._send(event)
        raise EngineFailed("the engine's stream ended without a finish reason")

    async def _passed(self, event: StreamEvent) -> None:
        """Wait at the gate, and until there is room on the channel. Raises: EngineFailed: condemned."""
        passed, delta = False, event if type(event) is Delta else None
        try:
            await self._gate.passed(delta.version if delta else "", self._era)
            while self._send.full and type(event) is not Finish:
                await self._send.room()
                await self._gate.passed(delta.version if delta else "", self._era)
            passed = True
        finally:
            if delta is not None and not passed:
                self._engine.tally.unsent["withheld"] += len(delta.ids) >> 2

    def _is_text_only(self) -> bool:
        """Whether the engine gives text only: then the worker can't check the number of tokens, which is the upstream's."""
        return not self._sent_tokens and all(card.text_only for card in self._engine.cards())

    async def _await_credit(self) -> None:
        self._metrics.stalls.inc()
        self._credited.clear()
        await self._credited.wait()

    def _say_stopped(self) -> None:
        if self._stopped_by is not None:
            self._fail(self._stopped_by)
        else:
            self._send(Finish(self._number, "cancelled", self._sent_tokens))

    def _fail(self, error: StenoError) -> None:
        self.end = error.code
        _say_failed(self._send, self._number, error)


def _say_failed(send: Outlet, number: int, error: StenoError) -> None:
    """The last frame of a stream or a count, also where the error's own words and numbers fit in no frame."""
    try:
        send(_failed(number, error))
    except Exception as problem:  # recorded: a fixed text is sent in its place
        logger.error("the error of stream %d can't be sent (%r): %r", number, problem, error)
        send(Failed(number, error.code, "this failed with an error that can't be sent; the worker's log has it"))


def _failed(number: int, error: StenoError) -> Failed:
    detail: dict[str, Any] = {}
    if isinstance(error, ContextOverflow):
        detail = {"prompt_tokens": error.prompt_tokens, "context_tokens": error.context_tokens}
    if error.retry_after_s not in (None, DEFAULT_RETRY_AFTER_S):
        detail["retry_after_s"] = error.retry_after_s
    return Failed(number, error.code, error.message[:MAX_MESSAGE_CHARS], error.field or "", detail)


async def _close(events: AsyncIterator[StreamEvent], request: Generate) -> None:
    """Closing the iterator is what cancels in the engine (`Engine.generate`); after its end it changes nothing."""
    aclose = getattr(events, "aclose", None)
    if aclose is None:
        return
    try:
        await aclose()
    except Exception:  # recorded: the stream has had its last frame already
        logger.exception(
            "turn %s attempt %d: the engine failed while it was cancelled", request.turn_id, request.attempt
        )
