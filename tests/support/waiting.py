"""Waiting for what nothing announces: asked for again and again, with limits that a busy machine keeps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from steno.contracts.errors import StoreUnavailable

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")

PATIENCE_S = 60.0


async def until(condition: Callable[[], Any], within_s: float = PATIENCE_S) -> None:
    """Until the condition is true. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def insist(call: Callable[[], Awaitable[T]], within_s: float = PATIENCE_S) -> T:
    """What a call to a store returns once it is answered, as whoever keeps a turn says it again. Raises StoreUnavailable."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await call()
        except StoreUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


def own_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds for which this thread would have slept (`time.sleep`). Other threads of the process do sleep, and count for
    nothing: an earlier test may have left one."""
    slept: list[float] = []
    sleep, this = time.sleep, threading.get_ident()
    monkeypatch.setattr(time, "sleep", lambda s: slept.append(s) if threading.get_ident() == this else sleep(s))
    return slept
