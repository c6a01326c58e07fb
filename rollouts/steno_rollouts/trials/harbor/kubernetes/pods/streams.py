"""A command in a pod, over a WebSocket: the first byte of each message names its stream (`v4.channel.k8s.io`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from .api import Api
from .errors import StreamBroken
from .shell import BOOT

STDIN, STDOUT, STDERR, STATUS = 0, 1, 2, 3
PIECE = 32 * 1024
"""Bytes in one message to a pod."""
MOST = 64 * 1024 * 1024
"""Bytes of a command's output that are kept, of each stream."""

Output = Callable[[int, bytes], Awaitable[None]]


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: bytes
    stderr: bytes


async def run(
    api: Api,
    pod: str,
    lines: bytes,
    *,
    source: AsyncIterator[bytes] | None = None,
    sink: Callable[[bytes], Any] | None = None,
    emit: Output | None = None,
) -> Ran:
    """Args: lines: as `shell.script` writes them. source: what the command reads after them. sink: takes stdout, which is not
    kept then. Raises: NotThere, ApiRefused, ApiUnavailable: nothing ran. StreamBroken: it may run on."""
    kept = {STDOUT: bytearray(), STDERR: bytearray()}
    socket = await api.exec(pod, ["sh", "-c", BOOT])
    feeding = asyncio.ensure_future(_feed(socket, lines, source))
    try:
        async for message in socket:
            if message.type not in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT) or not message.data:
                continue
            data = message.data if isinstance(message.data, bytes) else message.data.encode()
            stream, rest = data[0], data[1:]
            if stream == STATUS:
                return Ran(_code(json.loads(rest)), bytes(kept[STDOUT]), bytes(kept[STDERR]))
            if stream not in kept or not rest:
                continue
            if stream == STDOUT and sink is not None:
                sink(rest)
            else:
                kept[stream] += rest[: MOST - len(kept[stream])]
            if emit is not None:
                await emit(stream, rest)
    except (aiohttp.ClientError, OSError) as error:
        raise StreamBroken(f"the connection into pod {pod} broke: {error}") from None
    finally:
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, OSError):
            await feeding
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await socket.close()
    raise StreamBroken(
        f"the connection into pod {pod} ended before the command did: {socket.exception() or 'no status came'}"
    )


async def _feed(socket: Any, lines: bytes, source: AsyncIterator[bytes] | None) -> None:
    with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # the command has ended: its status says how
        for at in range(0, len(lines), PIECE):
            await socket.send_bytes(bytes([STDIN]) + lines[at : at + PIECE])
        async for piece in source or _nothing():
            await socket.send_bytes(bytes([STDIN]) + piece)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield


def _code(status: dict[str, Any]) -> int:
    """Raises: StreamBroken: the command could not be run, or what ran it failed."""
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise StreamBroken(f"a command could not be run: {status.get('message') or status}")
