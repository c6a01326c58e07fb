"""The REST client of the control plane: `Steno` and `AsyncSteno`, one table of calls for both.

    with Steno("http://127.0.0.1:8000", key="…") as steno:
        trial = steno.register("my-trial")
        for turn in steno.turns("my-trial"):
            print(turn.index, turn.completion_tokens)

Records come as the models of `contracts/records.py`, token arrays as raw bytes (msgpack on the way). Light to import: what the
worker, the bridge and the command line know of the proxy is this and the contracts.

Each row of the table is written once, as a method of `_Table` that builds a `_Request`; the descriptor `_call` sends it, and is
typed as a plain method on `Steno` and as a coroutine method on `AsyncSteno`. A refusal raises the error tree of
`contracts/errors.py`; no answer at all is `Unreachable`. Every call is idempotent (ids that the proxy would make are made here),
and one that failed in a way that may pass is repeated.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload
from urllib.parse import quote

import httpx
import msgspec
from pydantic import BaseModel, SecretStr, ValidationError

from proxy.contracts.errors import BY_CODE, ProtocolError, StenoError, Unreachable
from proxy.contracts.leases import Lease, LeaseExtension, LeaseList, LeaseRequest, LeaseTerm, RunView
from proxy.contracts.policy import PolicyList, PolicyView, Received, Update, UpdateSpec
from proxy.contracts.records import Group, Sample, Session, Turn
from proxy.contracts.rest import (
    Completion,
    GroupSpec,
    GroupTrials,
    SampleList,
    SessionPage,
    SessionSpec,
    Trial,
    TurnPage,
)

P = ParamSpec("P")
T = TypeVar("T")
Body = bytes | Iterable[bytes] | AsyncIterable[bytes]
"""A raw body; asynchronous pieces for `AsyncSteno` only."""

MSGPACK = "application/msgpack"
_BY_STATUS = {cls.status: cls for cls in reversed(BY_CODE.values()) if cls.status != StenoError.status}


class _Request(Generic[T]):
    """One call, built and not yet sent. `read` makes the result of the decoded body."""

    def __init__(
        self,
        method: str,
        path: str,
        read: Callable[[Any], T],
        *,
        query: dict[str, Any] | None = None,
        body: BaseModel | None = None,
        content: Body | None = None,
        patience_s: float = 0.0,
    ) -> None:
        """content: a raw body instead; in pieces it is sent once. patience_s: how long the proxy may take longer than usual."""
        self.method, self.path, self.read = method, path, read
        self.content, self.patience_s = content, patience_s
        self.query = {key: value for key, value in (query or {}).items() if value is not None}
        self.body = body


class _call(Generic[P, T]):
    def __init__(self, build: Callable[Concatenate[Any, P], _Request[T]]) -> None:
        self._build = build
        self.__doc__ = build.__doc__

    @overload
    def __get__(self, client: Steno, owner: Any) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncSteno, owner: Any) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, client: Any, owner: Any) -> Any:
        if client is None:
            return self

        def send(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client._send(self._build(client, *args, **kwargs))

        send.__doc__ = self.__doc__
        return send


class _Table:
    """The REST table of docs/api.md, row by row."""

    def __init__(
        self,
        base_url: str,
        key: str | SecretStr | None = None,
        *,
        timeout_s: float = 30.0,
        retries: int = 2,
        transport: Any = None,
    ) -> None:
        """
        Args:
            base_url: of the proxy, path prefix included; what its `--public-url` says.
            key: the admin key or a group's harness key; None where the proxy asks for none.
            timeout_s: for each attempt to connect and for each silence while an answer is read.
            retries: further attempts after `Unreachable` or an error that is `retryable`.
            transport: an httpx transport instead of sockets (a Unix socket, a test's fake).
        """
        secret = key.get_secret_value() if isinstance(key, SecretStr) else key
        headers = {"accept": MSGPACK} | ({"authorization": f"Bearer {secret}"} if secret else {})
        self._retries = retries
        self._open(base_url=base_url.rstrip("/"), headers=headers, timeout=timeout_s, transport=transport)

    def _open(self, **options: Any) -> None:
        raise NotImplementedError

    @_call
    def create_group(self, spec: GroupSpec) -> _Request[GroupTrials]:
        """A group and its trials, each with URLs and key."""
        named = spec.model_copy(update={"group_id": spec.group_id or uuid.uuid4().hex})
        return _Request("POST", "/groups", GroupTrials.model_validate, body=named)

    @_call
    def group(self, group_id: str) -> _Request[Group]:
        return _Request("GET", f"/groups/{quote(group_id, safe='')}", Group.model_validate)

    @_call
    def register(self, trial_id: str | None = None, spec: SessionSpec | None = None) -> _Request[Trial]:
        """One trial; registering it again returns what is on record."""
        path = _session(trial_id or (spec and spec.trial_id) or uuid.uuid4().hex)
        return _Request("POST", path, Trial.model_validate, body=spec or SessionSpec())

    @_call
    def session_page(
        self,
        *,
        status: str | None = None,
        group_id: str | None = None,
        since: float | None = None,
        until: float | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> _Request[SessionPage]:
        """One page of sessions by creation time, oldest first. `since`, `until`: Unix seconds."""
        query = {
            "status": status,
            "group_id": group_id,
            "since": since,
            "until": until,
            "cursor": cursor,
            "limit": limit,
        }
        return _Request("GET", "/sessions", SessionPage.model_validate, query=query)

    @_call
    def session(self, trial_id: str) -> _Request[Session]:
        return _Request("GET", _session(trial_id), Session.model_validate)

    @_call
    def turn_page(self, trial_id: str, *, start: int = 0, limit: int | None = None) -> _Request[TurnPage]:
        query = {"start": start, "limit": limit}
        return _Request("GET", _session(trial_id, "turns"), TurnPage.model_validate, query=query)

    @_call
    def samples(self, trial_id: str) -> _Request[list[Sample]]:
        """One per leaf of the conversation tree."""
        return _Request("GET", _session(trial_id, "samples"), lambda body: SampleList.model_validate(body).items)

    @_call
    def complete(self, trial_id: str, outcome: Completion) -> _Request[Session]:
        """Freeze the session and post its reward. The same again changes nothing."""
        return _Request("POST", _session(trial_id, "complete"), Session.model_validate, body=outcome)

    @_call
    def delete(self, trial_id: str) -> _Request[None]:
        """Remove everything and leave a tombstone."""
        return _Request("DELETE", _session(trial_id), lambda body: None)

    @_call
    def policies(self) -> _Request[list[PolicyView]]:
        """Every policy: its version in force, and who serves which version."""
        return _Request("GET", "/policy", lambda body: PolicyList.model_validate(body).items)

    @_call
    def post_update(self, spec: UpdateSpec) -> _Request[Update]:
        """Bring new weights to the workers. Returns at once; `update` says how far it is. The same again: the recorded update."""
        return _Request("POST", "/policy/updates", Update.model_validate, body=spec)

    @_call
    def update(self, update_id: str, *, wait_s: float = 0.0) -> _Request[Update]:
        """An update as it stands; with `wait_s` (60 at most) once it has ended or wants bytes, or so many seconds later.

        NotFound from a proxy that was started again and keeps nothing: post the same spec again.
        """
        path = f"/policy/updates/{quote(update_id, safe='')}"
        return _Request("GET", path, Update.model_validate, query={"wait_s": wait_s or None}, patience_s=wait_s)

    @_call
    def upload_shard(self, update_id: str, name: str, offset: int, data: Body) -> _Request[int]:
        """Bytes of a shard from `offset` on, as `Update.wants` asks. Returns: up to which byte of the shard somebody took them.

        Give tens of megabytes a call, in pieces that are made as they are sent: it takes as long as the slowest worker, and what
        nobody wants any more is sent for nothing. Only whole `bytes` are repeated after a failure.
        """
        path = f"/policy/updates/{quote(update_id, safe='')}/shards/{quote(name, safe='')}"
        return _Request(
            "PUT", path, lambda body: Received.model_validate(body).received, query={"offset": offset}, content=data,
            patience_s=60.0,
        )  # fmt: skip

    @_call
    def lease(self, request: LeaseRequest) -> _Request[list[Lease]]:
        """Completed groups, oldest ready first: `max_groups` of them, or those that are ready after `wait_s`."""
        named = request.model_copy(update={"request_id": request.request_id or uuid.uuid4().hex})
        return _Request(
            "POST",
            "/leases",
            lambda body: LeaseList.model_validate(body).items,
            body=named,
            patience_s=request.wait_s,
        )

    @_call
    def acknowledge(self, lease_id: str) -> _Request[LeaseTerm]:
        """The step that used the group is durable. Raises: Conflict: the lease was lost to another trainer."""
        return _Request("POST", f"/leases/{lease_id}/ack", LeaseTerm.model_validate)

    @_call
    def release(self, lease_id: str) -> _Request[LeaseTerm]:
        """Give the group back, to be served again at once. Raises: Conflict, as `acknowledge`."""
        return _Request("POST", f"/leases/{lease_id}/release", LeaseTerm.model_validate)

    @_call
    def extend(self, lease_id: str, ttl_s: float = 600.0, *, used: bool = False) -> _Request[LeaseTerm]:
        """Hold the group for `ttl_s` from now; `used`: a step has used it, and only waits to be durable. Raises: Conflict, as
        `acknowledge`."""
        path = f"/leases/{lease_id}/extend"
        return _Request("POST", path, LeaseTerm.model_validate, body=LeaseExtension(ttl_s=ttl_s, used=used))

    @_call
    def run(self, run_id: str) -> _Request[RunView]:
        """Where a run's groups are, and the proxy's side of its ledger. A run that nobody knows has nothing."""
        return _Request("GET", f"/runs/{quote(run_id, safe='')}", RunView.model_validate)

    @_call
    def workers(self) -> _Request[list[dict[str, Any]]]:
        """The fleet: what each worker serves, its load, whether it is connected."""
        return _Request("GET", "/workers", lambda body: cast("list[dict[str, Any]]", body["items"]))


class Steno(_Table):
    """Blocking client. Safe to share between threads; one pool of connections, closed by `close` or `with`."""

    def _open(self, **options: Any) -> None:
        self._http = httpx.Client(**options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def sessions(self, **filters: Any) -> Iterator[Session]:
        """All sessions that match, page by page; filters as of `session_page`."""
        cursor: str | None = None
        while True:
            page = self.session_page(**filters, cursor=cursor)
            yield from page.items
            if (cursor := page.next_cursor) is None:
                return

    def turns(self, trial_id: str, *, start: int = 0) -> Iterator[Turn]:
        """Turns in commit order from number `start` on, page by page."""
        next_start: int | None = start
        while next_start is not None:
            page = self.turn_page(trial_id, start=next_start)
            yield from page.items
            next_start = page.next_start

    def events(self, trial_id: str, *, after: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """(cursor, event) of a session: those on record after `after`, then live ones, until the session has ended.

        Goes on after a lost connection from the last cursor; gives up after `retries` attempts without an event.
        """
        lines = _EventLines(after)
        failures = 0
        while not lines.ended:
            try:
                with self._http.stream(
                    "GET", _session(trial_id, "events"), headers=lines.headers(), timeout=_PATIENT
                ) as response:
                    if response.is_error:
                        response.read()
                    _refused(response)
                    for line in response.iter_lines():
                        if (event := lines.feed(line)) is not None:
                            failures = 0
                            yield event
                lines.check_end()
            except (httpx.TransportError, StenoError) as error:
                failures += 1
                time.sleep(_pause(_expected(error, self._http.base_url), failures, self._retries))

    def _send(self, request: _Request[T]) -> T:
        for attempt in range(1, self._retries + 2):
            try:
                return _result(request, self._http.send(_build(self._http, request)))
            except (httpx.TransportError, StenoError) as error:
                retries = self._retries if _repeatable(request) else 0
                time.sleep(_pause(_expected(error, self._http.base_url), attempt, retries))
        raise AssertionError("_pause raises after the last attempt")


class AsyncSteno(_Table):
    """The same client for asyncio; its calls are safe to cancel."""

    def _open(self, **options: Any) -> None:
        self._http = httpx.AsyncClient(**options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def sessions(self, **filters: Any) -> AsyncIterator[Session]:
        """All sessions that match, page by page; filters as of `session_page`."""
        cursor: str | None = None
        while True:
            page = await self.session_page(**filters, cursor=cursor)
            for session in page.items:
                yield session
            if (cursor := page.next_cursor) is None:
                return

    async def turns(self, trial_id: str, *, start: int = 0) -> AsyncIterator[Turn]:
        """Turns in commit order from number `start` on, page by page."""
        next_start: int | None = start
        while next_start is not None:
            page = await self.turn_page(trial_id, start=next_start)
            for turn in page.items:
                yield turn
            next_start = page.next_start

    async def events(self, trial_id: str, *, after: str | None = None) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """As `Steno.events`."""
        lines = _EventLines(after)
        failures = 0
        while not lines.ended:
            try:
                path, headers = _session(trial_id, "events"), lines.headers()
                async with self._http.stream("GET", path, headers=headers, timeout=_PATIENT) as response:
                    if response.is_error:
                        await response.aread()
                    _refused(response)
                    async for line in response.aiter_lines():
                        if (event := lines.feed(line)) is not None:
                            failures = 0
                            yield event
                lines.check_end()
            except (httpx.TransportError, StenoError) as error:
                failures += 1
                await asyncio.sleep(_pause(_expected(error, self._http.base_url), failures, self._retries))

    async def _send(self, request: _Request[T]) -> T:
        for attempt in range(1, self._retries + 2):
            try:
                return _result(request, await self._http.send(_build(self._http, request)))
            except (httpx.TransportError, StenoError) as error:
                retries = self._retries if _repeatable(request) else 0
                await asyncio.sleep(_pause(_expected(error, self._http.base_url), attempt, retries))
        raise AssertionError("_pause raises after the last attempt")


_PATIENT = httpx.Timeout(30.0, read=120.0)
"""Of an event stream: the proxy sends a comment line in every silence of 15 s."""


class _EventLines:
    """Lines of a server-sent event stream -> (cursor, event). `ended`: the event that ends a session has come."""

    def __init__(self, after: str | None) -> None:
        self._cursor = after
        self._data = ""
        self.ended = False

    def headers(self) -> dict[str, str]:
        return {"accept": "text/event-stream"} | ({"last-event-id": self._cursor} if self._cursor else {})

    def check_end(self) -> None:
        """The stream is over. Raises: Unreachable, when the session is not: a proxy that restarts ends its streams."""
        if not self.ended:
            raise Unreachable("the proxy ended the event stream")

    def feed(self, line: str) -> tuple[str, dict[str, Any]] | None:
        field, _, value = line.partition(":")
        if field == "id":
            self._cursor = value.strip()
        elif field == "data":
            self._data += value.removeprefix(" ")
        elif not line and self._data:
            event: dict[str, Any] = msgspec.json.decode(self._data)
            self._data = ""
            self.ended = event.get("type") in ("completed", "aborted", "deleted")
            return self._cursor or "", event
        return None


def _session(trial_id: str, tail: str = "") -> str:
    return f"/sessions/{quote(trial_id, safe='')}" + (f"/{tail}" if tail else "")


def _build(http: httpx.Client | httpx.AsyncClient, request: _Request[Any]) -> httpx.Request:
    body = request.body.model_dump_json(exclude_unset=True) if request.body is not None else None
    headers = {"content-type": "application/json"} if body is not None else None
    content: Any = body
    if request.content is not None:
        headers, content = {"content-type": "application/octet-stream"}, request.content
        if isinstance(http, httpx.AsyncClient) and not isinstance(content, bytes | AsyncIterable):
            content = _in_turn(content)
    timeout = http.timeout
    if request.patience_s and timeout.read is not None:
        longer = timeout.read + request.patience_s
        timeout = httpx.Timeout(timeout.connect, read=longer, write=longer)
    return http.build_request(
        request.method, request.path, params=request.query, content=content, headers=headers, timeout=timeout
    )


async def _in_turn(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def _repeatable(request: _Request[Any]) -> bool:
    return request.content is None or isinstance(request.content, bytes)


def _result(request: _Request[T], response: httpx.Response) -> T:
    _refused(response)
    is_msgpack = response.headers.get("content-type", "").startswith(MSGPACK)
    try:
        if not response.content:
            return request.read(None)
        decode = msgspec.msgpack.decode if is_msgpack else msgspec.json.decode
        return request.read(decode(response.content))
    except (msgspec.DecodeError, ValidationError, TypeError, KeyError) as error:
        raise ProtocolError(f"{response.url} did not answer as Steno does: {error}") from error


def _refused(response: httpx.Response) -> None:
    """Raise the error that a reply stands for. The body must have been read, if it is one."""
    if response.is_success:
        return
    request_id = response.headers.get("x-request-id", "")
    try:
        envelope = msgspec.json.decode(response.content)["error"]
        code, message, field = str(envelope["code"]), str(envelope["message"]), envelope.get("field")
    except (msgspec.DecodeError, KeyError, TypeError):  # not Steno's: a load balancer's page
        code, message, field = "", f"HTTP {response.status_code} {response.reason_phrase}", None
    kind = BY_CODE.get(code) or _BY_STATUS.get(response.status_code, StenoError)
    error = kind(message + (f" (request {request_id})" if request_id else ""), field=field)
    after = response.headers.get("retry-after", "")
    if after.replace(".", "", 1).isdigit():
        error.retry_after_s = float(after)
    raise error


def _expected(error: httpx.TransportError | StenoError, base_url: httpx.URL) -> StenoError:
    if isinstance(error, StenoError):
        return error
    wrapped = Unreachable(f"no answer from the proxy at {str(base_url).rstrip('/')}: {error or type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


def _pause(error: StenoError, attempt: int, retries: int) -> float:
    """Seconds before the next attempt; raises the error when there is none."""
    if not error.retryable or attempt > retries:
        raise error
    return min(error.retry_after_s or 1.0, 30.0) * attempt
