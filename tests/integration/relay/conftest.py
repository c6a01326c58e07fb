"""Real sockets: a hub behind uvicorn, and real worker clients, in one uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvloop
from fastapi import Depends, FastAPI
from prometheus_client import CollectorRegistry

from steno.contracts.wire.frames import StreamEvent
from steno_proxy.api.control.workers import router
from steno_proxy.workers.hub import Hub
from steno_proxy.workers.placement import Order
from steno_proxy.workers.relay_settings import RelaySettings
from steno_proxy.workers.stream import Stream
from steno_worker.config import WorkerSettings
from steno_worker.main import Worker
from steno_worker.metrics import WorkerMetrics
from tests.support.programs.server import serve
from tests.support.waiting import until
from tests.support.workers.counting import CountingEngine, job

KEY = "the workers' key"
_turns = itertools.count(1)


def pytest_asyncio_loop_factories() -> dict[str, Any]:
    return {"uvloop": uvloop.new_event_loop}


@dataclass
class Running:
    """A worker under test; `code` is its exit code once it has ended."""

    worker: Worker
    engine: CountingEngine
    metrics: WorkerMetrics
    proxies: list[str]
    task: asyncio.Task[int] = field(repr=False)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


class Relay:
    """One hub, its port, and the workers that a test starts."""

    def __init__(self, hub: Hub, port: int) -> None:
        self.hub = hub
        self.port = port
        self._running: list[Running] = []

    async def worker(
        self, engine: CountingEngine | None = None, *, port: int | None = None, connected: bool = True, **settings: Any
    ) -> Running:
        engine = engine or CountingEngine()
        metrics = WorkerMetrics(CollectorRegistry())
        given: dict[str, Any] = {
            "proxy": [f"ws://127.0.0.1:{port or self.port}"],
            "key": KEY,
            "max_backoff_s": 0.2,
        } | settings
        worker = Worker(WorkerSettings(**given), engine, metrics)
        running = Running(worker, engine, metrics, given["proxy"], asyncio.create_task(worker.run()))
        self._running.append(running)
        if connected:
            await until(lambda: running.metric("steno_worker_proxies") == len(running.proxies))
        return running

    def open(self, tokens: int, trial_id: str = "trial") -> Stream:
        return self.hub.open(Order(trial_id, f"{next(_turns):012x}", job(tokens)))

    def forget(self, running: Running) -> None:
        """It has failed, as the test wanted."""
        assert running.task.done()
        self._running.remove(running)

    async def stop_workers(self) -> None:
        for running in self._running:
            running.worker.stop()
            running.worker.stop()
        ends = await asyncio.gather(*(running.task for running in self._running), return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):  # a test that cancels a worker has killed it
                raise end


@contextlib.asynccontextmanager
async def relay(**settings: Any) -> AsyncIterator[Relay]:
    """A hub behind a real server. Its deadlines are long: a test that waits for one to pass sets it."""
    long = {"heartbeat_s": 5.0, "silence_s": 60.0, "resume_grace_s": 60.0}
    given: dict[str, Any] = long | {"worker_key": KEY} | settings
    hub = Hub(RelaySettings(**given), proxy_id="proxy-under-test")
    app = FastAPI()
    app.state.hub = hub
    app.include_router(router(Depends(lambda: None)))
    async with serve(app) as port:
        running = Relay(hub, port)
        try:
            yield running
        finally:
            await running.stop_workers()
            await hub.close()


async def drain(stream: Stream, events: list[StreamEvent] | None = None) -> list[StreamEvent]:
    """Everything to the end of the stream."""
    taken = [] if events is None else events
    while True:
        taken += await stream.next()
        if stream.ended and type(taken[-1]).__name__ == "Finish":
            return taken
