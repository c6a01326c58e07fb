"""uvicorn's HTTP protocol, with seven things that it lacks with httptools.

1. The bytes of a request outside of its body are bounded: an endless URL, header or trailer would be kept whole, before any key
   is checked.
2. The time of a head is bounded: connections that send no request would add up until no file descriptor is left.
3. A request that offers an upgrade to another protocol than WebSocket keeps its body: the parser ends such a request with its
   head, but a server that ignores the offer must read it as if there were none (RFC 9110, 7.8).
4. A WebSocket request whose head the WebSocket parser refuses is ended: uvicorn leaves it open and silent for ever.
5. A closed connection is aborted if its client does not read the rest of the output.
6. An answer of unknown length to HTTP/1.0 has no chunks, which such clients do not know (RFC 9112, 6.1).
7. A disconnect is told to the request that is being answered: uvicorn tells only the last of the pipelined requests.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
"""The largest head of a request, and the largest trailers of a body; uvicorn has the same bound with its other parser. It is
checked once per read of the socket (256 KiB at most)."""


HEAD_S = 30.0
"""Seconds that a request's head may take, from the connection's first moment or the head's first byte. uvicorn itself closes
idle kept-alive connections."""
_OFFER = frozenset({b"upgrade", b"http2-settings"})


class WithoutUpgrades(HttpToolsProtocol):
    """Reads a request that offers an upgrade (`h2c`: Java's and curl's HTTP/2 clients do) as one that does not."""

    _offers = False

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as stopped:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._read_on(data[stopped.args[0] :])

    def on_headers_complete(self) -> Any:
        self._offers = self.parser.should_upgrade() and not self._should_upgrade()
        return None if self._offers else super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offers:
            super().on_message_complete()

    def _read_on(self, rest: bytes) -> None:
        """A parser that has seen an offer reads no further: a new one gets the head again, without it. rest: what came after."""
        version, method, headers = self.parser.get_http_version(), self.parser.get_method(), self.headers
        head = [method + b" " + self.url + b" HTTP/" + version.encode()]
        head += [name + b": " + _without_offer(name, value) for name, value in headers if name not in _OFFER]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*head, b"", rest]))


def _without_offer(name: bytes, value: bytes) -> bytes:
    if name != b"connection":
        return value
    kept = [token for token in value.split(b",") if token.strip().lower() not in _OFFER]
    return b",".join(kept) or b"keep-alive"


class EndsWithConnection:
    """The application's answer to HTTP/1.0. Where its length is unknown, its end is the connection's; a reset, if it is not whole
    (I3). Pure ASGI around the application, told which request of uvicorn's it answers."""

    def __init__(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._cycle = cycle
        self._app = app
        self._unknown = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, self._send)

    async def _send(self, message: Any) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            named = {name.lower() for name, _ in message.get("headers", ())}
            self._unknown = not named & {b"content-length", b"transfer-encoding"}
            if self._unknown:
                cycle.chunked_encoding = False
                self._reset_at_end(True)
        elif self._unknown:
            while cycle.flow.write_paused and not cycle.disconnected:
                await cycle.flow.drain()
            cycle.expected_content_length = len(message.get("body", b""))
            if not message.get("more_body", False):
                self._reset_at_end(False)
        await cycle.send(message)

    def _reset_at_end(self, reset: bool) -> None:
        connection = self._cycle.transport.get_extra_info("socket")
        if connection is not None and not self._cycle.disconnected:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))


class BoundedHttp(WithoutUpgrades):
    """Closes a connection that sends more than MAX_HEAD_BYTES without completing a head, a piece of a body or a message, and one
    whose head takes longer than `head_s`. Aborts a closed connection whose client reads nothing of the rest for `head_s`. One
    timer per connection checks both times, so that a request costs nothing more."""

    head_s = HEAD_S
    _quiet_bytes = 0
    _came = False
    _in_message = False
    _head_at: float | None = None
    _left_bytes: int | None = None
    _look: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_at = self.loop.time()
        self._look = self.loop.call_later(self.head_s, self._look_at_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_looking()
        answered = self._answered
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        is_old = cycle.scope["http_version"] < "1.1"
        super()._start_asgi_task(cycle, EndsWithConnection(cycle, app) if is_old else app)

    def handle_websocket_upgrade(self) -> None:
        self._stop_looking()
        super().handle_websocket_upgrade()
        upgraded: Any = self.transport.get_protocol()  # has read the head, all of it
        if not upgraded.handshake_initiated and not self.transport.is_closing():
            self.send_400_response("Invalid WebSocket request received.")

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _look_at_head(self) -> None:
        now = self.loop.time()
        since = now if self._head_at is None else self._head_at
        if now - since >= self.head_s:
            self.transport.close()
        if self.transport.is_closing():
            left_bytes = self.transport.get_write_buffer_size()
            if left_bytes == self._left_bytes:
                self.transport.abort()
                return
            self._left_bytes, since = left_bytes, now
        self._look = self.loop.call_at(since + self.head_s, self._look_at_head)

    def data_received(self, data: bytes) -> None:
        self._came = False
        super().data_received(data)
        if self._came:
            self._quiet_bytes = 0
            return
        if self._head_at is None and not self._in_message:
            self._head_at = self.loop.time()
        self._quiet_bytes += len(data)
        if self._quiet_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request is larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> Any:
        self._came = self._in_message = True
        self._head_at = None
        return super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._came = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._came = True
        self._in_message = False
        super().on_message_complete()
