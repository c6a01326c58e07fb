"""How a worker ends: told to stop, its engine dead, refused; and what the fleet's page says meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import signal

import httpx
import pytest
from prometheus_client import CollectorRegistry

from steno.contracts.errors import EngineFailed, NoWorker, WorkerLost
from steno_worker.config import WorkerSettings
from steno_worker.main import run
from steno_worker.metrics import WorkerMetrics
from tests.integration.relay.conftest import KEY, drain, relay
from tests.support.machine.tcprelay import TcpRelay
from tests.support.programs.ports import free_port
from tests.support.waiting import until
from tests.support.workers.counting import CountingEngine, ids_of


async def test_a_worker_told_to_stop_takes_no_new_turns_and_finishes_what_it_has() -> None:
    async with relay() as running:
        worker = await running.worker(CountingEngine(pace_s=0.005))
        stream = running.open(100)
        taken = await stream.next()
        worker.worker.stop()
        await until(lambda: running.hub.workers()[0].draining)
        with pytest.raises(NoWorker):
            running.open(1)
        assert ids_of(await drain(stream, taken)) == list(range(100))
        assert await asyncio.wait_for(worker.task, 60) == 0
        await until(lambda: not running.hub.workers())


async def test_what_is_not_finished_in_time_fails_with_what_was_made(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # what other tests have left
    caplog.clear()
    async with relay() as running:
        worker = await running.worker(CountingEngine(pace_s=0.005), drain_s=0.1)
        stream = running.open(100_000)
        taken = await stream.next()
        worker.worker.stop()
        with pytest.raises(WorkerLost):
            while True:
                taken += await stream.next()
        assert ids_of(taken) == list(range(worker.engine.generated.popitem()[1]))
        assert await worker.task == 0
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"], "an exception that nobody looked at"


async def test_a_dead_engine_fails_its_streams_tells_the_proxy_and_ends_the_worker() -> None:
    async with relay() as running:
        worker = await running.worker(CountingEngine(pace_s=0.01))
        streams = [running.open(10_000) for _ in range(3)]
        for stream in streams:
            await stream.next()
        worker.engine.died = "out of memory"
        for stream in streams:
            with pytest.raises(EngineFailed):
                await drain(stream)
        assert await asyncio.wait_for(worker.task, 60) == 1
        assert worker.metric("steno_worker_engine_up") == 0
        with pytest.raises(NoWorker):
            running.open(1)


async def test_a_worker_with_a_wrong_key_ends_and_says_so() -> None:
    async with relay() as running:
        worker = await running.worker(key="wrong", connected=False)
        assert await asyncio.wait_for(worker.task, 60) == 2
        assert running.hub.counts.channels["refused"] == 1


async def test_a_worker_waits_for_a_proxy_that_is_not_there_yet_and_serves_several() -> None:
    async with relay() as first, relay() as second:
        urls = [f"ws://127.0.0.1:{port}" for port in (first.port, second.port)]
        worker = await first.worker(worker_id="both", proxy=urls)
        await until(lambda: second.hub.cards())
        streams = [first.open(20), second.open(30)]
        assert [len(ids_of(await drain(stream))) for stream in streams] == [20, 30]
        worker.worker.stop()
        assert await worker.task == 0


async def test_a_proxy_that_stops_says_goodbye_and_generations_stop_at_once() -> None:
    async with relay() as running:
        worker = await running.worker(CountingEngine(pace_s=0.005))
        stream = running.open(100_000)
        await stream.next()
        await running.hub.close()
        with pytest.raises(WorkerLost):
            await drain(stream)
        await until(lambda: worker.engine.closed)


async def test_the_page_of_workers_says_what_the_hub_knows() -> None:
    async with relay(silence_s=60.0) as running:
        await running.worker(CountingEngine(pace_s=0.01), worker_id="w1")
        stream = running.open(100_000)
        await stream.next()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}", timeout=60) as client:
            (view,) = (await client.get("/workers")).json()["items"]
            schema = (await client.get("/openapi.json")).json()["paths"]["/workers"]["get"]["responses"]["200"]
        assert (view["id"], view["in_flight"], view["healthy"], view["connected"]) == ("w1", 1, True, True)
        assert view["models"][0]["name"] == "counting"
        properties = schema["content"]["application/json"]["schema"]["properties"]["items"]["items"]["properties"]
        assert set(view) == set(properties)
        stream.cancel("enough")


async def test_run_starts_the_engine_serves_until_sigterm_and_counts() -> None:
    async with relay() as running:
        metrics = WorkerMetrics(CollectorRegistry())
        settings = WorkerSettings(proxy=[f"ws://127.0.0.1:{running.port}"], key=KEY, metrics_port=0)
        worker = asyncio.create_task(run(settings, CountingEngine(), metrics))
        await until(lambda: running.hub.cards())
        await drain(running.open(50))
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(worker, 60) == 0
        assert metrics.registry.get_sample_value("steno_worker_tokens_total") == 50
        assert metrics.registry.get_sample_value("steno_worker_generations_total", {"end": "length"}) == 1


class LoadingEngine(CountingEngine):
    """Its `start` waits for `loaded`."""

    def __init__(self) -> None:
        super().__init__()
        self.starting = asyncio.Event()
        self.loaded = asyncio.Event()

    async def start(self) -> None:
        self.starting.set()
        await self.loaded.wait()


async def test_metrics_are_503_until_the_engine_is_up() -> None:
    """They are what probes ask: a pod that is ready before its engine lets the next one be replaced."""
    async with relay() as running, httpx.AsyncClient(timeout=60) as client:
        engine, port = LoadingEngine(), free_port()
        settings = WorkerSettings(proxy=[f"ws://127.0.0.1:{running.port}"], key=KEY, metrics_port=port)
        worker = asyncio.create_task(run(settings, engine, WorkerMetrics(CollectorRegistry())))
        await asyncio.wait_for(engine.starting.wait(), 60)
        answer = await client.get(f"http://127.0.0.1:{port}/metrics")
        assert (answer.status_code, answer.text) == (503, "the engine is not up yet\n")
        engine.loaded.set()
        await until(lambda: running.hub.cards())
        answer = await client.get(f"http://127.0.0.1:{port}/metrics")
        assert answer.status_code == 200 and "steno_worker_engine_up 1.0" in answer.text
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(worker, 60) == 0


async def test_a_worker_told_to_stop_while_it_dials_ends_too() -> None:
    async with relay() as first, relay() as second, TcpRelay("127.0.0.1", second.port) as line:
        line.pause()
        urls = [f"ws://127.0.0.1:{port}" for port in (first.port, line.port)]
        worker = await first.worker(worker_id="both", proxy=urls, connected=False)
        await until(lambda: first.hub.cards() and line.connections)
        worker.worker.stop()
        await until(lambda: not first.hub.workers())
        line.resume()
        assert await asyncio.wait_for(worker.task, 60) == 0
        assert not second.hub.workers()
