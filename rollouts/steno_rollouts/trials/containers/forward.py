"""The one way out of a trial's containers: a Unix socket, served here, from which requests below the trial's own path go to the
proxy. Anything else is a 403, also what the proxy would refuse for want of a key: the control plane, another trial.

One request for each connection (`connection: close` is put into its head), so that a head which was not looked at never follows.
A WebSocket is passed on too: until the proxy has answered 101, nothing that comes after its head is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import shutil
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

SOCKET = "s"
HEAD_BYTES = 65536
HEAD_S = 60.0
CONNECT_S = 15.0
ANSWER_S = 60.0
"""For the answer to a WebSocket's head, and for what a refusal says."""
_DROPPED = (b"host", b"connection", b"keep-alive", b"proxy-connection", b"upgrade")
_OF_BODIES = (b"content-length", b"transfer-encoding")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,9})\r\n", re.IGNORECASE)


class NotPassedOn(Exception):
    """Of a request: `status` and why."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class PassedOn:
    """The head of a request as the proxy gets it. opens_socket: it asks for a WebSocket."""

    head: bytes
    opens_socket: bool


class Route:
    """Which requests pass, and where to. url: a trial's address at the proxy, without a version: `http://proxy:8000/g.0`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.tls = parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.path = parts.path.rstrip("/")
        self.health = f"{self.path.rpartition('/')[0]}/healthz"
        self._netloc = parts.netloc.encode()

    def passed_on(self, head: bytes) -> PassedOn:
        """Raises: NotPassedOn."""
        first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        words = first.split(b" ")
        if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
            raise NotPassedOn("400 Bad Request", "not a request of HTTP/1.1")
        if any(b"\n" in line or b"\r" in line or b"\0" in line or line[:1] in b" \t" for line in (first, *lines)):
            raise NotPassedOn("400 Bad Request", "a header that is folded or broken")
        method, target = words[0], words[1].decode("latin-1")
        path = target.partition("?")[0]
        plain = unquote(unquote(path))
        is_health = method == b"GET" and path == self.health
        if not is_health and (
            not path.startswith(self.path + "/") or {".", ".."} & {*plain.replace("\\", "/").split("/")}
        ):
            raise NotPassedOn(
                "403 Forbidden", f"{path[:200]}: a trial reaches what is below {self.path}/ and nothing else"
            )
        headers = [(line.partition(b":")[0].strip().lower(), line) for line in lines]
        upgrades = [line.partition(b":")[2].strip().lower() for name, line in headers if name == b"upgrade"]
        opens_socket = method == b"GET" and not is_health and upgrades == [b"websocket"]
        if opens_socket and any(name in _OF_BODIES for name, _ in headers):
            raise NotPassedOn("400 Bad Request", "a WebSocket whose head has a body")
        asked = [b"connection: Upgrade", b"upgrade: websocket"] if opens_socket else [b"connection: close"]
        kept = [line for name, line in headers if name not in _DROPPED]
        return PassedOn(b"\r\n".join([first, b"host: " + self._netloc, *kept, *asked, b"", b""]), opens_socket)


class Forward:
    """Serves the socket while it is entered. Args: folder: made anew; holds the socket and nothing else. owner: may connect."""

    def __init__(self, folder: Path, route: Route, owner: tuple[int, int]) -> None:
        self.folder = folder
        self._route = route
        self._owner = owner
        self._connections: set[asyncio.Task[None]] = set()
        self.heard = asyncio.Event()
        """The forwarder has connected once, as it does when it listens."""

    async def __aenter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(self.folder, os.O_PATH)
        try:
            listening.bind(
                f"/proc/self/fd/{folder}/{SOCKET}"
            )  # a path of its own may be longer than the 108 bytes of an address
        finally:
            os.close(folder)
        (self.folder / SOCKET).chmod(0o600)
        if os.geteuid() == 0:
            for path in (self.folder, self.folder / SOCKET):  # the folder too: a umask of 077 leaves it to root alone
                os.chown(path, *self._owner)
        self._server = await asyncio.start_unix_server(self._connected, sock=listening, limit=HEAD_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.heard.set()
        try:
            await self._serve(reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # somebody hung up, or the trial has ended
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                asked = self._route.passed_on(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S))
            except asyncio.LimitOverrunError:
                raise NotPassedOn(
                    "431 Request Header Fields Too Large", f"more than {HEAD_BYTES} bytes of headers"
                ) from None
            onward, back = await self._connect()
        except TimeoutError:
            return
        except NotPassedOn as refused:
            body = json.dumps(
                {"error": {"message": str(refused), "type": "forwarder", "code": "not_passed_on"}}
            ).encode()
            writer.write(
                f"HTTP/1.1 {refused.status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
                "connection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
            return
        try:
            back.write(asked.head)
            if asked.opens_socket and not await _opened(onward, writer):
                return
            ways = [asyncio.create_task(_pump(reader, back)), asyncio.create_task(_pump(onward, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
        finally:
            back.close()

    @functools.cached_property
    def _trusted(self) -> ssl.SSLContext:
        """Certificates. To read them takes 30 ms, in which the event loop stands still: not again for each request."""
        return ssl.create_default_context()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        route = self._route
        try:
            opening = asyncio.open_connection(route.host, route.port, ssl=self._trusted if route.tls else None)
            return await asyncio.wait_for(opening, CONNECT_S)
        except OSError as error:  # TimeoutError among them
            why = error.strerror or str(error) or f"no answer in {CONNECT_S:g} s"
            raise NotPassedOn("502 Bad Gateway", f"can't connect to {route.origin}: {why}") from None


async def _opened(onward: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Pass on the answer to a WebSocket's head. Returns: whether it is one now; if not, the whole answer has been passed on."""
    with contextlib.suppress(TimeoutError, asyncio.LimitOverrunError):
        async with asyncio.timeout(ANSWER_S):
            head = await onward.readuntil(b"\r\n\r\n")
            writer.write(head)
            await writer.drain()
            if head.split(b" ", 2)[1:2] == [b"101"]:
                return True
            length = _LENGTH.search(head)
            writer.write(await onward.readexactly(min(int(length[1]), HEAD_BYTES)) if length else await onward.read())
            await writer.drain()
    return False


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
