"""One call of the REST client: how it is described, sent, read and refused, alike for blocking and asynchronous clients.

A row of the table (`calls.py`) is a method that builds a `ClientRequest`, marked by `call`: a plain method of blocking clients
and a coroutine method of asynchronous ones. A refusal raises the error tree of `contracts/errors.py`; no answer at all is
`Unreachable`.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_args, overload

import httpx
import msgspec
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from steno.config.proxy_url import PROXY_URL_FORM, proxy_url, shown
from steno.contracts.errors import BY_CODE, BadRequest, ConfigError, NotFound, ProtocolError, StenoError, Unreachable
from steno.contracts.rest import END

P = ParamSpec("P")
T = TypeVar("T")
Body = bytes | Iterable[bytes] | AsyncIterable[bytes]
"""A raw body; asynchronous pieces for `AsyncClient` only."""

LONGEST_S = 1e9
"""Sockets take no timeout of ten times as many seconds, nor `inf`."""
MSGPACK = "application/msgpack"
_BY_STATUS = {cls.status: cls for cls in reversed(BY_CODE.values()) if cls.status != StenoError.status}
_BETWEEN = frozenset({404, 408, 409, 410, 502, 503, 504, *range(520, 525)})
"""Statuses that a load balancer answers in place of the proxy: 404 to every request while it does not see the proxy. Steno's own
answers with these statuses come in its error envelope, and are about a record."""
_NAMED = 20


class ClientRequest(Generic[T]):
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
        removes: str | None = None,
        newer: str | None = None,
    ) -> None:
        """content: a raw body in place of `body`; given in pieces, it is sent once. patience_s: how much longer than usual the
        proxy may take. removes: the field that NotFound names if the thing to remove is gone, as after an attempt whose answer
        was lost. newer: a query parameter that an older proxy refuses as unknown; the call is then sent again without it."""
        self.method, self.path, self.read = method, path, read
        self.content, self.patience_s, self.removes, self.newer = content, patience_s, removes, newer
        self.query = {key: value for key, value in (query or {}).items() if value is not None}
        self.body = body


class call(Generic[P, T]):
    """A row of the table: a method that builds a `ClientRequest`, typed as the method of a client that sends it.

    It is only a description. Each class of clients gets plain functions made of it (`_with_calls`), so that `inspect.signature`,
    `help` and notebooks show parameters and what comes back.
    """

    def __init__(self, build: Callable[Concatenate[Any, P], ClientRequest[T]]) -> None:
        self.build = build
        self.__doc__ = build.__doc__

    def parameters(self) -> list[Parameter]:
        """Those of the call, without `self`, with their annotations as classes."""
        return list(signature(self.build, eval_str=True).parameters.values())[1:]

    @overload
    def __get__(self, client: Blocking, owner: Any) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: Asynchronous, owner: Any) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, client: Any, owner: Any) -> Any:
        return self


class Blocking:
    """A client whose calls return what they read. They go through `_send` of the class."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _with_calls(cls, _blocking)


class Asynchronous:
    """A client whose calls return it once awaited. They go through `_send` of the class."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _with_calls(cls, _awaited)


def _blocking(build: Callable[..., ClientRequest[T]]) -> Callable[..., T]:
    @wraps(build)
    def method(self: Any, *args: Any, **kwargs: Any) -> T:
        sent: T = self._send(build(self, *args, **kwargs))
        return sent

    return method


def _awaited(build: Callable[..., ClientRequest[T]]) -> Callable[..., Awaitable[T]]:
    @wraps(build)
    async def method(self: Any, *args: Any, **kwargs: Any) -> T:
        sent: T = await self._send(build(self, *args, **kwargs))
        return sent

    return method


def _with_calls(cls: type, method_of: Callable[[Callable[..., ClientRequest[Any]]], Callable[..., Any]]) -> None:
    """Put a function of its own into the class for each row that it inherits, with the row's signature."""
    inherited = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    for name, row in inherited.items():
        if not isinstance(row, call):
            continue
        method = method_of(row.build)
        shown = signature(row.build, eval_str=True)
        (returned,) = get_args(shown.return_annotation)
        show(method, list(shown.parameters.values()), returned)
        method.__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, method)


def show(method: Callable[..., Any], parameters: list[Parameter], returned: Any) -> None:
    """Have this signature shown for the method, whatever it takes."""
    shown: Any = method
    shown.__signature__ = Signature(parameters, return_annotation=returned)
    shown.__annotations__ = {p.name: p.annotation for p in parameters if p.annotation is not Parameter.empty}
    shown.__annotations__["return"] = returned


def usable_url(url: str) -> str:
    """A proxy's URL as paths are put after it. Raises: ConfigError."""
    url = url.strip()
    try:
        httpx.URL(proxy_url(url))
    except ValueError as error:
        raise ConfigError(f"base_url: {error}", field="base_url") from None
    except httpx.InvalidURL:
        raise ConfigError(f"base_url: got {shown(url)!r}, must be {PROXY_URL_FORM}", field="base_url") from None
    return url.rstrip("/")


def usable_timeout(seconds: float) -> float:
    """Raises: ConfigError."""
    if not 0 < seconds < LONGEST_S:
        raise ConfigError(f"timeout_s: got {seconds}, must be above 0 and below {LONGEST_S:.0f}", field="timeout_s")
    return seconds


def build(http: httpx.Client | httpx.AsyncClient, request: ClientRequest[Any]) -> httpx.Request:
    body = _with_changed(request.body).model_dump_json(exclude_unset=True) if request.body is not None else None
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


def _with_changed(model: BaseModel) -> BaseModel:
    """The same body, where a default that was changed in place (`spec.limits.max_turns = 5`) counts as set: what was neither set
    nor changed is not sent."""
    changed: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        sent = _with_changed(value) if isinstance(value, BaseModel) else value
        if sent is not value or (name not in model.model_fields_set and _is_changed(value, field)):
            changed[name] = sent
    return model.model_copy(update=changed) if changed else model


def _is_changed(value: Any, field: FieldInfo) -> bool:
    default = field.get_default(call_default_factory=True, validated_data={})
    given = value.model_fields_set if isinstance(value, BaseModel) else None
    return value != default or (isinstance(default, BaseModel) and given != default.model_fields_set)


async def _in_turn(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def repeatable(request: ClientRequest[Any]) -> bool:
    return request.content is None or isinstance(request.content, bytes)


def may_be_done(error: Exception) -> bool:
    """Whether an attempt that failed so may have done what was asked: it was sent, and its answer was lost."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return False
    return isinstance(error, httpx.TransportError | Unreachable)


def was_removed(request: ClientRequest[Any], error: Exception) -> bool:
    """Whether this failure says that what was to be removed is gone."""
    return request.removes is not None and isinstance(error, NotFound) and error.field == request.removes


def without_newer(request: ClientRequest[Any], error: Exception) -> bool:
    """Whether an older proxy has refused the parameter that it does not know: the request, without it now, can be sent again."""
    refused = isinstance(error, BadRequest) and error.field == request.newer
    return refused and request.query.pop(request.newer or "", None) is not None


def result(request: ClientRequest[T], response: httpx.Response) -> T:
    check(response)
    is_msgpack = response.headers.get("content-type", "").startswith(MSGPACK)
    try:
        if not response.content:
            return request.read(None)
        decode = msgspec.msgpack.decode if is_msgpack else msgspec.json.decode
        return request.read(decode(response.content))
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"{response.url}: not an answer of a Steno proxy: {error}") from error


def check(response: httpx.Response) -> None:
    """Raise the error that a reply stands for. The body must have been read, if it is one."""
    if response.is_success:
        return
    request_id = response.headers.get("x-request-id", "")
    try:
        envelope = msgspec.json.decode(response.content)["error"]
        code, message, field = str(envelope["code"]), str(envelope["message"]), envelope.get("field")
        if code.isdigit():
            raise ValueError("other servers number their errors")
    except (ValueError, KeyError, TypeError):  # not Steno's: a load balancer's page
        code, message, field = "", f"HTTP {response.status_code} {response.reason_phrase}".rstrip(), None
        if response.status_code in _BETWEEN:
            code, message = Unreachable.code, f"no answer from the proxy: {message}"
            if response.status_code == NotFound.status:
                message += " (not in Steno's words: is this the URL of a proxy?)"
    kind = BY_CODE.get(code) or _BY_STATUS.get(response.status_code, StenoError)
    error = kind(message + (f" (request {request_id})" if request_id else ""), field=field)
    after = response.headers.get("retry-after", "")
    if after.replace(".", "", 1).isdigit():
        error.retry_after_s = float(after)
    raise error


def as_error(error: httpx.TransportError | StenoError, base_url: httpx.URL) -> StenoError:
    if isinstance(error, StenoError):
        return error
    place = str(base_url).rstrip("/")
    if isinstance(error, httpx.LocalProtocolError):  # its text quotes the header that it refuses, which may be the key
        wrapped = Unreachable(f"the request to the proxy at {place} is not valid HTTP")
        wrapped.__suppress_context__ = True
        return wrapped
    wrapped = Unreachable(f"no answer from the proxy at {place}: {str(error) or type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


def pause(error: StenoError, attempt: int, retries: int) -> float:
    """Seconds before the next attempt; raises the error when there is none."""
    if not error.retryable or attempt > retries:
        raise error
    return min(error.retry_after_s or 1.0, 30.0) * attempt


PATIENT = httpx.Timeout(30.0, read=120.0)
"""Of an event stream: the proxy sends a comment line in every silence of 15 s."""


class EventLines:
    """A server-sent event stream -> (cursor, event). `ended`: the event that ends a session has come, now or before `after`.

    The cursor moves once an event is whole: a stream that is cut in the middle of one goes on with that event. Lines end at
    line feeds alone: an event's text may have U+2028 and the like in it, where `str.splitlines` would cut it.
    """

    def __init__(self, after: str | None) -> None:
        self._cursor = after
        self._id = after
        self._data = ""
        self._begun: list[bytes] = []  # of a line
        self.ended = after == END

    def headers(self) -> dict[str, str]:
        """Headers of the request for a new stream. An event that the stream before left unfinished is dropped."""
        self._id, self._data = self._cursor, ""
        self._begun.clear()
        return {"accept": "text/event-stream"} | ({"last-event-id": self._cursor} if self._cursor else {})

    def check_end(self) -> None:
        """The stream is over. Raises: Unreachable, when the session is not: a proxy that restarts ends its streams."""
        if not self.ended:
            raise Unreachable("the proxy ended the event stream")

    def read(self, piece: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
        """The events that end in the next bytes of the stream. Raises: ProtocolError: an event that is no JSON object."""
        *lines, rest = piece.split(b"\n")
        for line in lines:
            whole = b"".join([*self._begun, line]).removesuffix(b"\r")
            self._begun.clear()
            if (event := self.feed(whole.decode(errors="replace"))) is not None:
                yield event
        self._begun.append(rest)

    def feed(self, line: str) -> tuple[str, dict[str, Any]] | None:
        field, _, value = line.partition(":")
        if field == "id":
            self._id = value.strip()
        elif field == "data":
            self._data += value.removeprefix(" ")
        elif not line:
            data, self._data = self._data, ""
            event = _event(data) if data else None
            self._cursor = self._id  # only now: an event that can't be read is asked for again
            if event is not None:
                self.ended = event.get("type") in ("completed", "aborted", "deleted")
                return self._cursor or "", event
        return None


def _event(data: str) -> dict[str, Any]:
    try:
        event: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not an event of a Steno proxy: {error}") from error
    return event
