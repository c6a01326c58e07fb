"""Why a Redis refuses a connection: the error that it sends before it is asked anything.

In protected mode, and with as many clients as it may have, it closes the connection at once. redis-py writes first, and only sees
that the connection broke.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from urllib.parse import urlsplit

from steno_proxy.config.redis_url import PORT, RedisUrl

WITHIN_S = 1.0
MOST_BYTES = 1024
ADVICE = {
    "DENIED": "give its default user a password (requirepass), and name that in redis_url",
    "ERR max number of clients": "raise its maxclients",
}


async def refusal(named: RedisUrl) -> str:
    """The error that one of these addresses sends, in one sentence, and what to do; "": none sends one within a second."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(WITHIN_S):
            for host, port in _addresses(named):
                said = await _first_words(host, port)
                if said.startswith("-"):
                    sentence = said[1:].partition("\r\n")[0].partition(". ")[0]
                    advice = next((advice for begins, advice in ADVICE.items() if sentence.startswith(begins)), "")
                    return f"{host}:{port} says {sentence!r}" + (f": {advice}" if advice else "")
    return ""


def _addresses(named: RedisUrl) -> Iterator[tuple[str, int]]:
    yield from named.nodes or named.sentinels
    parts = urlsplit(named.url)
    if parts.scheme == "redis" and parts.hostname:  # over TLS, and on a Unix socket, nothing can be heard so
        yield parts.hostname, parts.port or PORT


async def _first_words(host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        return (await reader.read(MOST_BYTES)).decode(errors="replace")
    finally:
        writer.close()
