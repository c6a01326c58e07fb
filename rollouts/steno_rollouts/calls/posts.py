"""Posts about a trial, each run to its end: nothing else ends these trials, so a cancellation waits for the post."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_NAME = "steno-post"


@dataclass
class Stop:
    """Whether posts are told to end: they are then retried for half a minute at most. A post inside another shares it."""

    told: bool = False


_STOP: ContextVar[Stop | None] = ContextVar("steno-stop", default=None)


def told_to_stop() -> bool:
    """Whether the caller runs in a post that cancelled or failed rollouts wait for. It must then not retry for ever while the
    proxy is away."""
    stop = _STOP.get()
    return stop is not None and stop.told


def posted(post: Awaitable[T], stop: Stop) -> asyncio.Task[T]:
    """Begin it, in a task that `is_post` knows."""

    async def made() -> T:
        return await post

    context = copy_context()
    context.run(_STOP.set, stop)
    return asyncio.create_task(made(), name=_NAME, context=context)


def is_post(task: asyncio.Task[Any]) -> bool:
    return task.get_name() == _NAME


async def to_its_end(post: Awaitable[None], *, stopping: bool = False) -> None:
    """Run `post` to its end, even if cancelled meanwhile: CancelledError is raised after that. Raises: what `post` raises.

    Args: stopping: the rollouts are cancelled, or have failed, already."""
    stop = _STOP.get() or Stop()
    stop.told = stop.told or stopping
    task, cancelled = posted(post, stop), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = stop.told = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
