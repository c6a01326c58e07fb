"""What waits to be acknowledged is counted before it is sent: a request is refused or waits, and no channel ends for it."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from steno.contracts.chat import Job
from steno.contracts.errors import BodyTooLarge, TooManyRequests
from steno.contracts.wire.frames import Delta, Generate
from steno.contracts.wire.peer import REQUESTS_SHARE
from steno.contracts.wire.peer_ends import ProxyPeer, WorkerPeer
from steno_proxy.workers import hub
from steno_proxy.workers.placement import Order
from steno_proxy.workers.routing import score
from steno_worker.relay import connection
from tests.integration.relay.conftest import Relay, drain, relay
from tests.support.machine.tcprelay import TcpRelay
from tests.support.waiting import until
from tests.support.workers.counting import CountingEngine, ids_of, job

MOST = 2**20
SIZE = 100_000
FIT = int(MOST * REQUESTS_SHARE) // (SIZE + 300)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels that keep 1 MiB instead of 128."""
    for module, kind in ((hub, ProxyPeer), (connection, WorkerPeer)):
        monkeypatch.setattr(module, kind.__name__, partial(kind, max_retained_bytes=MOST))


def order(number: int, size: int = SIZE, trial: str = "trial") -> Order:
    asked = job(2)
    asked.messages[0]["content"] = "x" * size
    return Order(trial, f"{number:012x}", asked, full_too=True)


async def test_requests_beyond_what_may_wait_are_refused_and_go_once_there_is_room(small: None) -> None:
    async with relay() as running, TcpRelay("127.0.0.1", running.port) as network:
        await running.worker(port=network.port)
        mine = running.open(300)
        network.pause()
        streams = [running.hub.open(order(number)) for number in range(FIT)]
        with pytest.raises(TooManyRequests, match="wait to be acknowledged"):
            running.hub.open(order(FIT))
        with pytest.raises(TooManyRequests, match="wait to be acknowledged"):
            await running.hub.count("trial", order(FIT).job, "")
        with pytest.raises(BodyTooLarge, match="may wait to be acknowledged"):
            running.hub.open(order(FIT, MOST))
        waiting = [asyncio.create_task(running.hub.place(order(FIT + number))) for number in range(3)]
        await until(lambda: len(running.hub.waiting) == 3)
        network.resume()
        for stream in [*streams, *await asyncio.gather(*waiting)]:
            assert ids_of(await drain(stream)) == [0, 1]
        assert ids_of(await drain(mine)) == list(range(300))
        assert running.hub.counts.channels["lost"] == 0


async def test_a_request_that_one_worker_has_no_room_for_goes_to_another(small: None) -> None:
    async with relay() as running, TcpRelay("127.0.0.1", running.port) as network:
        await running.worker(port=network.port, worker_id="stuck")
        await running.worker(worker_id="well")
        await until(lambda: len(running.hub.cards()) and len(running.hub.workers()) == 2)
        network.pause()
        names = (f"trial-{number}" for number in range(100))
        trial = next(name for name in names if score(name, "stuck") > score(name, "well"))
        streams = [running.hub.open(order(number, trial=trial)) for number in range(FIT + 1)]
        assert [stream.worker_id for stream in streams] == ["stuck"] * FIT + ["well"]
        network.resume()
        for stream in streams:
            assert ids_of(await drain(stream)) == [0, 1]
        assert running.hub.counts.channels["lost"] == 0


async def test_counts_that_nobody_waits_for_any_more_are_at_the_worker_all_the_same(small: None) -> None:
    async with relay() as running, TcpRelay("127.0.0.1", running.port) as network:
        await running.worker(port=network.port)
        network.pause()
        left = [asyncio.create_task(running.hub.count("trial", job(1), "")) for _ in range(64)]
        await asyncio.sleep(0)
        for one in left:
            one.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        with pytest.raises(TooManyRequests, match="busy counting"):
            await running.hub.count("trial", job(1), "")
        network.resume()
        await until(lambda: running.hub._workers and not next(iter(running.hub._workers.values()))._counting)
        assert await running.hub.count("trial", job(1), "") == len("count")


class Verbose(CountingEngine):
    """A long word for each token."""

    async def generate(self, request: Generate):  # type: ignore[no-untyped-def]
        async for event in super().generate(request):
            if isinstance(event, Delta):
                event.content = "x" * 10_000
            yield event


async def test_what_a_worker_has_to_say_waits_at_its_engine_while_nothing_is_acknowledged(small: None) -> None:
    async with relay(window_tokens=10_000) as running, TcpRelay("127.0.0.1", running.port) as network:
        worker = await running.worker(Verbose(), port=network.port)
        streams = [running.open(100) for _ in range(8)]  # 8 MB
        await until(lambda: len(worker.engine.generated) == 8)
        network.pause()
        peer = worker.worker._clients[0]._peer
        await until(lambda: peer.channel.retained_bytes >= MOST // 2)
        for _ in range(100):
            await asyncio.sleep(0)
        assert peer.channel.retained_bytes < MOST
        network.resume()
        for stream in streams:
            assert ids_of(await drain(stream)) == list(range(100))
        assert running.hub.counts.channels["lost"] == 0


async def _two_sizes(running: Relay) -> None:
    await running.worker(worker_id="small", max_packet_bytes=65536)
    await running.worker(worker_id="large")
    await until(lambda: len(running.hub.workers()) == 2)


async def test_a_worker_gets_no_packet_that_is_larger_than_it_takes() -> None:
    async with relay() as running:
        await _two_sizes(running)
        mine = [running.open(300, trial_id=f"trial-{number}") for number in range(8)]
        assert {stream.worker_id for stream in mine} == {"small", "large"}
        for number in range(8):
            stream = running.hub.open(order(number, trial=f"trial-{number}"))
            assert stream.worker_id == "large"
            assert ids_of(await drain(stream)) == [0, 1]
        for stream in mine:
            assert ids_of(await drain(stream)) == list(range(300))
        assert running.hub.counts.channels["lost"] == running.hub.counts.channels["resumed"] == 0


async def test_what_can_not_be_encoded_is_its_clients_fault() -> None:
    deep: object = {}
    for _ in range(20_000):  # Python 3.13 goes deeper than 3.11
        deep = {"a": deep}
    async with relay() as running:
        await running.worker()
        with pytest.raises(Exception, match="can't be sent between proxy and worker") as caught:
            running.hub.open(Order("trial", "f" * 12, Job(messages=[{"role": "user", "content": deep}])))
        assert getattr(caught.value, "status", 0) == 400
