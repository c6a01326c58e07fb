"""The application: FastAPI behind what each request meets first: path prefix, ports, the origin guard of a proxy without keys.

Agents' turns then go straight to their endpoints, which have request ids, bounds and error shapes of their own. All else gets a
request id, a bounded body and one error envelope.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steno.contracts.errors import BadRequest, Forbidden, NotFound, StenoError
from steno.contracts.records import RESERVED_TRIAL_IDS
from steno_proxy import logs
from steno_proxy.api.agent_http import IncomingBody, read_body, refusal_headers
from steno_proxy.api.agents.lookup import error_words
from steno_proxy.api.common import Ports, error_response
from steno_proxy.api.origin_guard import OriginGuard, from_a_page
from steno_proxy.server.path_aliases import FIRST_WORDS, VERSIONS, meant
from steno_proxy.turns.interfaces import ClientLeft

log = logging.getLogger(__name__)
MAX_CONTROL_BODY_BYTES = 1 << 20
"""Largest body of a control-plane call. 1 MiB holds a task description, or annotations of some 100,000 tokens."""

WORKERS = "/workers/connect"
BOTH = frozenset({"healthz", "readyz"})
"""First words of what is answered on either port: probes ask each whether it is there."""
PROBES = frozenset({"health", "ping"})
"""vLLM's names for `healthz`: whole paths only, since trials may have these names."""
_NO_TRIAL = "/chat/completions"
"""What OpenAI's SDK asks for where its base URL has no trial id: not completions of the trial `chat`."""
_ACTION = re.compile(r"/v1(?:beta|alpha)?/models/(?P<model>.+):(?P<action>[A-Za-z]+)", re.DOTALL)


class Application(FastAPI):
    """FastAPI, with a short cut: its middleware and routing would be a sixth of what a small turn costs, and a tenth of a token.

    Attributes:
        ports: where the control plane has one of its own; None: everything is served on every port.
        origin_guard: what web pages can't get through, where no keys are asked for; None: there are keys.
        sockets: path after the trial id -> the endpoint of a WebSocket there, whatever the trial.
        turns: (method, path after the trial id) -> the endpoint that answers it, whatever the trial.
        actions: (method, action) -> the same for `/v1beta/models/{model}:{action}`, whatever the model.
    """

    def __init__(self, base_path: str, *, body_timeout_s: float, max_spec_bytes: int, **options: Any) -> None:
        """Args:
        base_path: prefix of the public URL; requests come with it, or with it stripped by what stands before the proxy.
        body_timeout_s: that a body for the control plane may take.
        max_spec_bytes: largest body of a policy update; its manifest names every tensor of a model.
        """
        super().__init__(**options)
        self.turns: Mapping[tuple[str, str], ASGIApp] = {}
        self.actions: Mapping[tuple[str, str], ASGIApp] = {}
        self.sockets: Mapping[str, ASGIApp] = {}
        self.ports: Ports | None = None
        self.origin_guard: OriginGuard | None = None
        self._base = base_path
        self._body_timeout_s = body_timeout_s
        self._max_spec_bytes = max_spec_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await super().__call__(scope, receive, send)
            return
        path: str = scope["path"]
        if self._base and path.startswith(self._base + "/"):
            path = path[len(self._base) :]
            scope = _at(scope, path)
        if self.ports is not None and not _belongs(scope, self.ports):
            await _elsewhere(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._connect(scope, receive, send)
        elif (
            self.origin_guard is not None
            and path != "/healthz"
            and (error := self.origin_guard.refusal(scope)) is not None
        ):
            await _refuse(error, scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        end = path.find("/", 1)
        endpoint = self.turns.get((scope["method"], path[end:])) if end > 1 else None
        if endpoint is None and end > 1 and path[1:end] not in RESERVED_TRIAL_IDS and path != _NO_TRIAL:
            path = path[:end] + meant(path[end:])
            if path != scope["path"]:
                scope = _at(scope, path)
            endpoint = self.turns.get((scope["method"], path[end:]))
        if endpoint is not None:
            scope["path_params"] = {"trial_id": path[1:end]}
            await endpoint(scope, receive, send)
            return
        if end > 1 and (found := _ACTION.fullmatch(path, end)) is not None:
            endpoint = self.actions.get((scope["method"], found["action"]))
            if endpoint is not None:
                scope["path_params"] = {"trial_id": path[1:end], "model": found["model"]}
                await endpoint(scope, receive, send)
                return
        await self._route(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """By FastAPI: with a request id, and a body that has come whole and is no larger than it may be."""
        request_id = os.urandom(8).hex()
        logs.bind("", request_id)
        scope.setdefault("state", {})["request_id"] = request_id
        send = _with_id(send, request_id)
        if (limit := self._limit(scope["method"], scope["path"])) is not None:
            try:
                incoming = IncomingBody(receive, max_bytes=limit, timeout_s=self._body_timeout_s)
                body = await read_body(scope, incoming)
            except ClientLeft:
                return
            except StenoError as error:
                await error_response(error, request_id)(scope, receive, send)
                return
            receive = _again(body, receive)
        await super().__call__(scope, receive, send)

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket: the workers', or an agent's, which a page may open as it may ask by HTTP."""
        path: str = scope["path"]
        end = path.find("/", 1)
        endpoint = None
        if end > 1 and path[1:end] not in RESERVED_TRIAL_IDS:
            endpoint = self.sockets.get(meant(path[end:]))
        error = from_a_page(scope) if endpoint is None else None
        if error is None and self.origin_guard is not None:
            error = self.origin_guard.refusal(scope)
        if error is None and endpoint is None and path != WORKERS:
            error = NotFound(
                f"{path[:100]} takes no WebSocket: only /<trial_id>/v1/responses and {WORKERS} (workers) do"
            )
        if error is not None:
            await _refuse_socket(error, send)
        elif endpoint is not None:
            scope["path_params"] = {"trial_id": path[1:end]}
            await endpoint(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def _limit(self, method: str, path: str) -> int | None:
        """Bytes that a body may have; None: it is passed on as it comes, and bounded where it goes."""
        if path.partition("/")[2].partition("/")[0] not in RESERVED_TRIAL_IDS:
            return None  # an agent's: `max_body_bytes` of the route
        if not path.startswith("/policy/updates"):
            return MAX_CONTROL_BODY_BYTES
        if method == "PUT" and "/shards/" in path:
            return None
        return self._max_spec_bytes if method == "POST" else MAX_CONTROL_BODY_BYTES


def _at(scope: Scope, path: str) -> Scope:
    return {**scope, "path": path, "raw_path": path.encode()}


def _belongs(scope: Scope, ports: Ports) -> bool:
    """Whether it came to the port that serves it. The path's first word says: no trial has one of the control plane's."""
    word, slash, _ = scope["path"][1:].partition("/")
    if word in BOTH or (word in PROBES and not slash):
        return True
    wanted = ports.control if word in RESERVED_TRIAL_IDS or not slash else ports.agents
    return bool((scope.get("server") or ("", 0))[1] == wanted)


async def _refuse(error: StenoError, scope: Scope, receive: Receive, send: Send) -> None:
    request_id = os.urandom(8).hex()
    logs.bind("", request_id)
    log.info("request refused: %d %s: %s", error.status, error.code, error.message)
    await error_response(error, request_id)(scope, receive, _with_id(send, request_id))


async def _refuse_socket(error: StenoError, send: Send) -> None:
    """Before it is one: with an HTTP answer."""
    request_id = os.urandom(8).hex()
    log.info("socket refused: %d %s: %s", error.status, error.code, error.message)
    answer = error_response(error, request_id)
    headers = [*answer.raw_headers, (b"x-request-id", request_id.encode())]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": answer.body})


async def _elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
    """As if there were nothing: who may not connect to the other port need not know of it."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": ""})
        return
    request_id = os.urandom(8).hex()
    await error_response(NotFound("Not Found"), request_id)(scope, receive, _with_id(send, request_id))


def _with_id(send: Send, request_id: str) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            if all(name != b"x-request-id" for name, _ in headers):  # `models` has its own
                message["headers"] = [*headers, (b"x-request-id", request_id.encode())]
        await send(message)

    return sending


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` after a body that has been read: gives it once more, then what comes after it."""
    given = False

    async def receiving() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receiving


# -- exception handlers: everything ends in the one envelope --------------------------------------------------------------


def request_id_of(request: Request) -> str:
    found: str = request.scope.get("state", {}).get("request_id") or os.urandom(8).hex()
    return found


async def on_steno_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StenoError)
    return _in_words(request, error)


async def on_validation_error(request: Request, error: Exception) -> Response:
    """FastAPI's: the first problem, with the dotted path of its field (`size`, `sampling.force`)."""
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    where = [str(word) for word in problem["loc"] if word not in ("body", "query", "path", "header")]
    field = ".".join(where) or None
    if problem["type"] == "json_invalid":
        return error_response(BadRequest("the body is not valid JSON"), request_id_of(request))
    kind = request.headers.get("content-type", "")
    if field is None and "json" not in kind:  # FastAPI takes no other for JSON: what a browser's form sends must not be
        message = f"content-type: got {kind[:64] or 'none'}, must be application/json"
        return error_response(BadRequest(message, field="content-type"), request_id_of(request))
    message = problem["msg"].removeprefix("Value error, ")
    return error_response(BadRequest(f"{field or 'the body'}: {message}", field=field), request_id_of(request))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's: no such route, or no such method on it."""
    assert isinstance(error, HTTPException)
    known: dict[int, type[StenoError]] = {403: Forbidden, 404: NotFound}
    status, path = error.status_code, request.scope["path"]
    if status == 405 and _ACTION.search(path):
        status = 404  # Google's `models/{model}` takes GET; what it is asked to do is another call
    message = str(error.detail)
    if status == 404:
        message = _not_served(request)
    elif status == 405:
        message = (
            f"{request.method} {path[:100]} is not served here: use {(error.headers or {}).get('Allow', 'another')}"
        )
    response = _in_words(request, known.get(status, BadRequest)(message))
    response.status_code = status
    response.headers.update(error.headers or {})
    return response


def _in_words(request: Request, error: StenoError) -> Response:
    """Under a trial in the words of the client's dialect, else in the control plane's envelope."""
    request_id = request_id_of(request)
    word, slash, _ = request.scope["path"].removeprefix("/").partition("/")
    if not slash or word in RESERVED_TRIAL_IDS:
        return error_response(error, request_id)
    body = error_words(request.scope)(error, request_id)
    headers = {name.decode(): value.decode() for name, value in refusal_headers(error)}
    return Response(body, error.status, headers, media_type="application/json")


def _not_served(request: Request) -> str:
    """What to say of a path that there is not: agents' clients show it, and log it."""
    path: str = request.scope["path"]
    word, _, rest = path.removeprefix("/").partition("/")
    begins = word in VERSIONS or word in FIRST_WORDS  # some of which trials may be named as well
    if word in RESERVED_TRIAL_IDS & VERSIONS or (begins and rest.partition("/")[0] not in VERSIONS):
        return f"{request.method} {path[:100]}: the path has no trial id; agents' paths are /<trial_id>/v1/..."
    asked = f"{request.method} {path[:100]} is not served here"
    if word in RESERVED_TRIAL_IDS or "/" not in path.strip("/"):
        return f"{asked}: /openapi.json lists the routes"
    return f"{asked}: agents' routes are generation, token counts and models"


async def on_surprise(request: Request, error: Exception) -> Response:
    """Fixed text; the exception's own words stay in the log."""
    request_id = request_id_of(request)
    log.error("request %s: unhandled exception", request_id, exc_info=error)
    return error_response(
        StenoError(f"internal error; the proxy's log has the details under request {request_id}"), request_id
    )
