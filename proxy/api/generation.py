"""The agents' routes: `/{trial_id}/v1/…`, one per path of each dialect, and `models`. The hot path.

Plain ASGI inside the FastAPI application: nothing but what a turn needs happens here. Reads a bounded body, checks the
agent's key (I8), runs the turn, and writes what it says. Errors before the first byte are the dialect's own, with
`retry-after` where trying again helps; after it the response ends as the dialect says, or without its last chunk, so that the
client sees a broken connection.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy import logs, metrics
from proxy.answering import Answering, ClientLeft
from proxy.contracts.canonical import IMAGES, NO_IMAGES, CanonicalRequest
from proxy.contracts.errors import BadRequest, BodyTooLarge, NotFound, StenoError
from proxy.contracts.records import RESERVED_TRIAL_IDS, TRIAL_ID
from proxy.dialects.base import Dialect
from proxy.dialects.chat import Chat
from proxy.dialects.completions import Completions
from proxy.dialects.messages import Messages
from proxy.dialects.openai import error_body
from proxy.dialects.openai_schema import MODELS
from proxy.dialects.responses import Responses
from proxy.hub import Hub
from proxy.keys import Keyring, key_of
from proxy.retries import is_retry
from proxy.turn import Turns

log = logging.getLogger(__name__)

DIALECTS: tuple[Dialect, ...] = (Chat(), Completions(), Messages(), Responses())
ID_HEADERS = {"messages": (b"x-request-id", b"request-id")}
"""Where a dialect's SDK looks for the request's id, if not in `x-request-id` alone."""
WATCH_AFTER_S = 0.05
"""How long a request runs before anybody looks whether its client is still there. Seconds."""
_TRIAL_ID = re.compile(TRIAL_ID.replace("$", r"\Z"))
_JSON = (b"content-type", b"application/json")
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect a stream before it passes it on
]


class BodyTimeout(StenoError):
    """The client took too long to send its body."""

    status = 408
    code = "body_timeout"


def valid_trial_id(trial_id: str) -> bool:
    return _TRIAL_ID.match(trial_id) is not None and trial_id not in RESERVED_TRIAL_IDS


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """The request's body; never more than `max_bytes` in memory.

    Raises: BodyTooLarge, as soon as it is known; BadRequest: it is compressed; BodyTimeout; ClientLeft.
    """
    too_large = f"the body is larger than {max_bytes} bytes"
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > max_bytes:
            raise BodyTooLarge(too_large)
        if name == b"content-encoding" and value.lower() != b"identity":
            coding = value[:40].decode("latin-1")
            raise BadRequest(
                f"content-encoding {coding!r} can't be read: send the body as it is", field="content-encoding"
            )
    message = await _receive(receive, timeout_s)
    if not message.get("more_body", False) and message["type"] == "http.request":
        body: bytes = message.get("body", b"")
        if len(body) > max_bytes:
            raise BodyTooLarge(too_large)
        return body
    deadline = time.monotonic() + timeout_s
    parts, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientLeft("the client left before its request was complete")
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise BodyTooLarge(too_large)
        if not message.get("more_body", False):
            return b"".join(parts)
        message = await _receive(receive, max(deadline - time.monotonic(), 0.001))


async def _receive(receive: Receive, timeout_s: float) -> Message:
    try:
        async with asyncio.timeout(timeout_s):
            return await receive()
    except TimeoutError:
        raise BodyTimeout(f"the body did not come within {timeout_s:g} s") from None


class HttpClient:
    """`turn.Client` over ASGI. The response starts with the first bytes, or with the first keepalive."""

    __slots__ = (
        "_head",
        "_keepalive",
        "_keepalive_s",
        "_loop",
        "_send",
        "_sent_at",
        "_timer",
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
            await self._start()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

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
        silent_s = self._loop.time() - self._sent_at
        if silent_s >= self._keepalive_s - 0.001:
            task = self._loop.create_task(self.write(self._keepalive))
            task.add_done_callback(_observed)
            silent_s = 0.0
        self._timer = self._loop.call_later(self._keepalive_s - silent_s, self._tick)


def _observed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("a keepalive could not be written: %s", type(task.exception()).__name__)


class Generation:
    """The ASGI endpoint of one dialect."""

    def __init__(
        self,
        dialect: Dialect,
        turns: Turns,
        keys: Keyring,
        *,
        keepalive_s: float,
        max_body_bytes: int,
        body_timeout_s: float,
    ) -> None:
        self._dialect = dialect
        self._turns = turns
        self._keys = keys
        self._keepalive_s = keepalive_s
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._named = ID_HEADERS.get(dialect.name, (b"x-request-id",))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trial_id = scope["path_params"]["trial_id"]
        request_id = os.urandom(8).hex()
        logs.bind(trial_id, request_id)
        client = HttpClient(send, request_id.encode(), self._keepalive_s, self._named)
        try:
            await self._serve(trial_id, scope, receive, client)
        except StenoError as error:
            await self._refuse(client, error, request_id)
        except Exception:
            log.exception("a request failed in a way that was not foreseen")
            await self._refuse(client, StenoError(f"internal error; the log has request {request_id}"), request_id)
        finally:
            client.close()
            client.breaks = (
                None  # else client and request keep each other, and a whole conversation, for the collector to find
            )
            status = 499 if client.gone else client.status
            metrics.REQUESTS.labels(self._dialect.name, str(status)).inc()

    async def _serve(self, trial_id: str, scope: Scope, receive: Receive, client: HttpClient) -> None:
        if not valid_trial_id(trial_id):
            raise NotFound("no such trial")
        self._keys.check_agent(key_of(scope["headers"]), trial_id)
        body = await read_body(scope, receive, max_bytes=self._max_body_bytes, timeout_s=self._body_timeout_s)
        asked = self._dialect.parse(body)
        _check_images(asked, self._turns.hub)
        asked.model = scope["path_params"].get("model", asked.model)  # where a format has it in the path
        if asked.dropped:
            metrics.dropped(self._dialect.name, asked.dropped)
            log.info("left out of a request, of unknown types: %s", sorted({name[:40] for name in asked.dropped})[:20])
        again = is_retry(scope["headers"])
        watch = _Watch(receive, client)
        try:
            request = watch.request = await self._turns.open(trial_id, self._dialect, asked, client, again=again)
            client.breaks = request.broken
            if asked.stream:
                client.keep_alive_with(self._dialect.keepalive)
            await request.run()
        except asyncio.CancelledError:
            if watch.request is not None or not client.gone or not watch.left_in_time():
                raise
            raise ClientLeft("the client closed the connection while it waited") from None
        finally:
            watch.stop()

    async def _refuse(self, client: HttpClient, error: StenoError, request_id: str) -> None:
        """Tell the client, in whichever way is still open."""
        if not isinstance(error, ClientLeft | BadRequest):
            log.info("request refused: %d %s: %s", error.status, error.code, error.message)
        if client.started:
            # No end without its last chunk: an answer that is not whole must not look like one (I3).
            data = client.breaks(error) if client.breaks else self._dialect.broken(error)
            if data:
                await client.end(data)
            return
        await client.respond(error.status, self._dialect.error(error, request_id), refusal_headers(error))


def refusal_headers(error: StenoError) -> list[tuple[bytes, bytes]]:
    """What the head of an error answer says besides its status."""
    headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if error.status in (408, 413):
        headers.append((b"connection", b"close"))  # what is left of the body is not read
    return headers


def _check_images(asked: CanonicalRequest, hub: Hub) -> None:
    """Raises: BadRequest naming the first image, where models are served and none takes any: before anything waits for one."""
    if asked.images and (cards := hub.cards()) and not any(IMAGES in card.capabilities for card in cards):
        raise BadRequest(f"{asked.images[0]}: {NO_IMAGES}", field=asked.images[0])


class _Watch:
    """Aborts a request whose client goes away, or what waits to become one. It looks only after WATCH_AFTER_S: the task that
    waits for a disconnect is a tenth of the cost of a turn that is over by then.

    request: None until it is open; the task that made this is cancelled then, if the client leaves.
    """

    __slots__ = ("_client", "_opening", "_receive", "_task", "_timer", "request")

    def __init__(self, receive: Receive, client: HttpClient) -> None:
        self._receive = receive
        self._client = client
        self.request: Answering | None = None
        self._opening: asyncio.Task[object] | None = asyncio.current_task()
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)

    def stop(self) -> None:
        self._timer.cancel()
        self._opening = None
        if self._task is not None:
            self._task.cancel()

    def left_in_time(self) -> bool:
        """Whether the cancellation was this one's, which is over now."""
        return self._opening is not None and self._opening.uncancel() == 0

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self.request is None:
            self._client.gone = True
            if self._opening is not None:
                self._opening.cancel()
        elif not self.request.done.is_set():  # uvicorn says the same of a response that is complete
            self._client.gone = True
            self.request.abort(ClientLeft("the client closed the connection"))


class Models:
    """`GET /{trial_id}/v1/models` (and one model by name): what the workers serve, in a shape that OpenAI's clients
    read, and Anthropic's too."""

    def __init__(self, hub: Hub, keys: Keyring) -> None:
        self._hub = hub
        self._keys = keys
        self._created = int(time.time())
        self._created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = os.urandom(8).hex()
        trial_id = scope["path_params"]["trial_id"]
        logs.bind(trial_id, request_id)
        client = HttpClient(send, request_id.encode())
        try:
            if not valid_trial_id(trial_id):
                raise NotFound("no such trial")
            self._keys.check_agent(key_of(scope["headers"]), trial_id)
            body = self._list() if "model" not in scope["path_params"] else self._one(scope["path_params"]["model"])
        except StenoError as error:
            await client.respond(error.status, error_body(error), [])
            return
        await client.respond(200, msgspec.json.encode(body), [])

    def _list(self) -> dict[str, Any]:
        models = [self._model(card.name, card.context_tokens) for card in self._hub.cards()]
        ids = [model["id"] for model in models] or [None]
        return {"object": "list", "data": models, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}

    def _one(self, name: str) -> dict[str, Any]:
        for card in self._hub.cards():
            if card.name == name:
                return self._model(card.name, card.context_tokens)
        raise NotFound("no worker serves a model of this name", field="model")

    def _model(self, name: str, context_tokens: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "steno",
            "max_model_len": context_tokens,
            "type": "model",
            "display_name": name,
            "created_at": self._created_at,
        }


def routes(turns: Turns, hub: Hub, keys: Keyring, **limits: Any) -> list[Route]:
    """All generation routes; each also under `/v1/v1`, which base URLs set one level too deep ask for."""
    found = []
    for dialect in DIALECTS:
        endpoint = Generation(dialect, turns, keys, **limits)
        for path in dialect.paths:
            found += [Route(f"/{{trial_id}}{prefix}{path}", endpoint, methods=["POST"]) for prefix in ("", "/v1")]
    models = Models(hub, keys)
    for prefix in ("", "/v1"):
        found.append(Route(f"/{{trial_id}}{prefix}/v1/models", models, methods=["GET"]))
        found.append(Route(f"/{{trial_id}}{prefix}/v1/models/{{model:path}}", models, methods=["GET"]))
    return found


def by_path(routes: Sequence[Route]) -> dict[tuple[str, str], ASGIApp]:
    """The turns among these routes, for `front.Application`."""
    head = "/{trial_id}"
    return {
        (method, route.path.removeprefix(head)): route.endpoint
        for route in routes
        if isinstance(route.endpoint, Generation)
        for method in route.methods or ()
    }


def openapi_paths() -> dict[str, Any]:
    """What these routes add to `/openapi.json`."""
    trial = {
        "name": "trial_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": TRIAL_ID},
    }
    paths: dict[str, Any] = {
        f"/{{trial_id}}{path}": {"post": dialect.openapi() | {"parameters": [trial]}}
        for dialect in DIALECTS
        for path in dialect.paths
    }
    paths["/{trial_id}/v1/models"] = {"get": MODELS | {"parameters": [trial]}}
    return paths
