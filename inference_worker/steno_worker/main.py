"""`steno worker`: an engine, one client per proxy, and an orderly end.

Exit codes: 0 it was told to stop; 1 the engine died, so that a supervisor starts a new one; 2 every proxy refused it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import os
import signal
import threading
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, cast

from steno.config.extras import how_to_install
from steno.config.object_store import ObjectStore
from steno.contracts.errors import CannotListen, ConfigError, EngineFailed, WorkerLost
from steno.contracts.wire.frames import ModelCard
from steno.contracts.wire.packets import UNAUTHORIZED
from steno_worker.config import WorkerSettings
from steno_worker.interfaces import Engine
from steno_worker.metrics import WorkerMetrics
from steno_worker.relay.connection import ProxyConnection
from steno_worker.weights.update_runner import UpdateRunner

logger = logging.getLogger(__name__)
STOPPED, ENGINE_DIED, REFUSED = 0, 1, 2
EXTRAS = {"vllm": "vllm", "litellm": "litellm"}
"""Engine -> the extra of the distribution that brings what it needs, where that is not `worker`."""
KEY_REMEDY = "; give it with --key-file or STENO_WORKER_KEY"


def build_engine(settings: WorkerSettings) -> Engine:
    """The engine by its name; what it needs is imported only now. Raises ConfigError."""
    try:
        module: Any = importlib.import_module(f"steno_worker.engines.{settings.engine}.engine")
    except ImportError as error:
        if error.name is None or error.name.startswith("steno_worker"):
            raise
        extra = EXTRAS.get(settings.engine, "worker")
        hint = how_to_install(extra) + (", or on a CPU requirements/vllm-cpu.txt" if extra == "vllm" else "")
        raise ConfigError(f"engine {settings.engine} needs {error.name}: {hint}", field="engine") from error
    return cast(Engine, module.build(settings))


class Worker:
    """One engine and its clients. `stop` may be called from a signal handler; a second time it does not wait for streams."""

    def __init__(
        self, settings: WorkerSettings, engine: Engine, metrics: WorkerMetrics, objects: ObjectStore | None = None
    ) -> None:  # fmt: skip
        """Args: objects: the object store at `weights_url`; None: none is read."""
        self._settings = settings
        self._engine = engine
        self._metrics = metrics
        metrics.tally = engine.tally
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._death: str | None = None
        boot_id = uuid.uuid4().hex
        self._updates = UpdateRunner(
            engine, metrics, announce=self.announce, staging_dir=settings.staging_dir, objects=objects
        )
        self._clients = [
            ProxyConnection(
                url, settings, boot_id=boot_id, engine=engine, updates=self._updates, metrics=metrics,
                on_engine_death=self._engine_died,
            )
            for url in settings.proxy
        ]  # fmt: skip

    def stop(self) -> None:
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def run(self) -> int:
        """Serve until stopped, refused by all, or the engine's death. Returns the exit code."""
        self._metrics.engine_up.set(1)
        runs = [asyncio.create_task(client.run()) for client in self._clients]
        for client, task in zip(self._clients, runs, strict=True):
            task.add_done_callback(functools.partial(_tell_failure, client.url))
        # With exceptions as results: that one connection failed is not the others' end.
        serving: asyncio.Future[Any] = asyncio.gather(*runs, return_exceptions=True)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await self._leave()
            ends = await serving
            failure = next((end for end in ends if isinstance(end, Exception)), None)
            if failure is not None and not self._stopping.is_set():  # no connection is left
                raise failure
        finally:
            stopping.cancel()
            for task in runs:
                task.cancel()
            await asyncio.gather(serving, *runs, return_exceptions=True)
            await self._updates.close()
        if self._death is not None:
            return ENGINE_DIED
        refusals = [client.refused for client in self._clients if client.refused is not None]
        for client in self._clients:
            if client.refused is not None:
                remedy = KEY_REMEDY if client.refused.code == UNAUTHORIZED else ""
                logger.error("%s refused this worker: %s%s", client.url, client.refused.reason, remedy)
        return REFUSED if len(refusals) == len(self._clients) else STOPPED

    async def _leave(self) -> None:
        if self._death is not None:
            error: EngineFailed | WorkerLost = EngineFailed(f"the engine died: {self._death}")
            for client in self._clients:
                client.streams.fail_all(error)
                client.announce(healthy=False, draining=False, reason=self._death)
            await self._streams_end(within_s=1.0)
        else:
            error = WorkerLost("the worker was told to stop")
            for client in self._clients:
                client.announce(healthy=self._updates.healthy, draining=True, reason="told to stop")
            await self._streams_end(within_s=self._settings.drain_s)
            for client in self._clients:
                client.streams.fail_all(error)
            await self._streams_end(within_s=1.0)
        await asyncio.gather(*(client.leave(error.code, error.message) for client in self._clients))

    async def _streams_end(self, *, within_s: float) -> None:
        """Wait for every generation to end, unless time runs out or a second stop hurries."""
        done = asyncio.create_task(self._streams_finished())
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait({done, hurry}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            done.cancel()
            hurry.cancel()
            await asyncio.gather(done, hurry, return_exceptions=True)

    async def _streams_finished(self) -> None:
        for client in self._clients:
            await client.streams.finished()

    def announce(self) -> None:
        """Tell all proxies the present cards and health. If the loaded weights are invalid, every generation fails first."""
        if self._death is None:
            for client in self._clients:
                if not self._updates.healthy:
                    client.streams.fail_all(EngineFailed(f"the loaded weights are invalid: {self._updates.reason}"))
                client.announce(
                    healthy=self._updates.healthy, draining=self._stopping.is_set(), reason=self._updates.reason
                )

    def _engine_died(self, reason: str) -> None:
        if self._death is None:
            self._death = reason
            logger.error("the engine died: %s", reason)
            self._metrics.engine_up.set(0)
            self._stopping.set()


def _tell_failure(url: str, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the connection with %s failed and is not tried again", url, exc_info=error)


async def run(settings: WorkerSettings, engine: Engine | None = None, metrics: WorkerMetrics | None = None) -> int:
    """Build and start the engine, serve until SIGTERM or SIGINT, stop the engine. Returns the exit code.

    Raises: ConfigError: settings, or an engine that does not start; CannotListen.
    """
    metrics = metrics or WorkerMetrics()
    url = settings.weights_url
    objects = ObjectStore(url, "weights_url") if url is not None else None
    with _metrics_served(settings, metrics):
        engine = engine or build_engine(settings)
        await engine.start()
        metrics.ready = True
        try:
            return await _serve(settings, engine, metrics, objects)
        finally:
            await engine.stop()


def remarks(cards: Iterable[ModelCard]) -> list[str]:
    """Warnings for the operator about the models that the worker serves."""
    return [
        f"agents get the tool calls of {card.name} as text: no tool call parser is set (vLLM: -- --tool-call-parser NAME)"
        for card in cards
        if "tools" not in card.capabilities and not card.text_only
    ]


async def _serve(
    settings: WorkerSettings, engine: Engine, metrics: WorkerMetrics, objects: ObjectStore | None
) -> int:  # fmt: skip
    worker = Worker(settings, engine, metrics, objects)
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for name in signals:
        loop.add_signal_handler(name, worker.stop)
    cards = ", ".join(card.name for card in engine.cards())
    logger.info("worker %s serves %s for %s", settings.worker_id, cards, ", ".join(settings.proxy))
    for remark in remarks(engine.cards()):
        logger.warning("%s", remark)
    try:
        return await worker.run()
    finally:
        for name in signals:
            loop.remove_signal_handler(name)


def main(settings: WorkerSettings) -> int:
    """`run` in an event loop of its own, with logging. For the command line."""
    import uvloop

    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True
    )
    signal.signal(signal.SIGTERM, _end_at_once)
    return uvloop.run(run(settings))


def _end_at_once(*_: object) -> None:
    """Handles SIGTERM until the worker serves: a model that loads may block the event loop for minutes. In a container this is
    process 1, for which the kernel ignores a SIGTERM without a handler."""
    os._exit(STOPPED)


@contextlib.contextmanager
def _metrics_served(settings: WorkerSettings, metrics: WorkerMetrics) -> Iterator[None]:
    """Serve /metrics in a thread. The port is bound at once, before a model is loaded, and answers 503 until `metrics.ready`.

    Raises: CannotListen.
    """
    if settings.metrics_port is None:
        yield
        return
    host, port = settings.metrics_host, settings.metrics_port
    try:
        server = metrics.bind(host, port)
    except OSError as error:
        raise CannotListen("metrics_port", host, port, error) from error
    threading.Thread(target=server.serve_forever, daemon=True).start()
    logger.info("metrics at http://%s:%d/metrics", host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
