"""Streams over real sockets: whole, in order, cancelled, failed, and held by their own readers only."""

from __future__ import annotations

import asyncio

import pytest

from steno.contracts.chat import Job
from steno.contracts.errors import (
    BadRequest,
    BodyTooLarge,
    ContextOverflow,
    EngineFailed,
    NoWorker,
    TooManyRequests,
    WorkerLost,
)
from steno.contracts.wire.frames import Finish, Generate, Started
from steno_proxy.workers.placement import Order
from steno_proxy.workers.worker_channel import MAX_COUNTS
from tests.integration.relay.conftest import drain, relay
from tests.support.waiting import until
from tests.support.workers.counting import CountingEngine, ids_of, job


async def test_a_stream_arrives_whole_and_in_order() -> None:
    async with relay() as running:
        await running.worker()
        events = await drain(running.open(300))
        assert isinstance(events[0], Started)
        assert ids_of(events) == list(range(300))
        assert isinstance(events[-1], Finish)
        assert events[-1].reason == "length"
        assert running.hub.workers()[0].in_flight == 0
        assert running.hub.counts.tokens == 300


async def test_many_streams_share_packets() -> None:
    async with relay() as running:
        worker = await running.worker(CountingEngine(pace_s=0.01), max_streams=64)
        streams = [running.open(20) for _ in range(50)]
        for events in await asyncio.gather(*map(drain, streams)):
            assert ids_of(events) == list(range(20))
        assert worker.metric("steno_worker_deltas_total") == 1000
        assert worker.metric("steno_worker_packets_total") < 200
        assert worker.metric("steno_worker_tokens_total") == 1000


async def test_a_cancel_reaches_the_engine_and_late_frames_are_dropped() -> None:
    async with relay() as running:
        worker = await running.worker(CountingEngine(pace_s=0.005))
        stream = running.open(10_000)
        await stream.next()
        stream.cancel("the client left")
        stream.cancel("again")
        await until(lambda: worker.engine.closed)
        made = next(iter(worker.engine.generated.values()))
        assert made < 1000
        events = await drain(stream)
        assert isinstance(events[-1], Finish)
        assert events[-1].reason == "cancelled"
        assert events[-1].completion_tokens == stream.received_tokens
        counts = running.hub.counts
        await until(lambda: counts.tokens + counts.late_tokens == worker.metric("steno_worker_tokens_total"))
        assert counts.tokens == stream.received_tokens
        assert (await drain(running.open(5)))[-1].completion_tokens == 5  # type: ignore[union-attr]


async def test_a_slow_reader_is_held_by_credit_and_delays_nobody() -> None:
    async with relay(window_tokens=64) as running:
        worker = await running.worker()
        slow = running.open(1000)
        await until(lambda: slow.received_tokens == 64)
        assert ids_of(await drain(running.open(2000))) == list(range(2000))
        assert slow.received_tokens == 64
        assert worker.engine.generated[next(iter(worker.engine.generated))] <= 65
        assert worker.metric("steno_worker_credit_stalls_total") >= 1
        assert ids_of(await drain(slow)) == list(range(1000))


async def test_an_engines_errors_come_back_as_they_were() -> None:
    async with relay() as running:
        engine = CountingEngine()
        await running.worker(engine)

        def overflow(request: Generate) -> None:
            raise ContextOverflow("too long", prompt_tokens=9, context_tokens=8, field="messages")

        def surprise(request: Generate) -> None:
            raise ZeroDivisionError("secret words of a surprise")

        engine.before = overflow
        with pytest.raises(ContextOverflow) as caught:
            await drain(running.open(1))
        assert (caught.value.prompt_tokens, caught.value.context_tokens, caught.value.field) == (9, 8, "messages")
        engine.before = surprise
        with pytest.raises(EngineFailed) as failed:
            await drain(running.open(1))
        assert "secret" not in failed.value.message


async def test_without_a_worker_with_a_full_one_and_with_a_job_that_is_too_large() -> None:
    async with relay(max_packet_bytes=65536) as running:
        with pytest.raises(NoWorker):
            running.open(1)
        await running.worker(CountingEngine(pace_s=0.05), max_streams=1)
        first, waiting = running.open(3), running.open(3)
        with pytest.raises(TooManyRequests):
            running.open(1)
        big = job(1)
        big.messages[0]["content"] = "x" * 70_000
        await drain(first)
        with pytest.raises(BodyTooLarge):
            running.hub.open(Order("t", "f" * 12, big))
        assert ids_of(await drain(waiting)) == [0, 1, 2]


async def test_a_trial_stays_on_its_worker_and_another_takes_over() -> None:
    async with relay() as running:
        workers = {f"w{index}": await running.worker(worker_id=f"w{index}") for index in range(3)}
        chosen = set()
        for _ in range(6):
            stream = running.open(2, trial_id="sticky")
            chosen.add(stream.worker_id)
            await drain(stream)
        assert len(chosen) == 1
        gone = chosen.pop()
        workers[gone].worker.stop()
        assert await workers[gone].task == 0
        await until(lambda: len(running.hub.workers()) == 2)
        stream = running.open(2, trial_id="sticky")
        assert stream.worker_id != gone
        await drain(stream)


async def test_a_prompt_is_counted_and_nothing_is_generated() -> None:
    def refuse(request: Generate) -> None:
        if request.job.messages[0]["content"] == "no":
            raise BadRequest("the template refuses", field="messages")

    async with relay() as running:
        with pytest.raises(NoWorker):
            await running.hub.count("trial", job(1), "")
        worker = await running.worker()
        worker.engine.before = refuse
        counts = await asyncio.gather(*(running.hub.count("trial", job(1), "") for _ in range(20)))
        assert counts == [len("count")] * 20
        assert ids_of(await drain(running.open(2))) == [0, 1]  # streams and counts are numbered together
        refused = job(1)
        refused.messages[0]["content"] = "no"
        with pytest.raises(BadRequest) as error:
            await running.hub.count("trial", refused, "")
        assert (error.value.message, error.value.field) == ("the template refuses", "messages")
        assert len(worker.engine.generated) == 1


async def test_a_count_ends_with_its_worker_and_too_many_are_refused() -> None:
    counting, never = asyncio.Event(), asyncio.Event()

    class Slow(CountingEngine):
        async def count(self, job: Job) -> int:
            counting.set()
            await never.wait()
            return 0

    async with relay(resume_grace_s=0.1) as running:
        worker = await running.worker(Slow())
        asked = [asyncio.ensure_future(running.hub.count("trial", job(1), "")) for _ in range(MAX_COUNTS)]
        await counting.wait()
        with pytest.raises(TooManyRequests):
            await running.hub.count("trial", job(1), "")
        asked.pop().cancel()
        worker.worker.stop()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(result) for result in results} == {WorkerLost}
