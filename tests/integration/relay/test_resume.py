"""Sockets that are cut while streams run: no token lost, none twice; and what is given up when the grace is over (I4)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedError

from steno.contracts.errors import NoWorker, WorkerLost
from steno_worker.relay import connection
from steno_worker.relay.dialling import Dial
from tests.integration.relay.conftest import drain, relay
from tests.support.machine.tcprelay import TcpRelay
from tests.support.waiting import until
from tests.support.workers.counting import CountingEngine, ids_of


async def test_a_cut_socket_loses_no_token_and_doubles_none() -> None:
    async with relay() as running, TcpRelay("127.0.0.1", running.port) as network:
        worker = await running.worker(CountingEngine(pace_s=0.002), port=network.port)
        streams = [running.open(400) for _ in range(10)]
        results = asyncio.gather(*map(drain, streams))
        for _ in range(4):
            await asyncio.sleep(0.05)
            resumed = running.hub.counts.channels["resumed"]
            network.cut()
            await until(lambda seen=resumed: running.hub.counts.channels["resumed"] > seen)
        for events in await results:
            assert ids_of(events) == list(range(400))
        assert network.connections >= 5
        assert running.hub.counts.channels["resumed"] >= 4
        assert worker.metric("steno_worker_channels_lost_total", code="grace_over") == 0
        assert worker.metric("steno_worker_reconnects_total") >= 4


@pytest.mark.parametrize("seed", range(6))
async def test_cuts_in_the_middle_of_any_message_are_mended(seed: int) -> None:
    dice = random.Random(seed)
    async with relay(window_tokens=128) as running, TcpRelay("127.0.0.1", running.port) as network:
        await running.worker(CountingEngine(pace_s=0.001), port=network.port)
        streams = [running.open(200) for _ in range(8)]
        results = asyncio.gather(*map(drain, streams))
        while not results.done() and network.connections <= 12:
            network.cut_after_bytes = dice.randrange(1, 6000)  # sometimes inside the handshake
            await asyncio.sleep(dice.uniform(0.05, 0.3))
        network.cut_after_bytes = None
        for events in await results:
            assert ids_of(events) == list(range(200))


async def test_a_new_channel_whose_welcome_is_lost_is_no_older_one() -> None:
    # The proxy's grace is longer than the worker waits before it dials again.
    async with relay(resume_grace_s=1.0, heartbeat_s=5.0, silence_s=20.0) as running:
        async with TcpRelay("127.0.0.1", running.port) as network:
            await running.worker(CountingEngine(), port=network.port, grace_s=600.0)  # it believes in the first one
            greeting_bytes = network.passed_bytes
            for more in range(-60, 100, 40):  # the next Hello is longer, since it names a channel
                assert ids_of(await drain(running.open(3))) == [0, 1, 2]
                network.accepting = False
                network.cut()
                await until(lambda: not running.hub.workers())  # the channel is over
                network.cut_after_bytes, network.accepting = greeting_bytes + more, True
                await until(running.hub.workers)
                await until(running.hub.cards)
                network.cut_after_bytes = None
                await until(running.hub.cards)
        assert running.hub.counts.channels["protocol_error"] == 0


async def test_generation_goes_on_while_the_socket_is_gone() -> None:
    async with relay() as running, TcpRelay("127.0.0.1", running.port) as network:
        worker = await running.worker(CountingEngine(pace_s=0.001), port=network.port)
        stream = running.open(300)
        await stream.next()
        network.accepting = False
        network.cut()
        await until(lambda: worker.engine.closed)  # finished, with nobody to tell
        assert not stream.ended
        network.accepting = True
        assert len(ids_of(await drain(stream))) > 0
        assert stream.received_tokens == 300


async def test_after_the_grace_the_stream_is_lost_and_the_worker_cancels_and_comes_back_afresh() -> None:
    async with relay(resume_grace_s=0.3) as running, TcpRelay("127.0.0.1", running.port) as network:
        worker = await running.worker(CountingEngine(pace_s=0.005), port=network.port)
        stream = running.open(10_000)
        taken = await stream.next()
        network.accepting = False
        network.cut()
        before = worker.engine.tally.sampled
        with pytest.raises(WorkerLost):
            while True:
                taken += await stream.next()
        # False if this process stood still for the whole grace: then nothing was lost.
        sampled_since = worker.engine.tally.sampled > before + 1
        assert ids_of(taken) == list(range(stream.received_tokens))
        with pytest.raises(NoWorker):
            running.open(1)
        await until(lambda: worker.engine.closed)
        network.accepting = True
        await until(lambda: running.hub.cards())
        assert ids_of(await drain(running.open(5))) == list(range(5))
        await until(lambda: worker.metric("steno_worker_sampled_tokens_total") == worker.engine.tally.sampled)
        made, sent = worker.engine.tally.sampled, worker.metric("steno_worker_tokens_total")
        lost = sent - running.hub.counts.tokens
        assert made - sent <= 1 and sampled_since <= lost <= worker.metric("steno_worker_unacknowledged_tokens_total")


async def test_a_stalled_network_is_noticed_by_silence_and_the_stream_goes_on_over_a_new_socket() -> None:
    async with relay(heartbeat_s=0.1, silence_s=0.4) as running, TcpRelay("127.0.0.1", running.port) as network:
        await running.worker(CountingEngine(pace_s=0.002), port=network.port)
        stream = running.open(500)
        taken = await stream.next()
        network.pause()
        await until(lambda: not running.hub.workers()[0].connected)
        network.cut()
        network.resume()
        assert ids_of(await drain(stream, taken)) == list(range(500))


async def test_a_second_socket_of_the_same_boot_replaces_a_half_open_one() -> None:
    async with relay(silence_s=30.0) as running, TcpRelay("127.0.0.1", running.port) as network:
        worker = await running.worker(CountingEngine(pace_s=0.002), port=network.port)
        stream = running.open(300)
        taken = await stream.next()
        network.half_cut()  # the worker knows, the proxy does not
        assert ids_of(await drain(stream, taken)) == list(range(300))
        assert running.hub.counts.channels["resumed"] == 1
        assert worker.metric("steno_worker_channels_lost_total", code="replaced") == 0


async def test_a_proxy_that_starts_again_gets_its_worker_back_and_the_old_generations_stop() -> None:
    engine = CountingEngine(pace_s=0.005)
    async with relay() as first, TcpRelay("127.0.0.1", first.port) as network:
        worker = await first.worker(engine, port=network.port)
        first.open(10_000)
        await until(lambda: any(engine.generated.values()))
        async with relay() as second:
            network.target_port = second.port
            network.cut()
            await until(lambda: second.hub.cards())
            await until(lambda: engine.closed)
            assert ids_of(await drain(second.open(3))) == [0, 1, 2]
            assert worker.metric("steno_worker_channels_lost_total", code="forgotten") == 1
            worker.worker.stop()
            assert await worker.task == 0


async def test_a_worker_outlives_a_socket_that_is_reset_before_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a load balancer does whose proxy has just gone. Sockets of one process can't meet the moment."""
    refusals = [ConnectionClosedError(None, None)] * 3

    async def dial(*args: Any, **kwargs: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await Dial(*args, **kwargs)

    monkeypatch.setattr(connection, "Dial", dial)
    async with relay() as running:
        await running.worker()
        assert ids_of(await drain(running.open(10))) == list(range(10))
    assert not refusals
