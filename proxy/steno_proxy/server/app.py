"""Wires the proxy: settings, store, hub, recorder, routers; and runs it on uvicorn.

`create_app` is what tests and embedders use; `run` is `steno proxy`. Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from steno.contracts.errors import StenoError
from steno_proxy import logs
from steno_proxy.api import openapi
from steno_proxy.api.agent_http import BodyReader
from steno_proxy.api.agents import counting, gemini, generation, messages, response_socket, responses
from steno_proxy.api.agents.lookup import HealthProbes
from steno_proxy.api.bodies_in_flight import BodiesInFlight
from steno_proxy.api.common import Ports, Services, reader
from steno_proxy.api.control import groups, leases, ops, policy, runs, search, sessions, steps, ui, under_way, workers
from steno_proxy.api.origin_guard import OriginGuard
from steno_proxy.auth import generated_keys
from steno_proxy.auth.key_reload import KeyReloader
from steno_proxy.auth.keys import Keyring
from steno_proxy.auth.rate_limit import RateLimiter
from steno_proxy.config.settings import ProxySettings
from steno_proxy.pace import Pace
from steno_proxy.policies.keeper import PolicyKeeper
from steno_proxy.server.accepting import Acceptor
from steno_proxy.server.embedded_worker import Beside, EmbeddedWorker
from steno_proxy.server.front import Application, on_http_error, on_steno_error, on_surprise, on_validation_error
from steno_proxy.server.heap import HeapTrimmer
from steno_proxy.server.http_protocol import BoundedHttp
from steno_proxy.server.listeners import BACKLOG, listeners
from steno_proxy.server.store_startup import begin
from steno_proxy.server.sweep import Sweeper
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.note_writer import NoteWriter
from steno_proxy.session_cache.store_capacity import StoreCapacity
from steno_proxy.store.interface import SessionStore
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.tracing.traces import Traces, open_traces
from steno_proxy.turns.service import TurnService
from steno_proxy.workers.hub import Hub
from steno_proxy.workers.relay_settings import RelaySettings
from steno_proxy.workers.token_texts import TokenTextsKeeper
from steno_proxy.workers.worker_socket import OpeningSocket

if TYPE_CHECKING:
    from steno_proxy.archive.archiver import Archiver  # imports Redis, which not every proxy has

log = logging.getLogger(__name__)

GC_THRESHOLDS = (25_000, 5, 80)
"""A packet of 512 streams is some 1,500 objects, none of them in a cycle: at Python's own 700 the collector runs several times
for each and takes a fifth of all time. At 25,000 a young collection takes about a millisecond, and one of the middle generation
five times that at most: with 20 in place of 5 it held the loop for 70 ms where large requests came one after another."""


def create_app(settings: ProxySettings, store: SessionStore | None = None) -> FastAPI:
    """The application. The store is opened and closed with it.

    Args: store: instead of the one that the settings name.
    Raises: ConfigError: settings that can't be served safely.
    """
    settings.check()
    pace = Pace()
    archiver = None
    if store is None:
        store, archiver = _store(settings, pace)
    keys = Keyring.of(settings)
    hub = Hub(relay_settings(settings, keys), proxy_id=f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
    hub.is_worker = keys.is_worker
    keys.generation_of = lambda trial_id: _generation(store, trial_id)
    key_reloader = KeyReloader(keys, settings, hub.revoke)
    rates = RateLimiter(settings.trial_requests_per_s, settings.trial_burst, settings.trial_streams)
    ports = Ports() if settings.control_port is not None else None
    policies = hub.watcher = PolicyKeeper(store.policies, clock=store.clock)
    hub.is_model, hub.has_default = policies.names.__contains__, policies.names.has_default
    policies.on_names = hub.waiting.wake
    capacity = StoreCapacity(store)
    recorder = Recorder(store, cache_bytes=settings.tree_cache_bytes, implicit=not keys.enabled, capacity=capacity)
    traces = recorder.traces = open_traces(settings)
    turns = TurnService(recorder, hub, default_max_tokens=settings.default_max_tokens, pace=pace)
    services = Services(settings, keys, store, recorder, hub, policies, ports, capacity, pace)
    note_writer = NoteWriter(store)
    sweeper = Sweeper(store, recorder, settings, capacity, archiver)
    heap = HeapTrimmer()
    beside = _BesideRequests(services, sweeper, note_writer, key_reloader, traces, heap)
    app = Application(
        settings.base_path,
        body_timeout_s=settings.body_timeout_s,
        max_spec_bytes=settings.max_body_bytes,
        title="Steno",
        version="0.1.0",
        lifespan=beside.lifespan,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=openapi.operation_name,
        redirect_slashes=False,  # to an address that knows nothing of what stands before the proxy
    )
    app.state.hub = hub
    app.state.turns = turns
    app.state.services = services
    app.state.key_reloader = key_reloader
    app.ports = ports
    app.origin_guard = OriginGuard.of(settings)
    bodies = BodyReader(
        max_bytes=settings.max_body_bytes,
        timeout_s=settings.body_timeout_s,
        max_nodes=settings.max_request_nodes,
        inflight=BodiesInFlight(settings.max_inflight_bytes, settings.trial_inflight_bytes, heap.freed),
        pace=pace,
    )
    _add_routes(app, services, turns, {"bodies": bodies, "rates": rates}, note_writer)

    @cache
    def document(agents_port: int) -> dict[str, Any]:
        return openapi.document(app, settings, keys=keys.enabled, agents_port=agents_port)

    app.openapi = lambda: document(ports.agents if ports is not None else 0)  # type: ignore[method-assign]
    return app


@dataclass(frozen=True)
class _BesideRequests:
    """What runs while the application does, whatever is asked of it."""

    services: Services
    sweeper: Sweeper
    note_writer: NoteWriter
    key_reloader: KeyReloader
    traces: Traces | None
    heap: HeapTrimmer

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        store, hub, policies = self.services.store, self.services.hub, self.services.policies
        self.heap.fix_threshold()
        opening = await begin(store, self.services.keys)
        sweeping = self.sweeper.start()
        keeper = asyncio.create_task(policies.run())
        noting = asyncio.create_task(self.note_writer.run())
        naming = asyncio.create_task(TokenTextsKeeper(store.token_texts, hub.channels).run())
        rotating = asyncio.create_task(self.key_reloader.run()) if self.key_reloader else None
        if self.traces is not None:
            self.traces.start()
        try:
            yield
        finally:
            tasks = sweeping | {task for task in (keeper, noting, naming, rotating, opening) if task is not None}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.heap.close()
            await hub.close()
            policies.close()
            await self.services.recorder.close()
            await self.note_writer.flush()
            await store.close()
            if self.traces is not None:
                await asyncio.to_thread(self.traces.close)


def _add_routes(
    app: Application, found: Services, turns: TurnService, bounds: dict[str, Any], note_writer: NoteWriter
) -> None:
    """Args: bounds: on bodies and rates, of every route of the agents."""
    hub, keys = found.hub, found.keys
    of_turns = {"keepalive_s": found.settings.keepalive_s, "note_writer": note_writer, **bounds}
    agents = generation.routes(turns, hub, keys, chat_reasoning=found.settings.chat_reasoning, **of_turns)
    app.router.routes += [*gemini.routes(hub, keys), *agents, *messages.routes(hub, keys, **bounds)]
    app.router.routes += responses.routes(found.recorder, hub, keys, **bounds)
    app.turns = generation.by_path(agents)
    app.sockets = response_socket.by_path(turns, keys, found.stopping, **of_turns)
    app.actions = gemini.actions(turns, hub, keys, **of_turns)
    app.router.routes += _control_routes()
    app.router.routes += [*HealthProbes(keys, app.version).routes(), *counting.routes(hub, keys, **bounds)]
    app.add_exception_handler(StenoError, on_steno_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_surprise)


@cache
def _control_routes() -> list[BaseRoute]:
    """The routes of the control plane and the viewer. They depend on no setting, and making them takes most of the time to make
    an application: a process that makes several (tests do) makes these once."""
    control = APIRouter(generate_unique_id_function=openapi.operation_name)
    for router in (
        sessions.router,
        groups.router,
        leases.router,
        steps.router,  # before `/runs/{run_id:path}`, which would take its paths
        runs.router,
        policy.router,
        ops.router,
        ui.router,
        search.router,
        under_way.router,
        workers.router(Depends(reader)),
    ):
        control.include_router(router)
    return control.routes


def relay_settings(settings: ProxySettings, keys: Keyring) -> RelaySettings:
    return RelaySettings(
        heartbeat_s=settings.heartbeat_s,
        silence_s=settings.silence_s,
        resume_grace_s=settings.resume_grace_s,
        max_packet_bytes=settings.max_packet_bytes,
        window_tokens=settings.window_tokens,
        max_waiting=settings.max_waiting,
        queue_s=settings.queue_s,
        worker_key=keys.worker,
    )


async def _generation(store: SessionStore, trial_id: str) -> int:
    return (await store.session(trial_id)).key_generation


def _store(settings: ProxySettings, pace: Pace) -> tuple[SessionStore, Archiver | None]:
    if settings.redis_url is None:
        return MemoryStore(), None
    from steno_proxy.archive.archiver import Archiver
    from steno_proxy.archive.objects import ObjectStorage
    from steno_proxy.store.redis.link.wait import ReplicaWait
    from steno_proxy.store.redis.store import RedisStore

    wait = ReplicaWait(settings.redis_wait_replicas, settings.redis_wait_s) if settings.redis_wait_replicas else None
    url = settings.archive_url
    objects = ObjectStorage(url) if url is not None else None
    store = RedisStore(settings.redis_url, wait=wait, pace=pace, shelf=objects)
    return store, Archiver(store, objects) if objects is not None else None


LAST_CALLS_S = 7
"""Seconds that other requests get after the streams have ended: longer than any call to the store takes."""


class _Server(uvicorn.Server):
    """Says where it listens, once it does: with port 0 nobody else knows. Ends streams before sockets, and tells the workers:
    uvicorn's own shutdown closes their sockets first, and what they and we still had to say would be lost."""

    def __init__(
        self, config: uvicorn.Config, state: State, turns: TurnService, shutdown_s: float, beside: Beside | None
    ) -> None:
        super().__init__(config)
        self._turns = turns
        self._services: Services = state.services
        self._key_reloader: KeyReloader = state.key_reloader
        self._looking: asyncio.Task[None] | None = None
        self._shutdown_s = shutdown_s
        self.companion = EmbeddedWorker(beside, self._stop) if beside else None

    def _stop(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises the signal again once it has stopped: a graceful end would look like a kill (exit code -15)."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        self._services.stopping.set()
        # After what is asked there now: at a connection that stays open, a client would be refused again and again.
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedHttp):
                connection.shutdown()
        await self._turns.drain(self._shutdown_s)
        if self.companion is not None:
            await self.companion.stop()
        await self._turns.hub.close()
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if sys.platform == "win32":  # its loop knows no readers
            await super().startup(sockets)
        else:
            await super().startup([])
            self.servers = [Acceptor(listener, self._protocol) for listener in sockets or []]  # type: ignore[misc]
        gc.collect()
        gc.freeze()  # what has been imported and wired stays: full collections need not look at it, and pause the streams less
        gc.set_threshold(*GC_THRESHOLDS)
        if self._key_reloader:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._look_at_keys)
        addresses = [listener.getsockname()[:2] for server in self.servers for listener in server.sockets]
        ports = self._services.ports
        if ports is not None and addresses:
            ports.agents, ports.control = addresses[0][1], addresses[-1][1]
        for host, port in addresses:
            whose = "" if ports is None else " (control plane)" if port == ports.control else " (agents)"
            log.info("proxy listening on http://%s:%d%s", f"[{host}]" if ":" in host else host, port, whose)
        if self.companion is not None and addresses:
            host, port = addresses[-1]
            self.companion.start(host, port, self._services.keys.own)

    def _protocol(self) -> asyncio.Protocol:
        """As uvicorn makes one for each connection."""
        made: asyncio.Protocol = self.config.http_protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )  # type: ignore[call-arg]
        return made

    def _look_at_keys(self) -> None:
        self._looking = asyncio.create_task(self._key_reloader.look(at_once=True))


def run(settings: ProxySettings, beside: Beside | None = None) -> int:
    """Serve until SIGTERM or SIGINT; open streams then get `shutdown_s` to finish. Returns the exit code.

    Args: beside: runs in the same event loop meanwhile.
    Raises: ConfigError: settings that can't be served; CannotListen. What `beside` ended with.
    """
    logs.setup(settings.log_level, settings.log_format)
    settings, made = generated_keys.fill(settings)
    app = create_app(settings)
    if made and settings.keys_dir is not None:
        print(
            generated_keys.announcement(made, settings.keys_dir), flush=True
        )  # not a log line: logs are shipped elsewhere
    if settings.admin_key is None:
        log.warning(
            "no admin key: any process on this machine may read and reward every session; listening on loopback only"
        )
    if settings.redis_url is None:
        log.warning("sessions are kept in memory and end with this process; set --redis-url to keep them")
    server = _Server(
        uvicorn.Config(
            app,
            loop="uvloop" if sys.platform != "win32" else "asyncio",
            http=BoundedHttp,
            ws=OpeningSocket,
            ws_max_size=settings.max_packet_bytes,
            ws_per_message_deflate=False,  # tokens do not compress, and zlib would cost more than all else
            ws_ping_interval=None,  # the relay has heartbeats of its own
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=LAST_CALLS_S + math.ceil(settings.redis_wait_s),
        ),
        app.state,
        app.state.turns,
        settings.shutdown_s,
        beside,
    )
    server.run(sockets=listeners(settings))
    if server.companion is not None and server.companion.failure is not None:
        raise server.companion.failure
    return 0 if server.started else 1
