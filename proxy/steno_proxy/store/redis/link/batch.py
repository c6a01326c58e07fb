"""Commands of concurrent callers share round trips: what is asked while LANES are under way leaves together with the next.

redis-py's bookkeeping for one call (a connection taken and given back, timeouts, retries, a wake-up) costs several times what its
commands do. Under load a batch holds those of many turns; a caller that is alone is sent at once. Order is kept within what one
caller submits, not between callers: nobody asks for the next thing before the first is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from steno.contracts.errors import StoreUnavailable
from steno_proxy.store.redis.link.patience import LoopTimeout
from steno_proxy.store.redis.link.wait import NotReplicated, ReplicaWait

Command = tuple[Any, ...]

LANES = 2
"""Round trips under way at once: one to be answered while the next is written."""
BATCH_COMMANDS = 256
BATCH_BYTES = 1 << 20
"""A batch is closed when it has grown to either: a megabyte is a few milliseconds of the server's time."""


class _WaitingCommands:
    """Commands of one caller, and who waits for their replies until `deadline` (loop time)."""

    __slots__ = ("commands", "deadline", "replies", "size")

    def __init__(self, commands: Sequence[Command], deadline: float, replies: asyncio.Future[list[Any]]) -> None:
        self.commands = commands
        self.size = sum(len(part) for command in commands for part in command if isinstance(part, bytes))
        self.deadline = deadline
        self.replies = replies


class Batches:
    """Sends the commands of several callers to Redis in one round trip.

    Args: client: of one server (a cluster's commands go to many). timeout_s: for a submission, from asking to reply. wait: for
    replicas, once per batch. patience: for one round trip.
    """

    def __init__(
        self,
        client: Any,
        timeout_s: float,
        wait: ReplicaWait | None = None,
        *,
        patience: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._client = client
        self._patience = patience
        self._timeout_s = timeout_s
        self._wait = wait
        self._waiting: deque[_WaitingCommands] = deque()
        self._lanes: set[asyncio.Task[None]] = set()

    async def submit(self, commands: Sequence[Command]) -> list[Any]:
        """The replies, in order. Cancel-safe: the commands may still be run.

        Raises: RedisError: that of the first command that the server refused; NotReplicated. TimeoutError, OSError.
        """
        loop = asyncio.get_running_loop()
        waiting = _WaitingCommands(commands, loop.time() + self._timeout_s, loop.create_future())
        self._waiting.append(waiting)
        if len(self._lanes) < LANES:
            self._lanes.add(loop.create_task(self._drain()))
        replies = await waiting.replies
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def close(self) -> None:
        """After the last submission was answered; whoever still waits is told."""
        for lane in list(self._lanes):
            lane.cancel()
        if self._lanes:
            await asyncio.wait(list(self._lanes))
        while self._waiting:
            _fail(self._waiting.popleft(), StoreUnavailable("the store was closed"))

    async def _drain(self) -> None:
        """One lane: batch after batch until nobody waits."""
        lane = asyncio.current_task()
        assert lane is not None
        try:
            while self._waiting:
                batch, commands, size = [], 0, 0
                while self._waiting and commands < BATCH_COMMANDS and size < BATCH_BYTES:
                    waiting = self._waiting.popleft()
                    if not waiting.replies.done():  # else its caller was cancelled
                        batch.append(waiting)
                        commands += len(waiting.commands)
                        size += waiting.size
                if batch:
                    await self._send(batch)
        finally:
            # In the step that saw nobody waiting, and not in a callback after it: whoever asks in between would wait for a lane
            # that has ended.
            self._lanes.discard(lane)

    async def _send(self, batch: list[_WaitingCommands]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for waiting in batch:
            for command in waiting.commands:
                pipe.execute_command(*command)
        for command in self._wait.commands() if self._wait else ():
            pipe.execute_command(*command)
        try:
            # The first has waited longest, so whoever is not in this batch has at least as long left after it. It is asked in any
            # case: what it has waited for were others, and not the server.
            left_s = batch[0].deadline - asyncio.get_running_loop().time()
            async with LoopTimeout(max(left_s, self._timeout_s / 8)), self._patience():
                replies = await pipe.execute(raise_on_error=False)
        except asyncio.CancelledError:
            for waiting in batch:
                _fail(waiting, StoreUnavailable("the store was closed"))
            raise
        except Exception as error:  # also uvloop's RuntimeError for a connection just closed: who waits is told
            for waiting in batch:
                _fail(waiting, another(error))
            return
        short = self._wait.short_of(replies) if self._wait else None
        at = 0
        for waiting in batch:
            theirs = replies[at : at + len(waiting.commands)]
            at += len(waiting.commands)
            if waiting.replies.done():
                continue
            if short is not None and not any(isinstance(reply, Exception) for reply in theirs):
                waiting.replies.set_exception(NotReplicated(*short.args))
            else:
                waiting.replies.set_result(theirs)


def _fail(waiting: _WaitingCommands, error: Exception) -> None:
    if not waiting.replies.done():
        waiting.replies.set_exception(error)


def another(error: Exception) -> Exception:
    """One like it, for one waiter: an exception that several raise grows by the traceback of each."""
    try:
        return copy.copy(error)
    except TypeError:  # it is not made of its `args`
        return error
