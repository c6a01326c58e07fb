"""One generation each: credit, cancels, and exactly one last frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from steno.contracts.chat import Sampling
from steno.contracts.errors import BadRequest, ContextOverflow, ProtocolError, StenoError, WorkerLost
from steno.contracts.wire.channel import Channel
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
    Heartbeat,
    Started,
    StreamEvent,
)
from steno_worker.metrics import WorkerMetrics
from steno_worker.relay.generations import Generations
from steno_worker.weights.gate import WeightsGate
from tests.support.workers.counting import CountingEngine, job
from tests.support.workers.outlet import Outlet


class Bench:
    """Streams over an engine, with the frames they sent."""

    def __init__(self, engine: CountingEngine | None = None) -> None:
        self.engine = engine or CountingEngine()
        self.frames: list[Frame] = []
        self.trouble = 0
        self.outlet = Outlet(self.frames.append)
        self.streams = Generations(self.engine, self.outlet, WorkerMetrics(CollectorRegistry()), self._on_trouble)

    def _on_trouble(self) -> None:
        self.trouble += 1

    def start(self, number: int = 1, tokens: int = 5, window: int = 100) -> None:
        self.streams.handle(Generate(number, f"turn-{number}", 1, "trial", job(tokens), window_tokens=window))

    async def turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    def deltas(self) -> int:
        return sum(isinstance(frame, Delta) for frame in self.frames)


async def test_started_deltas_finish() -> None:
    bench = Bench()
    bench.start()
    await bench.streams.finished()
    assert [type(frame) for frame in bench.frames] == [Started, *[Delta] * 5, Finish]
    assert len(bench.streams) == 0


async def test_without_credit_nothing_is_pulled_and_credit_goes_on() -> None:
    bench = Bench()
    bench.start(tokens=10, window=3)
    bench.start(2, tokens=4)
    await bench.turns(50)
    assert bench.engine.generated == {"turn-1": 3, "turn-2": 4}
    bench.streams.handle(Credit(1, 2))
    await bench.turns(50)
    assert bench.engine.generated["turn-1"] == 5
    bench.streams.handle(Credit(1, 100))
    await bench.streams.finished()
    assert bench.deltas() == 14


class Lumpy(CountingEngine):
    """Five tokens at once, then text without any."""

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        yield Started(request.stream, 0, b"", 0, b"", Sampling())
        yield Delta(request.stream, bytes(20), bytes(20), "base/0", "a")
        for _ in range(3):
            yield Delta(request.stream, b"", b"", "base/0", "b")
        yield Finish(request.stream, "stop", 5)


async def test_what_was_overdrawn_is_paid_first_and_text_without_a_token_costs_one() -> None:
    """As the proxy counts it: a worker that counts otherwise breaks the protocol, or waits for ever."""
    bench = Bench(Lumpy())
    bench.start(window=3)
    for credit, sent in ((0, 1), (1, 1), (1, 1), (1, 2), (1, 3), (100, 4)):
        if credit:
            bench.streams.handle(Credit(1, credit))
        await bench.turns(50)
        assert bench.deltas() == sent
    await bench.streams.finished()
    assert isinstance(bench.frames[-1], Finish)


@pytest.mark.parametrize("turns", [0, 1, 5, 40])
async def test_a_cancel_at_any_moment_closes_the_engines_iterator_and_ends_in_one_finish(turns: int) -> None:
    bench = Bench()
    bench.start(tokens=1000, window=10)
    await bench.turns(turns)
    bench.streams.handle(Cancel(1))
    bench.streams.handle(Cancel(1))
    await bench.streams.finished()
    assert len(bench.engine.closed) == len(bench.engine.generated)
    last = bench.frames[-1]
    assert isinstance(last, Finish)
    assert (last.reason, last.completion_tokens) == ("cancelled", bench.deltas())
    assert sum(isinstance(frame, Finish) for frame in bench.frames) == 1


async def test_a_stream_that_is_failed_ends_in_that_error() -> None:
    bench = Bench()
    bench.start(tokens=1000, window=1)
    await bench.turns(10)
    bench.streams.fail_all(WorkerLost("told to stop"))
    await bench.streams.finished()
    assert bench.frames[-1] == Failed(1, "worker_lost", "told to stop")


async def test_when_a_channel_is_abandoned_the_engine_is_told() -> None:
    bench = Bench()
    bench.start(tokens=1000, window=2)
    await bench.turns(10)
    ends = bench.streams.abandon()
    assert len(bench.streams) == 0
    await asyncio.gather(*ends)
    assert bench.engine.closed == ["turn-1"]


async def test_while_too_much_waits_to_be_acknowledged_events_wait_at_the_engine_and_ends_do_not() -> None:
    bench = Bench()
    bench.outlet.full = True
    for number in (1, 2):
        bench.start(number, tokens=3)
    await bench.turns(50)
    assert bench.frames == []
    bench.streams.handle(Cancel(2))
    await bench.turns(50)
    assert bench.frames == [Finish(2, "cancelled", 0)]
    bench.outlet.empty()
    await bench.streams.finished()
    assert [type(frame) for frame in bench.frames[1:]] == [Started, *[Delta] * 3, Finish]


async def test_a_refusal_is_no_trouble_and_a_surprise_is() -> None:
    bench = Bench()

    def refuse(request: Generate) -> None:
        raise BadRequest("no images", field="messages.0.content")

    def surprise(request: Generate) -> None:
        raise KeyError("secret")

    bench.engine.before = refuse
    bench.start()
    await bench.streams.finished()
    assert bench.frames[-1] == Failed(1, "invalid_request", "no images", "messages.0.content")
    assert bench.trouble == 0
    bench.engine.before = surprise
    bench.start(2)
    await bench.streams.finished()
    last = bench.frames[-1]
    assert isinstance(last, Failed)
    assert (last.code, "secret" in last.message, bench.trouble) == ("engine_failed", False, 1)


class Miscounting(CountingEngine):
    """Ends with another number than it sent, or without an end."""

    def __init__(self, count: int | None) -> None:
        super().__init__()
        self.count = count

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        yield Started(request.stream, 0, b"", 0, b"", Sampling())
        if self.count is not None:
            yield Finish(request.stream, "stop", self.count)


@pytest.mark.parametrize("count", [3, None])
async def test_an_engine_that_miscounts_or_stops_short_fails_the_stream(count: int | None) -> None:
    bench = Bench(Miscounting(count))
    bench.start()
    await bench.streams.finished()
    assert isinstance(bench.frames[-1], Failed)
    assert sum(isinstance(frame, Finish | Failed) for frame in bench.frames) == 1


async def test_stream_numbers_ascend_and_credit_is_positive() -> None:
    bench = Bench()
    bench.start(3)
    for frame in (Generate(3, "t", 1, "x", job(1)), Credit(3, 0), Credit(3, 2**40), Heartbeat()):
        with pytest.raises(ProtocolError):
            bench.streams.handle(frame)
    bench.streams.handle(Credit(1, 1))  # of a stream that has ended: late, not wrong
    bench.streams.handle(Cancel(2))
    await asyncio.gather(*bench.streams.abandon())


async def test_a_count_is_answered_once_whatever_happens() -> None:
    bench = Bench()
    long = ContextOverflow("long", prompt_tokens=9, context_tokens=8)
    errors = iter([None, BadRequest("no", field="messages"), ValueError("a surprise"), long])

    def before(request: Generate) -> None:
        if error := next(errors):
            raise error

    bench.engine.before = before
    for number in (1, 2, 3, 4):
        bench.streams.handle(Count(number, job(1)))
    await bench.turns(3)
    first, second, third, fourth = bench.frames
    assert first == Counted(1, len("count"))
    assert second == Failed(2, "invalid_request", "no", "messages")
    assert isinstance(third, Failed) and (third.code, third.stream) == ("engine_failed", 3)
    assert isinstance(fourth, Failed) and fourth.detail == {"prompt_tokens": 9, "context_tokens": 8}
    with pytest.raises(ProtocolError):
        bench.streams.handle(Count(3, job(1)))


@pytest.mark.parametrize(
    "error",
    [
        ContextOverflow("long", prompt_tokens=2**70, context_tokens=8, field="messages"),
        BadRequest("half a pair: \ud800"),
        BadRequest("no", field="f" * 2**20),
    ],
)
async def test_an_error_that_fits_in_no_frame_is_still_the_one_end_of_its_stream_or_count(error: StenoError) -> None:
    bench, channel = Bench(), Channel(max_packet_bytes=65536)

    def pack(frame: Frame) -> None:
        channel.push(frame)
        bench.frames.append(frame)

    def refuse(request: Generate) -> None:
        raise error

    bench.engine.before = refuse
    bench.streams = Generations(bench.engine, Outlet(pack), WorkerMetrics(CollectorRegistry()), bench._on_trouble)
    bench.start(1)
    await bench.streams.finished()
    bench.streams.handle(Count(2, job(1)))
    await bench.turns(3)
    text = "this failed with an error that can't be sent; the worker's log has it"
    assert bench.frames == [Failed(number, error.code, text) for number in (1, 2)]


class Tokenizing(CountingEngine):
    async def tokenize(self, asked: Count) -> Counted:
        if asked.wants != "text":
            raise BadRequest("no", field="tokens")
        return Counted(asked.stream, 2, text="two words")


async def test_what_a_count_wants_waits_for_room_and_a_number_does_not() -> None:
    bench = Bench(Tokenizing())
    bench.outlet.full = True
    for number, wants in ((1, "text"), (2, ""), (3, "ids")):
        bench.streams.handle(Count(number, job(1), wants))
    await bench.turns(5)
    assert bench.frames == [Counted(2, len("count")), Failed(3, "invalid_request", "no", "tokens")]
    bench.outlet.empty()
    await bench.turns(5)
    assert bench.frames[2:] == [Counted(1, 2, text="two words")]


async def test_ids_that_wait_for_their_weights_to_be_proved_when_they_are_cancelled_are_counted() -> None:
    bench = Bench()
    gate = WeightsGate()
    bench.streams = Generations(
        bench.engine, Outlet(bench.frames.append), WorkerMetrics(CollectorRegistry()), bench._on_trouble, gate
    )
    gate.close("base/0")
    bench.start()
    await bench.turns(50)
    bench.streams.handle(Cancel(1))
    await bench.streams.finished()
    assert bench.deltas() == 0
    assert bench.engine.tally.sampled == bench.engine.tally.unsent["withheld"] == 1
