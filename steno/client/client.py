"""The REST client of the control plane: `Client` and `AsyncClient`, one table of calls for both (`calls.py`).

    from steno import Client

    with Client("http://127.0.0.1:8000", key="…") as steno:
        trial = steno.register("my-trial")
        for turn in steno.turns("my-trial"):
            print(turn.index, turn.completion_tokens)

Records come as the models of `contracts/records.py`, token arrays as raw bytes (msgpack on the way). Light to import: what the
worker, the bridge and the command line know of the proxy is this and the contracts.

A call that failed in a way that may pass is repeated.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, Unpack, get_type_hints

import httpx

from steno.client.calls import RestCalls, SessionFilters, session_path
from steno.client.transport import (
    PATIENT,
    Asynchronous,
    Blocking,
    ClientRequest,
    EventLines,
    as_error,
    build,
    check,
    may_be_done,
    pause,
    repeatable,
    result,
    show,
    was_removed,
    without_newer,
)
from steno.contracts.errors import ConfigError, StenoError
from steno.contracts.records import Session, Turn
from steno.contracts.rest import SessionPage, not_given

if TYPE_CHECKING:
    import asyncio
    import ssl

T = TypeVar("T")
H = TypeVar("H", httpx.Client, httpx.AsyncClient)

HTTP_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
"""Variables that httpx reads, in small or capital letters."""

AT_ONCE = 32
"""Short calls that one `AsyncClient` sends at a time; further calls wait here, in order. If they waited in httpx's pool, it would
compare each of them with each connection whenever a call begins or ends, and fail it after `timeout_s`."""
NO_BOUND = httpx.Limits(max_connections=None, max_keepalive_connections=None)
"""httpx's pool has no bound: `AT_ONCE` bounds short calls (in a `Client`: its threads do), and the caller bounds long polls and
streams. With a bound, short calls would wait for these; if fewer connections may be kept than are open, httpx closes each
connection as it becomes idle."""


class Client(RestCalls, Blocking):
    """Blocking client. Safe to share between threads; one pool of connections, closed by `close` or `with`. A process that was
    forked has a pool of its own: two that write to one connection get each other's answers.

    Each call raises a `StenoError`. Its docstring names what is its own; any call may raise Unreachable: no answer after
    `retries`; ProtocolError: an answer that is none of Steno's; Unauthorized, Forbidden: of the key; BadRequest: a value that the
    proxy refuses, by `field`; StoreUnavailable: its store does not answer.
    """

    def _open(self, **options: Any) -> None:
        self._options = options
        self._opened, self._process = self._new(), os.getpid()

    def _new(self) -> httpx.Client:
        return new_http(httpx.Client, self._options)

    @property
    def _http(self) -> httpx.Client:
        if self._process != (process := os.getpid()):
            self._opened = self._new()  # the other is its parent's, which closes it
            self._process = process
        return self._opened

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections: no call after this."""
        self._http.close()

    def sessions(self, **filters: Unpack[SessionFilters]) -> Iterator[Session]:
        """Returns: all sessions that match, page by page; filters as of `session_page`.

        Raises: ArchiveUnreadable, after `retries`: some of them can't be read now. `session_page` gives the others.
        """
        cursor: str | None = None
        while True:
            page = self._whole_page(filters, cursor)
            yield from page.items
            if (cursor := page.next_cursor) is None:
                return

    def _whole_page(self, filters: SessionFilters, cursor: str | None) -> SessionPage:
        for attempt in range(1, self._retries + 2):
            page: SessionPage = self.session_page(**filters, cursor=cursor)
            if (error := not_given(page.unreadable)) is None:
                return page
            time.sleep(pause(error, attempt, self._retries))
        raise AssertionError("pause raises after the last attempt")

    def turns(self, trial_id: str, *, start: int = 0) -> Iterator[Turn]:
        """Returns: a trial's turns in commit order from number `start` on, page by page. Raises: as `turn_page`."""
        next_start: int | None = start
        while next_start is not None:
            page = self.turn_page(trial_id, start=next_start)
            yield from page.items
            next_start = page.next_start

    def events(self, trial_id: str, *, after: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Returns: (cursor, event) of a session: those on record after `after`, then live ones, until the session has ended.

        An event's `type` is `turn`, and at the end `completed`, `aborted` or `deleted`. Goes on after a lost connection from the
        last cursor; gives up after `retries` attempts without an event. Raises: as `session`; BadRequest: `after` is no cursor.
        """
        lines = EventLines(after)
        failures = 0
        while not lines.ended:
            try:
                with self._http.stream(
                    "GET", session_path(trial_id, "events"), headers=lines.headers(), timeout=PATIENT
                ) as response:
                    if not response.is_success:
                        response.read()
                    check(response)
                    for piece in response.iter_bytes():
                        for event in lines.read(piece):
                            failures = 0
                            yield event
                lines.check_end()
            except (httpx.TransportError, StenoError) as error:
                failures += 1
                time.sleep(pause(as_error(error, self._http.base_url), failures, self._retries))

    def _send(self, request: ClientRequest[T]) -> T:
        lost = False  # the answer of an attempt that may have done what was asked
        for attempt in range(1, self._retries + 2):
            try:
                return result(request, self._http.send(build(self._http, request)))
            except (httpx.TransportError, StenoError) as error:
                if lost and was_removed(request, error):
                    return request.read(None)
                if without_newer(request, error):
                    return self._send(request)
                lost = lost or may_be_done(error)
                retries = self._retries if repeatable(request) else 0
                time.sleep(pause(as_error(error, self._http.base_url), attempt, retries))
        raise AssertionError("pause raises after the last attempt")


class _LoopPool(NamedTuple):
    """Connections of one event loop, and places for those who use them."""

    http: httpx.AsyncClient
    slots: asyncio.Semaphore


class AsyncClient(RestCalls, Asynchronous):
    """The same client for asyncio; its calls are safe to cancel. Each event loop, and each process that was forked, has a pool of
    its own; `close` is for that of the loop that runs. Its calls return, once awaited, and raise what those of `Client` do."""

    def _open(self, **options: Any) -> None:
        self._options = options
        self._process = os.getpid()
        self._pools: dict[asyncio.AbstractEventLoop, _LoopPool] = {}
        self._unused = [self._new()]
        """For the loop that comes first: a client may be made where none runs."""

    def _new(self) -> _LoopPool:
        import asyncio  # as in `_sleep`

        return _LoopPool(new_http(httpx.AsyncClient, self._options), asyncio.Semaphore(AT_ONCE))

    def _pool(self) -> _LoopPool:
        import asyncio

        if self._process != (process := os.getpid()):  # the others are its parent's, which closes them
            self._pools, self._unused, self._process = {}, [], process
        loop = asyncio.get_running_loop()
        if (found := self._pools.get(loop)) is None:
            for other in list(self._pools):
                if other.is_closed():
                    self._pools.pop(other, None)
            found = self._pools[loop] = self._unused.pop() if self._unused else self._new()
        return found

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of the event loop that runs: no call in it after this."""
        await self._pool().http.aclose()

    async def sessions(self, **filters: Unpack[SessionFilters]) -> AsyncIterator[Session]:
        """As `Client.sessions`."""
        cursor: str | None = None
        while True:
            page = await self._whole_page(filters, cursor)
            for session in page.items:
                yield session
            if (cursor := page.next_cursor) is None:
                return

    async def _whole_page(self, filters: SessionFilters, cursor: str | None) -> SessionPage:
        for attempt in range(1, self._retries + 2):
            page: SessionPage = await self.session_page(**filters, cursor=cursor)
            if (error := not_given(page.unreadable)) is None:
                return page
            await _sleep(pause(error, attempt, self._retries))
        raise AssertionError("pause raises after the last attempt")

    async def turns(self, trial_id: str, *, start: int = 0) -> AsyncIterator[Turn]:
        """As `Client.turns`."""
        next_start: int | None = start
        while next_start is not None:
            page = await self.turn_page(trial_id, start=next_start)
            for turn in page.items:
                yield turn
            next_start = page.next_start

    async def events(self, trial_id: str, *, after: str | None = None) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """As `Client.events`."""
        lines = EventLines(after)
        failures = 0
        http = self._pool().http
        while not lines.ended:
            try:
                path, headers = session_path(trial_id, "events"), lines.headers()
                async with http.stream("GET", path, headers=headers, timeout=PATIENT) as response:
                    if not response.is_success:
                        await response.aread()
                    check(response)
                    async for piece in response.aiter_bytes():
                        for event in lines.read(piece):
                            failures = 0
                            yield event
                lines.check_end()
            except (httpx.TransportError, StenoError) as error:
                failures += 1
                await _sleep(pause(as_error(error, http.base_url), failures, self._retries))

    async def _send(self, request: ClientRequest[T]) -> T:
        http, slots = self._pool()
        lost = False  # as in `Client._send`
        for attempt in range(1, self._retries + 2):
            try:
                # One that the proxy may hold back takes no place: a hundred such must not keep a short one from its turn.
                async with contextlib.nullcontext() if request.patience_s else slots:
                    response = await http.send(build(http, request))
                return result(request, response)
            except (httpx.TransportError, StenoError) as error:
                if lost and was_removed(request, error):
                    return request.read(None)
                if without_newer(request, error):
                    return await self._send(request)
                lost = lost or may_be_done(error)
                retries = self._retries if repeatable(request) else 0
                await _sleep(pause(as_error(error, http.base_url), attempt, retries))
        raise AssertionError("pause raises after the last attempt")


def new_http(kind: type[H], options: Mapping[str, Any]) -> H:
    """Args: options: of httpx. Raises: ConfigError: names the variable that httpx reads in the environment and can't use."""
    verify = _verified(options)
    try:
        return kind(verify=verify, limits=NO_BOUND, **options)
    except (httpx.InvalidURL, ValueError, ImportError):
        for name, value in os.environ.items():
            if value and name.lower() in HTTP_PROXIES and (why := _refused(value)):
                raise ConfigError(f"{name}: {why}", field=name) from None
        for name in ("no_proxy", "NO_PROXY"):
            if os.environ.get(name):
                wanted = "must be names, addresses, HOST:PORT and ranges of IPv4, between commas"
                raise ConfigError(f"{name}: httpx can't read it: {wanted}", field=name) from None
        raise


def _refused(proxy: str) -> str:
    """Why httpx can't use this HTTP proxy, without its text, in which a password may be; empty: it can."""
    try:
        httpx.HTTPTransport(verify=False, proxy=proxy if "://" in proxy else f"http://{proxy}").close()
    except ImportError:
        return "got a SOCKS proxy, needs: pip install socksio"
    except (httpx.InvalidURL, ValueError):
        return "httpx can't read it: must be http(s)://HOST:PORT"
    return ""


def _verified(options: Mapping[str, Any]) -> ssl.SSLContext | bool:
    """What `https` is checked against. With a transport of the caller's own httpx checks nothing, and reads nothing for it.

    Raises: ConfigError."""
    if options["transport"] is not None:
        return True
    places = (os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    try:
        return _trusted(*places, *map(_changed_at, places))
    except OSError:
        if places[0] and (why := _unread(places[0])):
            wanted = f"got {places[0]!r}, must be a file of certificates (PEM): {why}"
            raise ConfigError(f"SSL_CERT_FILE: {wanted}", field="SSL_CERT_FILE") from None
        raise


def _unread(certificates: str) -> str:
    """Why they can't be read; empty: they can."""
    import ssl  # as httpx does, late

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificates)
    except OSError as error:
        return error.strerror or str(error)
    return ""


@lru_cache(maxsize=4)
def _trusted(*_read: str | int | None) -> ssl.SSLContext:
    """The trusted certificates, cached: to read them takes 35 ms, ten times what the rest of a client takes. Args: _read: paths
    that httpx reads, and when these changed: a client that is made after a change reads them again."""
    return httpx.create_ssl_context()


def _changed_at(path: str | None) -> int | None:
    try:
        return Path(path).stat().st_mtime_ns if path else None
    except OSError:
        return None


async def _sleep(seconds: float) -> None:
    import asyncio  # a sixth of what importing this module would take, and whoever awaits has it

    await asyncio.sleep(seconds)


# `sessions(**filters)` takes what `session_page` does, but for the cursor that it keeps itself.
for _class in (Client, AsyncClient):
    _method = _class.sessions
    _itself, *_ = signature(_method).parameters.values()
    _filters = [each for each in RestCalls.__dict__["session_page"].parameters() if each.name != "cursor"]
    show(_method, [_itself, *_filters], get_type_hints(_method)["return"])
