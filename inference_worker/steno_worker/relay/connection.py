"""The worker's end of the relay with one proxy: dials, carries packets, comes back when the socket is lost.

The protocol is `steno/contracts/wire/peer.py`, the generations are `generations.py`; here are the socket, the timers and the
reconnects. A lost socket stops no generation: their frames wait in the channel. The frames of all streams that are ready in one
turn of the event loop leave in one packet; under load, packets leave at most every COALESCE_S.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, WebSocketException

from steno.contracts.errors import ProtocolError, StenoError
from steno.contracts.wire.frames import (
    PROTOCOL_VERSION,
    Abandon,
    Announce,
    Apply,
    Cancel,
    Chunk,
    Count,
    Credit,
    Delta,
    Frame,
    Generate,
    Heartbeat,
    Hello,
    Prepare,
)
from steno.contracts.wire.packets import CLOSE_GOING_AWAY, CLOSE_PROTOCOL_ERROR, REFUSALS
from steno.contracts.wire.peer import HANDSHAKE_S, ChannelLost, DropSocket, Event, PeerState, PeerUp
from steno.contracts.wire.peer_ends import WorkerPeer
from steno_worker.config import WorkerSettings, dial_url
from steno_worker.interfaces import MAX_STREAMS, Engine
from steno_worker.metrics import WorkerMetrics
from steno_worker.relay.dialling import Dial, FailedDials
from steno_worker.relay.generations import Generations
from steno_worker.relay.outlet import ChannelOutlet
from steno_worker.weights.update_runner import UpdateRunner

logger = logging.getLogger(__name__)
COALESCE_S = 0.002
"""Packets leave no closer together: 512 streams that produce at different moments then cost 500 writes a second, not 25,000."""
FIRST_BACKOFF_S = 0.1
SETTLE_S = 2.0
"""How long a worker that leaves waits for the proxy to acknowledge what it said last."""


class ProxyConnection:
    """Dials one proxy, and keeps a channel with it.

    Args: boot_id: identifies this process. updates: the engine's weight updates, shared by all connections.
    on_engine_death: called with the reason, once an engine shows that it is dead.
    """

    def __init__(
        self, url: str, settings: WorkerSettings, *, boot_id: str, engine: Engine, updates: UpdateRunner, metrics: WorkerMetrics,
        on_engine_death: Callable[[str], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.url = url
        self.refused: ChannelLost | None = None
        self._settings = settings
        self._boot_id = boot_id
        self._engine = engine
        self._updates = updates
        self._metrics = metrics
        self._on_engine_death = on_engine_death
        self._clock = clock
        self._announced: Announce | None = None
        self._failed_dials = FailedDials(url)
        self._leaving = False
        self._stop = asyncio.Event()
        self._settled = asyncio.Event()
        self._dirty = asyncio.Event()
        self._closing: asyncio.Future[tuple[int, str]] | None = None  # of the present socket
        self._flush: asyncio.Handle | None = None
        self._flushed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._abandoning: set[asyncio.Task[None]] = set()
        self._begin(self._new_peer())

    # -- life

    async def run(self) -> None:
        """Dial, and dial again, until `leave` or until the proxy refuses this worker (`refused` then says why)."""
        backoff_s = FIRST_BACKOFF_S
        attempts = 0
        try:
            while not self._stop.is_set() and self.refused is None:
                attempts += 1
                if await self._dial(again=attempts > 1):
                    backoff_s = FIRST_BACKOFF_S
                if self._stop.is_set() or self.refused is not None:
                    break
                # Full jitter over the upper half: a restarted proxy is not met by its whole fleet at once.
                await self._pause(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(backoff_s * 2, self._settings.max_backoff_s)
        finally:
            self._disarm()
            self._abandon()
            if self._abandoning:
                await asyncio.wait(self._abandoning)

    async def leave(self, code: str, message: str) -> None:
        """Say the last frames, then Goodbye, and let `run` end. Idempotent; bounded by SETTLE_S."""
        self._leaving = True
        self._send_soon()
        if self._peer.state is PeerState.OPEN and not self._peer.channel.settled:
            try:
                async with asyncio.timeout(SETTLE_S):
                    await self._settled.wait()
            except TimeoutError:
                logger.warning("%s did not acknowledge the last frames in time", self.url)
        self._stop.set()
        self._peer.goodbye(code, message, self._clock(), close_code=CLOSE_GOING_AWAY)
        self._tick()

    def announce(self, *, healthy: bool, draining: bool, reason: str) -> None:
        """Tell the proxy what has changed, now and on every new channel."""
        self._announced = Announce(self._updates.cards(), healthy, draining, reason)
        self.send(self._announced)

    def send(self, frame: Frame) -> None:
        """Queue a frame; it leaves with whatever else there is. Raises BodyTooLarge."""
        started = time.thread_time()
        self._peer.send(frame, self._clock())
        if self._flush is None:
            self._send_soon()
        self._metrics.spent(time.thread_time() - started)

    def _dropped(self, delta: Delta) -> None:
        """It was said too late: its channel is over."""
        self._metrics.unacknowledged.inc(len(delta.ids) >> 2)

    # -- one socket

    async def _dial(self, *, again: bool) -> bool:
        """Open a socket and carry packets until it ends. Returns whether the handshake was completed."""
        settings = self._settings
        key = settings.key.get_secret_value() if settings.key else ""
        try:
            websocket = await Dial(
                dial_url(self.url), compression=None, max_size=settings.max_packet_bytes, ping_interval=None,
                open_timeout=HANDSHAKE_S, close_timeout=SETTLE_S, user_agent_header="steno-worker",
                additional_headers={"Authorization": f"Bearer {key}"} if key else None,
            )  # fmt: skip
        except (OSError, TimeoutError, WebSocketException, ValueError, ImportError) as error:
            # ConnectionClosed: reset between accept and handshake, as by a load balancer whose proxy has just gone.
            # ValueError: what stands in the way (an HTTP proxy, a redirect) names an address that is none
            # ImportError: a SOCKS proxy stands in the way, and python-socks is not installed
            self._failed_dials.add(error, self._clock())
            return False
        if self._stop.is_set():  # `leave` was called during the dial: nothing would close this socket later
            await _close(websocket, CLOSE_GOING_AWAY, "", [])
            return False
        if again:
            self._metrics.reconnects.inc()
        return await self._carry(websocket)

    async def _carry(self, websocket: ClientConnection) -> bool:
        if self._peer.state is PeerState.ENDED:
            self._renew()
        self._peer.hello = self._hello()
        self._peer.connected(self._clock())
        self._closing = asyncio.get_running_loop().create_future()
        closing = self._closing
        reader = asyncio.create_task(self._read(websocket))
        writer = asyncio.create_task(self._write(websocket))
        ends: set[asyncio.Future[Any]] = {reader, writer, closing}
        resent = self._peer.channel.resent_packets
        self._dirty.set()
        self._touch()
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            writer.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
            code, reason = closing.result() if closing.done() else (CLOSE_GOING_AWAY, "")
            self._closing = None
            was_up = self._connected
            self._connected = False
            self._metrics.resent.inc(max(0, self._peer.channel.resent_packets - resent))
            self._peer.disconnected(self._clock())
            last = self._peer.data_to_send()
            self._tick()
        for result in results:
            if isinstance(result, ProtocolError):
                logger.error("%s broke the protocol: %s", self.url, result.message)
                code, reason = CLOSE_PROTOCOL_ERROR, result.message
            elif isinstance(result, ConnectionClosed):
                logger.warning("the socket to %s was closed: %s", self.url, result)
            elif isinstance(result, Exception):
                raise result
        await _close(websocket, code, reason, last)
        return was_up

    async def _read(self, websocket: ClientConnection) -> None:
        """Returns never. Raises ConnectionClosed; ProtocolError, with the peer ended."""
        try:
            while True:
                data = await websocket.recv()
                if isinstance(data, str):
                    raise ProtocolError("a text message; packets are binary")
                for event in self._peer.receive(data, self._clock()):
                    if isinstance(event, Generate | Cancel | Credit | Count):
                        self.streams.handle(event)
                    elif isinstance(event, Prepare | Chunk | Apply | Abandon):
                        self._updates.handle(event, self._outlet)
                    elif not isinstance(event, Heartbeat):
                        self._handle(event)
                if not self._outlet.full:
                    self._outlet.acknowledged()
                if self._leaving and self._peer.channel.settled:
                    self._settled.set()
                if self._peer.wants_write and self._flush is None:
                    self._send_soon()
                self._touch()
        except ProtocolError as error:
            self._peer.fail(error.message, self._clock())
            self._handle(ChannelLost("protocol_error", error.message))
            raise

    async def _write(self, websocket: ClientConnection) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            started = time.thread_time()
            packets = self._peer.data_to_send()
            for packet in packets:
                await websocket.send(packet)
            self._metrics.spent(time.thread_time() - started)
            self._metrics.flush(len(packets))

    # -- what happens

    def _handle(self, event: Frame | Event) -> None:
        if isinstance(event, PeerUp):
            logger.info("connected to %s, %s", self.url, "resumed" if event.resumed else "new")
            self._failed_dials.forget()
            self._connected = True
            if not event.resumed and self._announced is not None:
                self.send(self._announced)
        elif isinstance(event, ChannelLost):
            if event.code in REFUSALS:
                self.refused = event
            if not self._leaving:
                logger.warning("the channel with %s is lost: %s (%s)", self.url, event.code, event.reason)
            self._metrics.channels_lost.labels(event.code).inc()
            self._metrics.unacknowledged.inc(self._outlet.unacknowledged_tokens())
            self._updates.forget(self._outlet)
            self._abandon()
            self._begin(self._peer)
        elif isinstance(event, DropSocket) and self._closing is not None and not self._closing.done():
            self._closing.set_result((event.close_code, event.reason))

    def _abandon(self) -> None:
        tasks = self.streams.abandon()
        self._abandoning |= tasks
        for task in tasks:
            task.add_done_callback(self._abandoning.discard)

    def _begin(self, peer: WorkerPeer) -> None:
        """Use the channel of this peer, with a new outlet and no generations: nothing of an earlier channel can be sent on it."""
        self._peer = peer
        self._outlet = ChannelOutlet(peer, send=self.send, dropped=self._dropped)
        self.streams = Generations(self._engine, self._outlet, self._metrics, self._on_trouble, self._updates.gate)

    def _renew(self) -> None:
        """After a channel's end: begin a new one, which is offered on the socket that was just opened."""
        for event in self._peer.handle_timeout(self._clock()):  # its end, if nobody has been told yet
            self._handle(event)
        self._begin(self._new_peer())
        if self._announced is not None:
            self._announced = msgspec.structs.replace(self._announced, models=self._updates.cards())

    def _tick(self) -> None:
        self._disarm()
        try:
            self._peer.load = Heartbeat(*self._engine.load())
        except StenoError as error:
            self._on_engine_death(error.message)
        for event in self._peer.handle_timeout(self._clock()):
            self._handle(event)
        if self._peer.wants_write:
            self._dirty.set()
        self._touch()

    def _touch(self) -> None:
        deadline = self._peer.next_deadline()
        if deadline is not None and deadline < self._timer_at:
            self._disarm()
            self._timer_at = deadline
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self._clock()), self._tick)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, float("inf")

    def _send_soon(self) -> None:
        """Write after the callbacks that are ready in this turn of the loop, but not within COALESCE_S of the last write."""
        loop = asyncio.get_running_loop()
        wait_s = self._flushed_at + COALESCE_S - self._clock()
        self._flush = loop.call_soon(self._flush_now) if wait_s <= 0 else loop.call_later(wait_s, self._flush_now)

    def _flush_now(self) -> None:
        self._flush = None
        self._flushed_at = self._clock()
        self._dirty.set()
        if self._peer.state is PeerState.ENDED:  # by an overflow: only the deadline tells
            self._touch()

    def _on_trouble(self) -> None:
        """A generation failed, perhaps because the engine is dead: `Engine.load` raises if it is."""
        try:
            self._engine.load()
        except StenoError as error:
            self._on_engine_death(error.message)

    def _new_peer(self) -> WorkerPeer:
        settings = self._settings
        return WorkerPeer(self._hello(), grace_s=settings.grace_s, max_packet_bytes=settings.max_packet_bytes)

    def _hello(self) -> Hello:
        settings = self._settings
        return Hello(
            PROTOCOL_VERSION,
            PROTOCOL_VERSION,
            settings.worker_id,
            self._boot_id,
            self._updates.cards(),
            self._max_streams(),
        )

    def _max_streams(self) -> int:
        """Most generations at once: as set, else the engine's own limit (vLLM has one), else MAX_STREAMS."""
        return self._settings.max_streams or getattr(self._engine, "max_streams", None) or MAX_STREAMS

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return

    @property
    def _connected(self) -> bool:
        return self.__connected

    @_connected.setter
    def _connected(self, value: bool) -> None:
        if value != self.__connected:
            self.__connected = value
            self._metrics.connected.inc(1 if value else -1)

    __connected = False


async def _close(websocket: ClientConnection, code: int, reason: str, last: list[bytes]) -> None:
    try:
        async with asyncio.timeout(SETTLE_S):
            for packet in last:
                await websocket.send(packet)
            await websocket.close(code, reason.encode()[:120].decode(errors="ignore"))
    except (ConnectionClosed, TimeoutError, OSError) as error:
        logger.debug("the socket was closed before the last frames were sent: %s", error)
        websocket.transport.abort()
