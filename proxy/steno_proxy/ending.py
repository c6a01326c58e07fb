"""The end of tasks that go on until they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 1.0
"""How long a task that was cancelled has to end, until it is cancelled again."""


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel them, as often as it takes. Returns once all have ended; what they raised is theirs.

    `asyncio.wait_for` of Python 3.11 loses a cancellation that comes when what it waits for has just ended, and by it redis-py
    sends each command to a cluster, and to a primary that Sentinels name: one cancellation is not always enough there.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
