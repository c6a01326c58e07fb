"""Runs an embedded worker in the proxy's event loop, for as long as the server runs.

The caller of `run` passes it in, so that the proxy imports no worker. It is told where workers dial on this machine and with
which key, and speaks to the proxy as any other would. When it ends by itself, the proxy stops, and `run` raises what it ended in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from steno.contracts.errors import ConfigError

log = logging.getLogger(__name__)
Beside = Callable[[str, str], Coroutine[Any, Any, None]]
"""(ws:// URL of this proxy, the workers' key or "") -> runs until it is cancelled."""


class EmbeddedWorker:
    """Args: on_end: called when it has ended by itself.

    Attributes: failure: what it ended with; None while it runs, or when it was told to stop.
    """

    def __init__(self, beside: Beside, on_end: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self._beside = beside
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None

    def start(self, host: str, port: int, key: str) -> None:
        self._task = asyncio.create_task(self._beside(f"ws://{_reachable(host)}:{port}", key), name="beside the proxy")
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Idempotent."""
        if self._task is not None and not self._task.done():
            self._task.remove_done_callback(self._ended)
            self._task.cancel()
            await asyncio.wait({self._task})

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.failure = ConfigError("the embedded worker was cancelled")
        else:
            self.failure = task.exception() or ConfigError("the embedded worker has ended")
        log.error("the proxy stops: %s", self.failure)
        self._on_end()


def _reachable(host: str) -> str:
    """An address to dial for one that is listened on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
