"""HTTP in plain ASGI: a bounded body in, for all routes; out, for the agents' routes, an answer, a refusal with its head, or a
stream whose silences are filled. Knows no dialect and no turn."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from steno.contracts.chat import Job
from steno.contracts.errors import BadRequest, BodyTimeout, BodyTooLarge, NotFound, StenoError
from steno.contracts.records import RESERVED_TRIAL_IDS, TRIAL_ID
from steno_proxy.api.bodies_in_flight import BodiesInFlight, BodyShare
from steno_proxy.auth.rate_limit import body_digest
from steno_proxy.dialects.nodes import check_arguments, check_nodes, unbounded
from steno_proxy.pace import LARGE_BYTES, Pace
from steno_proxy.turns.interfaces import ClientLeft

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_MODEL_CHARS = 512
"""Of the model's name that a request asks for. Every event of its stream says it again, and so does the record."""
ID_HEADERS = {"messages": (b"x-request-id", b"request-id")}
"""Where a dialect's SDK looks for the request's id, if not in `x-request-id` alone."""
NO_TRIAL_ID = "is not a valid trial id (or is reserved): 1 to 128 letters, digits, '.', '_' and '-' are allowed"
_TRIAL_ID = re.compile(TRIAL_ID.replace("$", r"\Z"))
_JSON = (b"content-type", b"application/json")
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect a stream before it passes it on
]


def valid_trial_id(trial_id: str) -> bool:
    return _TRIAL_ID.match(trial_id) is not None and trial_id not in RESERVED_TRIAL_IDS


def check_trial_id(trial_id: str) -> None:
    """Raises: NotFound: no trial can have this id."""
    if not valid_trial_id(trial_id):
        raise NotFound(f"{trial_id[:128]!r} {NO_TRIAL_ID}")


class BodyReader:
    """The bounds on what agents send, and the one place where it is read. One for a process.

    Args: max_bytes: of one body. timeout_s: for it to come. max_nodes: see `dialects/nodes.py`.
    """

    def __init__(
        self, *, max_bytes: int, timeout_s: float, max_nodes: int, inflight: BodiesInFlight, pace: Pace
    ) -> None:
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self.max_nodes = max_nodes
        self.inflight = inflight
        self.pace = pace

    def incoming(self, receive: Receive) -> IncomingBody:
        """The body of a request. Its time begins here."""
        return IncomingBody(receive, max_bytes=self.max_bytes, timeout_s=self.timeout_s, setting="max_body_bytes")

    async def read(self, scope: Scope, incoming: IncomingBody, share: BodyShare) -> bytes:
        """Raises: as `read_body`; BodyTooLarge: it holds more than it may."""
        body = await read_body(scope, incoming, share=share, pace=self.pace)
        if unbounded(body, self.max_nodes):
            await self.pace.steps(check_nodes(body, self.max_nodes))
        return body

    async def parsed(self, parse: Callable[[bytes], T], body: bytes, job_of: Callable[[T], Job]) -> T:
        """What `parse` makes of a body, in a slice of its own if that is long.

        Raises: what `parse` raises; BodyTooLarge: the JSON inside the calls' arguments is more than may be.
        """
        if len(body) >= LARGE_BYTES:
            await self.pace.turn()
        found = parse(body)
        if unbounded(body, self.max_nodes):
            await self.pace.steps(check_arguments(job_of(found).messages, self.max_nodes))
        return found

    async def digest(self, incoming: IncomingBody) -> bytes:
        return await digest_body(incoming, self.pace)


class IncomingBody:
    """A request's body, in parts as they come. Where one reader stops, another can go on.

    Args: max_bytes: of all parts. timeout_s: for all of them to come. setting: that says `max_bytes`, if one does.
    Attributes: size: bytes that have come. kept: the parts that a reader keeps.
    """

    __slots__ = ("_deadline", "_receive", "_timeout_s", "_whole", "kept", "max_bytes", "setting", "size")

    def __init__(self, receive: Receive, *, max_bytes: int, timeout_s: float, setting: str = "") -> None:
        self.max_bytes = max_bytes
        self.setting = setting
        self.size = 0
        self.kept: list[bytes] = []
        self._receive = receive
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._whole = False

    async def part(self) -> bytes | None:
        """The next one; None: the last one has come. Raises: BodyTooLarge, BodyTimeout, ClientLeft."""
        if self._whole:
            return None
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeout(
                f"the request body did not arrive within {self._timeout_s:g} s (body_timeout_s)"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientLeft("the client left before its request was complete")
        part: bytes = message.get("body", b"")
        self.size += len(part)
        self._whole = not message.get("more_body", False)
        _check_size(self.size, self.max_bytes, self.setting, "at least ")
        return part


async def read_body(
    scope: Scope, incoming: IncomingBody, *, share: BodyShare | None = None, pace: Pace | None = None
) -> bytes:
    """The request's body; never more than its `max_bytes` in memory. share: its share of all that is in flight, counted before it
    is read where its length is declared, and as it comes where not. pace: a long one is put together in a slice of its own.

    Raises: BodyTooLarge, as soon as it is known; BadRequest: it is compressed; TooManyRequests: there is no room for it now;
        BodyTimeout; ClientLeft.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            declared = int(value[:20])
            _check_size(declared, incoming.max_bytes, incoming.setting)
            if share is not None:
                share.grow(declared)
        if name == b"content-encoding" and value.lower() != b"identity":
            coding = value[:40].decode("latin-1")
            raise BadRequest(
                f"content-encoding: got {coding!r}, must be identity: send the body uncompressed",
                field="content-encoding",
            )
    while (part := await incoming.part()) is not None:
        incoming.kept.append(part)
        if share is not None:
            share.grow(incoming.size)
    parts, incoming.kept = incoming.kept, []
    if pace is not None and incoming.size >= LARGE_BYTES:
        await pace.turn()
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def digest_body(incoming: IncomingBody, pace: Pace) -> bytes:
    """`body_digest` of a body that is not kept, also where `read_body` has begun with it. Raises: BodyTooLarge, BodyTimeout,
    ClientLeft."""
    digest = body_digest()
    if incoming.kept:
        await pace.steps(map(digest.update, incoming.kept))
        incoming.kept = []
    while (part := await incoming.part()) is not None:
        digest.update(part)
    return digest.digest()


def _check_size(size: int, max_bytes: int, setting: str, about: str = "") -> None:
    if size > max_bytes:
        allowed = f"{setting} is {max_bytes}" if setting else f"at most {max_bytes} are allowed"
        raise BodyTooLarge(f"the body is {about}{size} bytes; {allowed}")


class HttpClient:
    """`TurnClient` over ASGI. The response starts with the first bytes, or with the first keepalive."""

    __slots__ = (
        "_head",
        "_keepalive",
        "_keepalive_s",
        "_loop",
        "_send",
        "_sent_at",
        "_timer",
        "_writing",
        "breaks",
        "gone",
        "started",
        "status",
    )

    def __init__(
        self, send: Send, request_id: bytes, keepalive_s: float = 1.0, named: Sequence[bytes] = (b"x-request-id",)
    ) -> None:
        """named: headers that carry the request's id."""
        self.gone = False
        self.breaks: Callable[[StenoError], bytes] | None = None  # the events that end an answer which fails midway
        self.started = False
        self.status = 0
        self._send = send
        self._head = [(name, request_id) for name in named]
        self._keepalive = b""
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = 0.0
        self._writing = 0  # events that wait for the client to read

    def keep_alive_with(self, comment: bytes) -> None:
        """The answer is a stream: fill its silences with this."""
        self._keepalive = comment

    def ready(self) -> None:
        if self._keepalive and self._timer is None:
            self._sent_at = self._loop.time()
            self._timer = self._loop.call_later(self._keepalive_s, self._tick)

    async def write(self, data: bytes) -> None:
        if not self.gone:
            self._sent_at = self._loop.time()
            self._writing += 1
            try:
                if not self.started:
                    await self._start()
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            finally:
                self._writing -= 1

    async def end(self, data: bytes) -> None:
        self.close()
        if not self.gone:
            await self._start()
            await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, body: bytes) -> None:
        await self.respond(200, body, [])

    async def respond(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """A whole answer, of any status."""
        self.close()
        if self.gone:
            return
        self.started, self.status = True, status
        length = (b"content-length", b"%d" % len(body))
        all_headers = [_JSON, length, *self._head, *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def close(self) -> None:
        """No more keepalives."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._keepalive = b""

    async def _start(self) -> None:
        if not self.started:
            self.started, self.status = True, 200
            headers = [*_STREAM, *self._head]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def _tick(self) -> None:
        """One timer for a stream, moved on lazily: it costs nothing per token."""
        self._timer = None
        if self.gone or not self._keepalive:
            return
        silent_s = 0.0 if self._writing else self._loop.time() - self._sent_at
        if silent_s >= self._keepalive_s - 0.001:
            task = self._loop.create_task(self.write(self._keepalive))
            task.add_done_callback(_observed)
            silent_s = 0.0
        self._timer = self._loop.call_later(self._keepalive_s - silent_s, self._tick)


def _observed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("can't write a keepalive to the client: %s", type(task.exception()).__name__)


def refusal_headers(error: StenoError) -> list[tuple[bytes, bytes]]:
    """What the head of an error answer says besides its status."""
    headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if error.status in (408, 413):
        headers.append((b"connection", b"close"))  # what is left of the body is not read
    return headers
