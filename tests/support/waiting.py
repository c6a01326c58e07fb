"""Waiting for what nothing announces: asked for again and again, with limits that a busy machine keeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from steno.contracts.errors import StoreUnavailable

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
