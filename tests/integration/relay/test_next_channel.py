"""A worker whose channel is over says nothing of it on the next one: not a token, not an end, not a count, not an update (I9)."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from steno.contracts.chat import Sampling
from steno.contracts.errors import StenoError
from steno.contracts.wire.frames import (
    Announce,
    Counted,
    Delta,
    Failed,
    Finish,
    Frame,
    Generate,
    Progress,
    Started,
    StreamEvent,
)
from steno.contracts.wire.peer import PeerState, PeerUp
from steno.contracts.wire.peer_ends import WorkerPeer
from steno_worker.config import WorkerSettings
from steno_worker.metrics import WorkerMetrics
from steno_worker.relay import connection
from steno_worker.relay.connection import ProxyConnection
from steno_worker.weights.update_runner import UpdateRunner
from tests.integration.relay.conftest import drain, relay
from tests.support.machine.tcprelay import TcpRelay
from tests.support.waiting import until
from tests.support.workers.counting import DIGEST, PROMPT, CountingEngine, ids_of, job

BUSY = 128
MUCH = 10**6


async def test_what_busy_streams_of_a_proxy_say_is_not_heard_by_its_successor() -> None:
    """Each time the worker comes to a proxy that knows nothing of its streams, and whose stream numbers begin at 1 again."""
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(relay(window_tokens=MUCH))
        network = await stack.enter_async_context(TcpRelay("127.0.0.1", running.port))
        # As fast as it can: in every turn of the event loop each of them has something to say.
        worker = await running.worker(CountingEngine(), port=network.port, max_streams=BUSY)
        heard = 0
        for _ in range(3):
            for stream in [running.open(MUCH) for _ in range(BUSY)]:
                await stream.next()
            before = running.hub.counts
            running = await stack.enter_async_context(relay(window_tokens=MUCH))
            network.target_port = running.port
            network.cut()
            await until(running.hub.cards)
            for stream in [running.open(3) for _ in range(4)]:
                assert ids_of(await drain(stream)) == [0, 1, 2]
            counts = running.hub.counts
            assert (counts.channels["protocol_error"], counts.late_tokens, counts.channels["lost"]) == (0, 0, 0)
            await until(lambda: worker.metric("steno_worker_streams") == 0)
            heard += before.tokens + before.late_tokens
        heard += counts.tokens
        lost = worker.metric("steno_worker_unacknowledged_tokens_total")
        assert lost and worker.engine.tally.sampled <= heard + lost  # (I4); what was not acknowledged may have arrived


class Odd(CountingEngine):
    """Its first generation says something that no proxy can read."""

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        if not self.generated:
            self.generated[request.turn_id] = 0
            reasoning: Any = [{"type": "text", "text": "hm"}]
            yield Started(request.stream, 0, PROMPT, 3, DIGEST, request.job.sampling)
            yield Delta(request.stream, b"", b"", "base/0", reasoning=reasoning)
        async for event in super().generate(request):
            yield event


async def test_a_worker_whose_packet_no_proxy_can_read_dials_again() -> None:
    async with relay() as running:
        worker = await running.worker(Odd())
        stream = running.open(3)
        with pytest.raises(StenoError):
            await drain(stream)
        await until(lambda: worker.metric("steno_worker_channels_lost_total", code="protocol_error") == 1)
        await until(running.hub.cards)
        assert ids_of(await drain(running.open(3))) == [0, 1, 2]
        assert not worker.task.done() and running.hub.counts.channels["new"] == 2


STALE: list[Frame] = [
    Started(1, 0, b"", 0, b"", Sampling()),
    Delta(1, b"\1\0\0\0", b"\0\0\0\0", "base/0"),
    Finish(1, "stop", 1),
    Failed(1, "engine_failed", ""),
    Counted(1, 5),
    Progress("update", "ready"),
]


def unconnected() -> tuple[ProxyConnection, UpdateRunner, WorkerMetrics]:
    metrics, engine = WorkerMetrics(CollectorRegistry()), CountingEngine()
    updates = UpdateRunner(engine, metrics, announce=lambda: None)
    one = ProxyConnection(
        "ws://127.0.0.1:1", WorkerSettings(worker_id="w"), boot_id=uuid.uuid4().hex, engine=engine, updates=updates,
        metrics=metrics, on_engine_death=lambda reason: None,
    )  # fmt: skip
    return one, updates, metrics


async def test_a_channel_that_overflows_while_its_worker_dials_is_given_up_before_the_next_one_is_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "WorkerPeer", partial(WorkerPeer, max_retained_bytes=1000))
    one, updates, metrics = unconnected()
    outlet, streams = one._outlet, one.streams
    streams.handle(Generate(1, "turn", 1, "trial", job(MUCH)))
    outlet(Progress("update", "failed", message="x" * 2000))
    assert one._peer.state is PeerState.ENDED
    one._renew()
    assert len(streams) == 0
    one.streams.handle(Generate(1, "turn", 2, "trial", job(MUCH)))  # numbers begin again
    for frame in STALE:
        outlet(frame)
    assert one._peer.state is PeerState.DOWN and one._peer.channel.settled
    assert metrics.registry.get_sample_value("steno_worker_unacknowledged_tokens_total") == 1
    await one.leave("shutdown", "")
    await one.run()
    await updates.close()


async def test_why_a_worker_is_unhealthy_is_said_on_the_next_channel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one, updates, _ = unconnected()
    one.announce(healthy=False, draining=True, reason="probe: log-probabilities differ")
    one._peer.fail("lost", 0.0)
    one._renew()
    said: list[Frame] = []
    monkeypatch.setattr(one, "send", said.append)
    one._handle(PeerUp(resumed=False))
    assert said == [Announce(updates.cards(), False, True, "probe: log-probabilities differ")]
    await updates.close()


@pytest.mark.parametrize(
    ("given", "engines", "told"), [(None, None, 64), (None, 500, 500), (64, 500, 64), (8, None, 8)]
)
async def test_how_many_streams_a_worker_offers(given: int | None, engines: int | None, told: int) -> None:
    engine = CountingEngine()
    if engines is not None:
        engine.max_streams = engines  # type: ignore[attr-defined]
    metrics = WorkerMetrics(CollectorRegistry())
    updates = UpdateRunner(engine, metrics, announce=lambda: None)
    one = ProxyConnection(
        "ws://127.0.0.1:1", WorkerSettings(worker_id="w", max_streams=given), boot_id=uuid.uuid4().hex, engine=engine,
        updates=updates, metrics=metrics, on_engine_death=lambda reason: None,
    )  # fmt: skip
    assert one._hello().max_streams == told
    await updates.close()
