"""The proxy's end of the relay: workers' sockets, which workers there are, and the streams open on them.

Decides which workers are admitted, and which socket or boot replaces another. The protocol is `contracts/wire/peer.py`, one
worker `worker_channel.py`, its socket `channel_socket.py`, the choice of a worker `routing.py`, a stream's mailbox `stream.py`.
A worker that breaks the protocol loses its own streams only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import itertools
import logging
import time
import uuid
from collections.abc import Callable
from functools import partial

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from steno.contracts.chat import NO_IMAGES, Job, has_images
from steno.contracts.errors import (
    BadRequest,
    BodyTooLarge,
    EngineFailed,
    NoWorker,
    ProtocolError,
    StenoError,
    TooManyRequests,
    WorkerLost,
)
from steno.contracts.wire.frames import Cancel, Count, Counted, Hello, ModelCard
from steno.contracts.wire.packets import (
    CLOSE_GOING_AWAY,
    CLOSE_PROTOCOL_ERROR,
    CLOSE_REPLACED,
    CLOSE_TIMEOUT,
    CLOSE_UNAUTHORIZED,
    CLOSE_VERSION,
    NAME_TAKEN,
    REPLACED,
    UNAUTHORIZED,
    VERSION,
    farewell,
    read_hello,
)
from steno.contracts.wire.peer import HANDSHAKE_S
from steno.contracts.wire.peer_ends import ProxyPeer
from steno.contracts.worker_view import WorkerView
from steno_proxy.workers.carry import carry
from steno_proxy.workers.channel_socket import CLOSE_WITHIN_S, ChannelSocket, RefusedSocket, leave, receive
from steno_proxy.workers.placement import Order, place, to_tokenize
from steno_proxy.workers.queue import NOT_YET, WaitQueue
from steno_proxy.workers.relay_settings import RelayCounts, RelaySettings
from steno_proxy.workers.routing import BUSY, choose, of_images, offers
from steno_proxy.workers.stream import Stream
from steno_proxy.workers.worker_channel import NullWatcher, Watcher, WorkerChannel, check_prompt_ids
from steno_proxy.workers.worker_socket import opening_of

logger = logging.getLogger(__name__)

MAX_STRANGERS = 32
"""How many sockets that have shown no key yet may be open at a time. Each may hold a Hello of 256 KiB, and as much again while it
is put together: 16 MiB in all. Workers that show their key in the header do not count, so strangers can't keep them out."""
LINGER_S = 15.0
"""How long at most a refused stranger still counts as one: until its socket is closed, for which uvicorn waits 10 s."""
ANSWER_S = 7.5
"""How long a worker may be silent when another boot comes with its worker_id. A worker waits 10 s for its Welcome."""
LOOK_S = 0.05


class Hub:
    """Workers and their streams, of one proxy process.

    Args:
        proxy_id: names this replica to workers.
        clock: monotonic seconds.

    Attributes: is_worker: whether a key opens the workers' socket; by default, as `worker_key` in the settings. is_model: whether
        some worker has served a model of this name, here or at another replica: then the name means that model only.
        has_default: whether some such model is of the default policy: then a name that no model has means that policy only.
    """

    def __init__(self, settings: RelaySettings, *, proxy_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.proxy_id = proxy_id
        self.counts = RelayCounts()
        self.watcher: Watcher = NullWatcher()
        self.is_worker: Callable[[str], bool] = self._is_worker
        self.is_model: Callable[[str], bool] = lambda name: False
        self.has_default: Callable[[], bool] = lambda: False
        self._clock = clock
        self.waiting: WaitQueue[Stream] = WaitQueue(
            settings.max_waiting, lambda stream: stream.discard("its client no longer waits")
        )
        self._workers: dict[str, WorkerChannel] = {}
        self._closed = False
        self._channels = itertools.count(1)
        self._strangers = 0  # sockets that have shown no key, and those refused that are not closed yet

    # -- for those who want something generated

    def open(self, order: Order) -> Stream:
        """Send one Generate to the worker that routing chooses. Nothing is awaited.

        Raises: as `placement.place`; BodyTooLarge when the job fits in no packet; TooManyRequests while too much waits to be
            acknowledged by every worker that can serve this.
        """
        among, refusal, known, has_default = order, None, self.is_model(order.model), self.has_default()
        while True:
            try:
                worker, card = place(among, self._workers.values(), is_model=known, has_default=has_default)
            except NoWorker:
                if refusal is not None:
                    raise refusal from None
                raise
            try:
                return worker.open(order.generate(card, self.settings.window_tokens), card, order.refused_bytes)
            except (TooManyRequests, BodyTooLarge) as error:  # of this channel; another may have room, or take more
                order.refused_bytes = order.refused_bytes or order.size_bytes()
                refusal = error if refusal is None or isinstance(error, TooManyRequests) else refusal
                among = dataclasses.replace(among, avoid=among.avoid | {worker.channel})

    def check_size(self, order: Order, n: int) -> None:
        """Check the size of a request's `n` completions together: each is sent by itself, with the whole prompt.

        Raises: BodyTooLarge: together they are more than a single request may be.
        """
        size, most = order.size_bytes(), self.settings.max_packet_bytes
        if n * size > most:
            raise BodyTooLarge(
                f"n: {n} completions send the request {n} times, {n * size} bytes in all; at most {most} are allowed",
                field="n",
            )

    async def place(self, order: Order, *, urgent: bool = False) -> Stream:
        """As `open`, but if every worker that can serve this is busy or away, wait for one, behind orders that wait already.

        Args: urgent: wait before all others; for turns that have begun. Cancel-safe.
        Raises: as `open`, NoWorker and TooManyRequests after `queue_s`.
        """
        refusal: StenoError = TooManyRequests(BUSY)
        if tried := urgent or not self.waits(order):
            try:
                return self.open(order)
            except NOT_YET as error:
                refusal = error
        return await self.waiting.wait(
            order.trial_id, self._route(order), partial(self.open, order), refusal,
            timeout_s=self.settings.queue_s, urgent=urgent, tried=tried,
        )  # fmt: skip

    def waits(self, order: Order) -> bool:
        """Whether this order must queue behind others that wait for the same workers."""
        return bool(self.waiting) and not order.full_too and self.waiting.ahead(self._route(order))

    def _route(self, order: Order) -> tuple[bytes | None, str | None, bool, frozenset[str]]:
        """What an order needs of a worker. Orders with equal routes can go to the same workers, except those that each avoids."""
        named = self.is_model(order.model) or any(
            card.name == order.model for worker in self._workers.values() for card in worker.models
        )
        return order.prefix.tokenizer, order.model if named else None, has_images(order.job.messages), order.needs

    async def count(self, trial_id: str, job: Job, model: str) -> int:
        """Return how many tokens the job's whole prompt has, as a worker of the model that this name means renders it. Nothing is
        generated and nothing recorded. Cancel-safe.

        Raises: NoWorker (none, or none that can count), TooManyRequests, BadRequest, WorkerLost, BodyTooLarge.
        """
        meant = offers(self._workers.values(), model, has_default=self.has_default())
        if self.is_model(model):
            meant = [offer for offer in meant if offer[1].name == model]
            if not meant:
                raise NoWorker(f"no worker serves the model {model!r} now")
        able = [offer for offer in meant if offer[0].eligible and "count" in offer[0].peer.capabilities]
        if able and has_images(job.messages):
            able = of_images(able)
            if not able:
                raise BadRequest(f"messages: {NO_IMAGES}", field="messages")
        if not able:
            raise NoWorker("no worker can count tokens now")
        return (await choose(trial_id, list(dict(able)), full_too=True).count(Count(0, job))).prompt_tokens

    async def tokenize(self, trial_id: str, asked: Count, model: str) -> tuple[Counted, ModelCard]:
        """Return what `asked.wants` says, from the tokenizer of the model that this name means, and its card. Cancel-safe.

        Raises: NoWorker, TooManyRequests, WorkerLost, BodyTooLarge. BadRequest: no worker of the model can tokenize; the template
            refuses the messages; the ids are not in the model's vocabulary, or are more than its context holds.
        """
        worker, card = to_tokenize(
            trial_id, asked.job, self._workers.values(), model,
            is_model=self.is_model(model), has_default=self.has_default(),
        )  # fmt: skip
        if asked.job.prompt_ids is not None:
            check_prompt_ids(asked.job, card, "tokens")
            if (given := len(asked.job.prompt_ids) // 4) > card.context_tokens:
                raise BadRequest(f"tokens: {given}, and the model's context is {card.context_tokens}", field="tokens")
        counted = await worker.count(asked)
        strings = len(counted.strings) if asked.wants == "strings" else counted.prompt_tokens
        if asked.wants != "text" and not len(counted.ids) // 4 == counted.prompt_tokens == strings:
            raise EngineFailed("the worker's answer does not have what was asked for")
        return counted, card

    def cards(self) -> list[ModelCard]:
        """What can be asked for now: one card per model name, over workers that take new turns."""
        cards: dict[str, ModelCard] = {}
        for worker in self._workers.values():
            if worker.eligible:
                for card in filter(worker.serves, worker.models):
                    cards.setdefault(card.name, card)
        return list(cards.values())

    def channels(self) -> list[WorkerChannel]:
        """Every worker with a channel."""
        return list(self._workers.values())

    def workers(self) -> list[WorkerView]:
        """Every worker with a channel, by id."""
        return [worker.view() for _, worker in sorted(self._workers.items())]

    def revoke(self) -> None:
        """The keys have changed: workers whose key is no longer valid are told so and lose their channels, also workers that
        are away. Their turns go on at other workers at once (I9). No other worker is affected."""
        for worker in [worker for worker in self._workers.values() if not self.is_worker(worker.key)]:
            logger.warning("worker %s: its key was revoked, its channel is closed", worker.id)
            worker.peer.goodbye(UNAUTHORIZED, "the workers' key has been revoked", self._clock())
            if worker.link is not None:
                worker.link.close(CLOSE_UNAUTHORIZED, UNAUTHORIZED, worker.peer.data_to_send())
                worker.link = None
            worker.lose(WorkerLost("the worker's key was revoked"))

    async def close(self) -> None:
        """End every channel: this boot of the proxy does not come back, so workers stop at once what they ran for it. Returns
        when they have been told. Idempotent."""
        self._closed = True
        leaving = [asyncio.ensure_future(worker.link.left.wait()) for worker in self._workers.values() if worker.link]
        for worker in list(self._workers.values()):
            worker.peer.goodbye("shutdown", "the proxy stops", self._clock())
            worker.tick()
        if leaving:
            _, late = await asyncio.wait(leaving, timeout=2 * CLOSE_WITHIN_S)
            for wait in late:
                wait.cancel()

    # -- for the endpoint

    async def serve(self, websocket: WebSocket) -> None:
        """One worker's socket, from accept to close."""
        header = websocket.headers.get("authorization", "")
        shown = header.removeprefix("Bearer ").strip() if header.startswith("Bearer ") else None
        stranger = not self.is_worker(shown or "")
        if stranger and self._strangers >= MAX_STRANGERS:
            self.counts.channels["refused"] += 1
            message = (
                f"{MAX_STRANGERS} sockets wait to authenticate, the maximum; send the key in the Authorization header "
                "to get in at once"
            )
            logger.warning("a worker was refused: %s", message)
            await websocket.send_denial_response(Response(message, 503, {"retry-after": "1"}, "text/plain"))
            return
        opening = opening_of(websocket.scope)
        self._strangers += stranger
        try:
            await websocket.accept()
            hello, key = await self._greeting(websocket, shown)
        except RefusedSocket as refused:
            await self._refuse(websocket, refused)
            if stranger and opening is not None:  # what it has sent is kept until then
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        await opening.gone.wait()
            return
        except WebSocketDisconnect:
            return
        finally:
            self._strangers -= stranger
        if opening is not None:
            opening.known()
        try:
            await self._make_way(hello)
            self._check(key)  # once more: it may have been revoked meanwhile
            link = ChannelSocket(websocket)
            worker = self._admit(hello, link)
        except RefusedSocket as refused:
            await self._refuse(websocket, refused)
            return
        worker.key = key
        try:
            await carry(worker, link, self.counts, self._clock)
        finally:
            link.left.set()

    async def _refuse(self, websocket: WebSocket, refused: RefusedSocket) -> None:
        self.counts.channels["refused"] += 1
        logger.warning("a worker was refused: %s", refused.message)
        await leave(websocket, refused.close_code, refused.code, [farewell(refused.code, refused.message)])

    async def _greeting(self, websocket: WebSocket, shown: str | None) -> tuple[Hello, str]:
        """Read the Hello and check the key; return both. Args: shown: the key in the header, if there is one."""
        if shown is not None:
            self._check(shown)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                data = await receive(websocket)
            hello = read_hello(data)
        except TimeoutError:
            raise RefusedSocket(CLOSE_TIMEOUT, "timeout", "no Hello in time") from None
        except ProtocolError as error:
            self.counts.channels["protocol_error"] += 1
            raise RefusedSocket(CLOSE_PROTOCOL_ERROR, "protocol_error", error.message) from None
        if shown is None:
            self._check(hello.key)
        return hello, hello.key if shown is None else shown

    async def _make_way(self, hello: Hello) -> None:
        """Return once this boot may have its worker_id. Raises: RefusedSocket: another worker that still answers has it.

        A boot that reconnects is known by its boot id, which only it and this proxy know. A new boot proves nothing: it may be a
        restart on a machine whose last socket was never closed, or another worker with the same id. So the worker that has the id
        is sent a Cancel of a stream that never was: this does nothing, but must be acknowledged within 0.2 s. If anything comes
        from that worker within ANSWER_S, it keeps the id.
        """
        while (old := self._workers.get(hello.worker_id)) is not None and old.link is not None:
            if old.peer.remote_boot == hello.boot_id:
                return
            link, asked_at = old.link, self._clock()
            old.send(Cancel(0, "is this worker there?"))
            while old.link is link and self._clock() < asked_at + ANSWER_S:
                if old.peer.heard_at > asked_at:
                    message = f"another worker is connected with worker_id {hello.worker_id}; try again later, or use another id"
                    raise RefusedSocket(CLOSE_REPLACED, NAME_TAKEN, message)
                await asyncio.sleep(LOOK_S)
            if old.link is link:
                return

    def _is_worker(self, key: str) -> bool:
        good = self.settings.worker_key
        return not good or hmac.compare_digest(key.encode(), good.encode())

    def _check(self, key: str) -> None:
        if not self.is_worker(key):
            raise RefusedSocket(CLOSE_UNAUTHORIZED, UNAUTHORIZED, "wrong key: must be the workers' key")

    def _admit(self, hello: Hello, link: ChannelSocket) -> WorkerChannel:
        """Put the socket on the channel that this Hello resumes, or on a new one; return it. Raises: RefusedSocket."""
        if self._closed:
            raise RefusedSocket(CLOSE_GOING_AWAY, "shutdown", "the proxy stops")
        now = self._clock()
        old = self._workers.get(hello.worker_id)
        if old is not None and old.link is not None:
            # Two sockets of one boot: the old one is half-open, and the new one replaces it. Of two boots, the older one has not
            # answered. If it lives after all, it must not come back, or the two would replace each other for ever.
            if old.peer.remote_boot == hello.boot_id:
                old.peer.disconnected(now)
            else:
                old.peer.goodbye(REPLACED, "another worker came with the same worker_id", now)
            old.link.close(CLOSE_REPLACED, REPLACED, old.peer.data_to_send())
            old.link = None
        if old is not None and old.peer.goes_on(hello):
            worker = old
        else:
            if old is not None:
                old.lose(WorkerLost("the worker started again"))
            worker = self._new_worker(hello)
        try:
            up = worker.peer.accept(hello, now)
        except ProtocolError as error:
            self.counts.channels["protocol_error"] += 1
            worker.lose(WorkerLost("the worker broke the protocol"))
            close_code = CLOSE_VERSION if error.field == VERSION else CLOSE_PROTOCOL_ERROR
            raise RefusedSocket(close_code, error.field or "protocol_error", error.message) from None
        worker.link = link
        worker.address = link.websocket.client.host if link.websocket.client is not None else ""
        worker.models, worker.max_streams = hello.models, hello.max_streams
        self.counts.channels["resumed" if up.resumed else "new"] += 1
        logger.info("worker %s is connected, %s", worker.id, "resumed" if up.resumed else "new")
        self.watcher.admitted(worker)
        self.waiting.wake()
        worker.tick()
        return worker

    def _new_worker(self, hello: Hello) -> WorkerChannel:
        settings = self.settings
        peer = ProxyPeer(
            uuid.uuid4().hex, self.proxy_id, heartbeat_s=settings.heartbeat_s, silence_s=settings.silence_s,
            grace_s=settings.resume_grace_s, max_packet_bytes=settings.max_packet_bytes,
        )  # fmt: skip
        worker = WorkerChannel(hello, peer, self._clock, self.counts, next(self._channels))
        worker.on_lost = self._drop
        worker.on_change = self.waiting.wake
        worker.watcher = self.watcher
        self._workers[hello.worker_id] = worker
        return worker

    def _drop(self, worker: WorkerChannel) -> None:
        if self._workers.get(worker.id) is worker:
            del self._workers[worker.id]
            self.watcher.lost(worker)
        self.waiting.wake()
