"""The agents' routes: `/{trial_id}/v1/…`, one per path of each dialect, and `models`. The hot path.

Plain ASGI inside the FastAPI application: nothing but what a turn needs happens here. Reads a bounded body, checks the
agent's key (I8), runs the turn, and writes what it says. Errors before the first byte are the dialect's own, with
`retry-after` where trying again helps; after it the response ends as the dialect says, or without its last chunk, so that the
client sees a broken connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from steno.contracts.chat import IMAGES, NO_IMAGES, CanonicalRequest
from steno.contracts.errors import BadRequest, StenoError, TooManyRequests
from steno.contracts.records import TRIAL_ID
from steno_proxy import logs, metrics
from steno_proxy.api.agent_http import (
    ID_HEADERS,
    MAX_MODEL_CHARS,
    BodyReader,
    HttpClient,
    IncomingBody,
    check_trial_id,
    refusal_headers,
)
from steno_proxy.api.agents.models import ModelListEndpoint
from steno_proxy.api.bodies_in_flight import BodyShare
from steno_proxy.auth.keys import Keyring, key_of
from steno_proxy.auth.rate_limit import RateLimiter
from steno_proxy.dialects.anthropic.dialect import MessagesDialect
from steno_proxy.dialects.base import Dialect
from steno_proxy.dialects.openai.chat import ChatDialect, Reasoning
from steno_proxy.dialects.openai.completions import CompletionsDialect
from steno_proxy.dialects.openai.schema import MODEL, MODELS
from steno_proxy.dialects.responses.dialect import ResponsesCompact, ResponsesDialect
from steno_proxy.session_cache.note_writer import NoteWriter
from steno_proxy.turns.interfaces import ClientLeft, RunningAnswer
from steno_proxy.turns.retry_matching import retries_so_far
from steno_proxy.turns.service import TurnService
from steno_proxy.workers.hub import Hub

log = logging.getLogger(__name__)

DIALECTS: tuple[Dialect, ...] = (
    ChatDialect(),
    CompletionsDialect(),
    MessagesDialect(),
    ResponsesDialect(),
    ResponsesCompact(),
)
IDS_COUNT = 3
"""How many times a body counts if its request asks for the ids of its prompt: as JSON they are about twice its length."""
LAST_WORDS_S = 10.0
"""How long a client that reads nothing is waited for with the events that say why its answer breaks. Seconds."""
WATCH_AFTER_S = 0.05
"""How long a request runs before anybody looks whether its client is still there. Seconds."""


class GenerationEndpoint:
    """The ASGI endpoint of one dialect."""

    def __init__(
        self,
        dialect: Dialect,
        turns: TurnService,
        keys: Keyring,
        *,
        keepalive_s: float,
        bodies: BodyReader,
        rates: RateLimiter,
        note_writer: NoteWriter,
    ) -> None:
        self._dialect = dialect
        self._turns = turns
        self._keys = keys
        self._keepalive_s = keepalive_s
        self._bodies = bodies
        self._rates = rates
        self._note_writer = note_writer
        self._named = ID_HEADERS.get(dialect.name, (b"x-request-id",))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trial_id = scope["path_params"]["trial_id"]
        request_id = os.urandom(8).hex()
        logs.bind(trial_id, request_id)
        client = HttpClient(send, request_id.encode(), self._keepalive_s, self._named)
        try:
            await self._serve(trial_id, scope, receive, client)
        except StenoError as error:
            if not isinstance(error, ClientLeft) and self._note_writer.refused(trial_id, error):
                how = "broken off" if client.started else "refused"
                log.info("request %s: %d %s: %s", how, error.status, error.code, error.message)
            if client.breaks is None and not isinstance(error, ClientLeft):  # it never began
                self._turns.recorder.refused(trial_id, error)
            await self._refuse(client, error, request_id)
            _let_go(error)
        except Exception:
            log.exception("unhandled exception while generating")
            await self._refuse(
                client,
                StenoError(f"internal error; the proxy's log has the details under request {request_id}"),
                request_id,
            )
        finally:
            client.close()
            client.breaks = (
                None  # else client and request keep each other, and a whole conversation, for the collector to find
            )
            status = 499 if client.gone else client.status
            metrics.REQUESTS.labels(self._dialect.name, str(status)).inc()

    async def _serve(self, trial_id: str, scope: Scope, receive: Receive, client: HttpClient) -> None:
        check_trial_id(trial_id)
        shown = self._keys.check_agent(key_of(scope["headers"]), trial_id)
        try:
            self._rates.enter(trial_id)
        except TooManyRequests:
            await self._note_refused(trial_id, scope, self._bodies.incoming(receive))
            raise
        share = self._bodies.inflight.hold(trial_id)
        try:
            asked, again = await self._read_request(trial_id, scope, receive, share)
            await self._run(trial_id, shown, asked, again, receive, client)
        finally:
            share.close()
            self._rates.leave(trial_id)

    async def _read_request(
        self, trial_id: str, scope: Scope, receive: Receive, share: BodyShare
    ) -> tuple[CanonicalRequest, int]:
        """The request, and how often its client says that it has sent it before. The body itself is not kept."""
        incoming = self._bodies.incoming(receive)
        try:
            body = await self._bodies.read(scope, incoming, share)
        except TooManyRequests:
            await self._note_refused(trial_id, scope, incoming)
            raise
        asked = await self._bodies.parsed(self._dialect.parse, body, lambda asked: asked.job)
        asked.body_bytes = len(body)
        if self._turns.recorder.traces is not None:
            asked.traceparent = _traceparent(scope)
        if asked.returns_ids:
            share.grow(IDS_COUNT * len(body))
        again = retries_so_far(scope["headers"])
        if again and self._rates.refused.take(trial_id, body):
            again = 0
        _check_images(asked, self._turns.hub)
        asked.model = scope["path_params"].get("model", asked.model)  # where a format has it in the path
        if len(asked.model or "") > MAX_MODEL_CHARS:
            raise BadRequest(f"model: longer than {MAX_MODEL_CHARS} characters", field="model")
        if asked.dropped:
            metrics.dropped(self._dialect.name, asked.dropped)
            names = sorted({name[:40] for name in asked.dropped})[:20]
            new = [name for name in names if self._note_writer.add(trial_id, "dropped", name)]
            if new:
                log.info("ignored items of unknown types in a request: %s", new)
        return asked, again

    async def _note_refused(self, trial_id: str, scope: Scope, incoming: IncomingBody) -> None:
        """Keep the digest of a refused request, so that its retry is not taken for a retry of an identical, answered request."""
        if retries_so_far(scope["headers"]) or not self._rates.refused.has_room(trial_id):
            return
        with contextlib.suppress(StenoError):
            digest = await self._bodies.digest(incoming)
            self._rates.refused.note(trial_id, digest)

    async def _run(
        self, trial_id: str, shown: int | None, asked: CanonicalRequest, again: int, receive: Receive,
        client: HttpClient,
    ) -> None:  # fmt: skip
        watch = _DisconnectWatch(receive, client)
        try:
            request = watch.request = await self._turns.open(
                trial_id, self._dialect, asked, client, again=again, shown=shown
            )
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
        if client.started:
            # If `data` is empty, no last chunk is sent: an answer that is not whole must not look whole (I3).
            data = client.breaks(error) if client.breaks else self._dialect.broken(error)
            if data:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS_S):
                        await client.end(data)
            return
        await client.respond(error.status, self._dialect.error(error, request_id), refusal_headers(error))


def _check_images(asked: CanonicalRequest, hub: Hub) -> None:
    """Raises: BadRequest naming the first image, where models are served and none takes any: before anything waits for one."""
    if asked.images and (cards := hub.cards()) and not any(IMAGES in card.capabilities for card in cards):
        raise BadRequest(f"{asked.images[0]}: {NO_IMAGES}", field=asked.images[0])


def _traceparent(scope: Scope) -> str:
    found = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
    return str(found.decode("latin-1")) if len(found) < 100 else ""


def _let_go(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of its contexts. The streams that it ended keep the error, and its frames keep the
    streams and the whole conversation: the garbage collector would find this cycle much later."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


class _DisconnectWatch:
    """Aborts a request whose client disconnects. It begins to watch after WATCH_AFTER_S: the task that waits for a disconnect
    is a tenth of the cost of a turn that is over by then.

    request: None until it is open; if the client leaves before that, the task that made this watch is cancelled.
    """

    __slots__ = ("_client", "_opening", "_receive", "_task", "_timer", "request")

    def __init__(self, receive: Receive, client: HttpClient) -> None:
        self._receive = receive
        self._client = client
        self.request: RunningAnswer | None = None
        self._opening: asyncio.Task[object] | None = asyncio.current_task()
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)

    def stop(self) -> None:
        self._timer.cancel()
        self._opening = self.request = None
        if self._task is not None:
            self._task.cancel()
            self._task = None  # else it and its own cancellation keep this

    def left_in_time(self) -> bool:
        """Whether only this watch cancelled the task; takes its cancellation back (`Task.uncancel`)."""
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


def routes(
    turns: TurnService, hub: Hub, keys: Keyring, *, chat_reasoning: Reasoning = "both", **limits: Any
) -> list[Route]:
    """All generation routes. `front.Application` brings other spellings of them here (`path_aliases.py`)."""
    found = []
    for dialect in DIALECTS:
        if isinstance(dialect, ChatDialect):
            dialect = ChatDialect(chat_reasoning)
        endpoint = GenerationEndpoint(dialect, turns, keys, **limits)
        for path in dialect.paths:
            found.append(Route(f"/{{trial_id}}{path}", endpoint, methods=["POST"]))
    models = ModelListEndpoint(hub, keys)
    found.append(Route("/{trial_id}/v1/models", models, methods=["GET"]))
    found.append(Route("/{trial_id}/v1/models/{model:path}", models, methods=["GET"]))
    return found


def by_path(routes: Sequence[Route]) -> dict[tuple[str, str], ASGIApp]:
    """The turns among these routes, for `front.Application`."""
    head = "/{trial_id}"
    return {
        (method, route.path.removeprefix(head)): route.endpoint
        for route in routes
        if isinstance(route.endpoint, GenerationEndpoint)
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
    model = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "maxLength": MAX_MODEL_CHARS},
    }
    paths["/{trial_id}/v1/models"] = {"get": MODELS | {"parameters": [trial]}}
    paths["/{trial_id}/v1/models/{model}"] = {"get": MODEL | {"parameters": [trial, model]}}
    return paths
