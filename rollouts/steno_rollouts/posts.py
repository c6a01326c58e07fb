"""What the proxy is told of a trial, to its end: nobody else ends these trials, so a cancellation has to wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")
_NAME = "steno-post"


def posted(post: Awaitable[T]) -> asyncio.Task[T]:
    """Begin it, in a task that `is_post` knows."""

    async def made() -> T:
        return await post

    return asyncio.create_task(made(), name=_NAME)


def is_post(task: asyncio.Task[Any]) -> bool:
    return task.get_name() == _NAME


async def to_its_end(post: Awaitable[None]) -> None:
    """However often this is cancelled meanwhile: then CancelledError is raised once it has ended. Raises: what it raises."""
    task, cancelled = posted(post), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
