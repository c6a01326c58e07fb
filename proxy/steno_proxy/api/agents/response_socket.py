"""`/{trial_id}/v1/responses` as a WebSocket: `response.create` messages in, the events of their responses out, one response at a
time, in the order in which they were asked for.

Each message is a request of its own to the endpoint that answers `POST` (`generation.py`): key, limits, turn and record are the
same, and its events are those of a stream, a message each. A refusal is an event `error`. A socket has one
thing more: a request can continue a response that is not stored, on the same socket, until another response has come or
continuing it has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steno.contracts.chat import CanonicalRequest
from steno.contracts.errors import BadRequest, StenoError, TooManyRequests
from steno_proxy import logs
from steno_proxy.api.agent_http import MAX_MODEL_CHARS, BodyReader, check_trial_id, refusal_headers
from steno_proxy.api.agents import generation
from steno_proxy.api.agents.generation import GenerationEndpoint
from steno_proxy.api.bodies_in_flight import BodiesInFlight, BodyShare
from steno_proxy.auth.keys import Keyring, key_of
from steno_proxy.dialects.base import decode
from steno_proxy.dialects.openai.common import error_body, to_json
from steno_proxy.dialects.responses.dialect import ResponsesDialect, empty_response
from steno_proxy.turns.interfaces import ProxyStopping
from steno_proxy.turns.service import TurnService
from steno_proxy.workers.worker_socket import MAX_OPENING_FRAMES, opening_of

log = logging.getLogger(__name__)

MOST_SOCKETS = 64
"""Of one trial at a time, in this process."""
MOST_WAITING = 16
"""Messages that wait for the response before them."""
IDLE_S = 3600.0
"""How long a socket may stay open without a message. Seconds; OpenAI's are closed after an hour."""
FRAME_BYTES = 4096
"""A message in several frames may have one frame for each so many bytes, besides MAX_OPENING_FRAMES."""
_KEYS = frozenset({b"authorization", b"x-api-key", b"x-goog-api-key"})
_LOCAL = "steno.local"
_ENDED = re.compile(rb'\{"type":"response\.(completed|incomplete|failed)",[^{]*\{"id":"resp_([0-9a-f]{12})"')
_AWAY, _REFUSED, _FAILED, _RESTARTS, _TRY_AGAIN = 1001, 1008, 1011, 1012, 1013
_STOPS = "the proxy is about to stop"


class _Event(msgspec.Struct):
    type: str = ""
    generate: bool | None = None
    model: str | None = None


_decoder = msgspec.json.Decoder(_Event)


class UnstoredAnswer:
    """The last answer of a socket, if it is not stored. turn_id: "" for none. carried: `CanonicalRequest.carried` of its request.
    asked: the request that is being answered."""

    def __init__(self) -> None:
        self.turn_id = ""
        self.carried: dict[str, Any] = {}
        self.asked: CanonicalRequest | None = None

    def begins(self, asked: CanonicalRequest) -> None:
        if asked.after and asked.after == self.turn_id:
            asked.local = self.carried
        self.asked = asked

    def ends(self, turn_id: str) -> None:
        """turn_id: "" if it failed."""
        asked, self.asked = self.asked, None
        if not turn_id:
            if asked is not None and asked.local is not None:
                self.turn_id = ""
        elif asked is not None:
            self.turn_id, self.carried = ("", {}) if asked.kept else (turn_id, asked.carried)


class CreateResponse(GenerationEndpoint):
    """The endpoint of `POST`, for what comes on a socket."""

    async def _read_request(
        self, trial_id: str, scope: Scope, receive: Receive, share: BodyShare
    ) -> tuple[CanonicalRequest, int]:
        asked, _ = await super()._read_request(trial_id, scope, receive, share)
        asked.stream = True
        scope[_LOCAL].begins(asked)
        return asked, 0


class ResponseSockets:
    """The ASGI endpoint. Args: max_bytes: of one message. stopping: set when the proxy is told to stop."""

    def __init__(
        self, create: CreateResponse, keys: Keyring, inflight: BodiesInFlight, max_bytes: int, stopping: asyncio.Event
    ) -> None:
        self._create = create
        self._keys = keys
        self._inflight = inflight
        self._max_bytes = max_bytes
        self._stopping = stopping
        self._open: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trial_id = scope["path_params"]["trial_id"]
        logs.bind(trial_id, os.urandom(8).hex())
        try:
            check_trial_id(trial_id)
            await self._keys.check_current(key_of(scope["headers"]), trial_id)
            if self._open.get(trial_id, 0) >= MOST_SOCKETS:
                raise TooManyRequests(f"this trial has {MOST_SOCKETS} sockets open, the maximum")
            if self._stopping.is_set():
                raise ProxyStopping(_STOPS)
        except StenoError as error:
            log.info("socket refused: %d %s: %s", error.status, error.code, error.message)
            await _deny(error, send)
            return
        self._open[trial_id] = self._open.get(trial_id, 0) + 1
        opening = opening_of(scope)
        socket = _Socket(scope, receive, send, self._create, self._inflight.hold(trial_id), self._stopping)
        try:
            await receive()
            if opening is not None:
                opening.metered(socket.announced, self._max_bytes)
            with contextlib.suppress(OSError):  # it is gone
                await send({"type": "websocket.accept"})
                await socket.run()
        finally:
            socket.share.close()
            if opening is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(generation.LAST_WORDS_S):
                        await opening.gone.wait()
                opening.drop()
            self._open[trial_id] -= 1
            if not self._open[trial_id]:
                del self._open[trial_id]


class _Socket:
    """One socket. share: the bytes of messages that have come, or are coming, and are not being answered yet."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, create: CreateResponse, share: BodyShare,
        stopping: asyncio.Event,
    ) -> None:  # fmt: skip
        self.share = share
        self._stopping = stopping
        self._receive = receive
        self._send = send
        self._create = create
        self._local = UnstoredAnswer()
        self._gone = asyncio.Event()
        self._waiting: asyncio.Queue[bytes | StenoError | None] = asyncio.Queue()
        self._bytes = self._messages = 0  # not asked yet; of all that came
        self._scope: dict[str, Any] = {
            "type": "http", "method": "POST", "path": scope["path"], "query_string": b"", "state": {},
            "path_params": scope["path_params"], "headers": [pair for pair in scope["headers"] if pair[0] in _KEYS],
            _LOCAL: self._local,
        }  # fmt: skip

    def announced(self, size: int, all_bytes: int, all_frames: int) -> bool:
        """Whether there is room for `size` more bytes, of `all_bytes` in `all_frames` since the socket was opened."""
        most_frames = MAX_OPENING_FRAMES * (self._messages + 2) + all_bytes // FRAME_BYTES
        try:
            if all_frames > most_frames:
                raise TooManyRequests(f"the message has more than {most_frames} frames")
            self.share.grow(self._bytes + size)
        except StenoError as error:
            self._waiting.put_nowait(error)
            return False
        self._bytes += size
        return True

    async def run(self) -> None:
        tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._stop())]
        try:
            await self._serve()
        finally:
            for task in tasks:
                task.cancel()

    async def _stop(self) -> None:
        """Wake a socket that waits for a message once the proxy is about to stop: the next one is for another replica."""
        await self._stopping.wait()
        self._waiting.put_nowait(None)

    async def _read(self) -> None:
        """Read messages as they come, also while a response is sent: only so it is noticed that the client has left."""
        while (message := await self._receive())["type"] == "websocket.receive":
            data = message.get("bytes")
            self._messages += 1
            if self._waiting.qsize() >= MOST_WAITING:
                self._waiting.put_nowait(TooManyRequests(f"more than {MOST_WAITING} messages wait on this socket"))
                return
            self._waiting.put_nowait(message["text"].encode() if data is None else data)
        self._gone.set()
        self._waiting.put_nowait(None)

    async def _serve(self) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    message = await self._waiting.get()
            except TimeoutError:
                await self._close(_AWAY, f"no message came for {IDLE_S:.0f} s")
                return
            if self._stopping.is_set() and not isinstance(message, StenoError):
                await self._close(_RESTARTS, _STOPS)
                return
            if message is None or self._gone.is_set():
                return
            if isinstance(message, StenoError):
                await self._error(message.status, error_body(message), refusal_headers(message))
                await self._close(_TRY_AGAIN if message.retryable else _REFUSED, message.message)
                return
            try:
                event = _check(message)
            except StenoError as error:
                self._taken(message)
                await self._error(error.status, error_body(error), [])
                continue
            if event.generate is False:
                self._taken(message)
                await self._warmed(event.model or "")
            elif not await self._answer(message):
                await self._close(_FAILED, "the response ended before it was complete")
                return

    def _taken(self, message: bytes) -> None:
        self._bytes = max(self._bytes - len(message), 0)
        self.share.close()
        self.share.grow(self._bytes)

    async def _answer(self, message: bytes) -> bool:
        """Answer one message. Returns whether the response was sent to its end, or the client has left."""
        given, status, ended, turn_id = False, 0, False, ""
        headers: list[tuple[bytes, bytes]] = []

        async def receive() -> Message:
            nonlocal given
            if given:
                await self._gone.wait()
                return {"type": "http.disconnect"}
            given = True
            self._taken(message)
            return {"type": "http.request", "body": message, "more_body": False}

        async def send(part: Message) -> None:
            nonlocal status, ended, turn_id
            if part["type"] == "http.response.start":
                status = part["status"]
                headers.extend(part["headers"])
                return
            ended = not part.get("more_body", False)
            if status != 200:
                await self._error(status, part["body"], headers)
                return
            for event in part["body"].split(b"\n\n"):
                _, named, data = event.partition(b"\ndata: ")
                if not named:
                    continue  # a comment, which keeps a connection alive
                if ended and (found := _ENDED.match(data)) is not None and found[1] != b"failed":
                    turn_id = found[2].decode()
                await self._tell(data)

        await self._create(dict(self._scope), receive, send)
        if not given:  # it was refused unread
            self._taken(message)
        self._local.ends(turn_id)
        return ended or self._gone.is_set()

    async def _warmed(self, model: str) -> None:
        """The answer to `generate: false`, by which clients open a socket early: nothing is sampled, nothing recorded."""
        try:
            async with asyncio.timeout(generation.LAST_WORDS_S):
                for event in empty_response(model[:MAX_MODEL_CHARS], int(time.time())).split(b"\n\n")[:-1]:
                    await self._tell(event.partition(b"\ndata: ")[2])
        except TimeoutError:
            self._gone.set()  # it does not read

    async def _error(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """An event for a refusal, as OpenAI's SDK (flat) and Open Responses (`error`, `status`) have it."""
        error = msgspec.json.decode(body)["error"]
        wait = {name.decode(): value.decode() for name, value in headers if name == b"retry-after"}
        event = {
            "type": "error",
            "status": status,
            "sequence_number": 0,
            "error": error | ({"headers": wait} if wait else {}),
        }
        try:
            async with asyncio.timeout(generation.LAST_WORDS_S):
                await self._tell(to_json(event | {name: error[name] for name in ("code", "message", "param")}))
        except TimeoutError:
            self._gone.set()  # it does not read

    async def _tell(self, data: bytes) -> None:
        if self._gone.is_set():
            return
        try:
            await self._send({"type": "websocket.send", "text": data.decode()})
        except (OSError, RuntimeError):  # it is closed, from one end or the other
            self._gone.set()

    async def _close(self, code: int, reason: str) -> None:
        if not self._gone.is_set():
            with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                async with asyncio.timeout(generation.LAST_WORDS_S):
                    await self._send(
                        {
                            "type": "websocket.close",
                            "code": code,
                            "reason": reason.encode()[:120].decode(errors="ignore"),
                        }
                    )


def _check(message: bytes) -> _Event:
    """What of a message counts here. Raises: BadRequest: it is not what can be asked here."""
    event = decode(_decoder, message)
    if event.type != "response.create":
        shown = repr(event.type[:40]) if event.type else "nothing"
        raise BadRequest(f"type: got {shown}, must be response.create", field="type")
    return event


def by_path(
    turns: TurnService, keys: Keyring, stopping: asyncio.Event, *, bodies: BodyReader, **bounds: Any
) -> dict[str, ASGIApp]:
    """For `front.Application`. bounds: as of the generation routes."""
    create = CreateResponse(ResponsesDialect(), turns, keys, bodies=bodies, **bounds)
    sockets = ResponseSockets(create, keys, bodies.inflight, bodies.max_bytes, stopping)
    return dict.fromkeys(ResponsesDialect.paths, sockets)


async def _deny(error: StenoError, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), *refusal_headers(error)]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": error_body(error)})
