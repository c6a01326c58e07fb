"""A batch in a thread of its own, and the way between it and asyncio.

One `call_soon_threadsafe` per step carries the tokens of all streams. What the loop wants of the batch is a function of it,
called between two steps. A failure in the thread is said once, and ends it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from steno.contracts.errors import EngineFailed, StenoError
from steno_worker.engines.transformers.batch import RunningBatch, Sequence
from steno_worker.interfaces import TokenStep

log = logging.getLogger(__name__)
T = TypeVar("T")
Steps = list[tuple[Sequence, TokenStep | StenoError]]


class BatchThread:
    """Every method is called in one event loop, the one that `start` was called in.

    Args: load: makes the batch, in the thread. threads: of torch. deliver, failed: called in the loop, with what a step made, or
        why the thread has ended by itself.

    Attributes:
        occupancy: (running, waiting, cached tokens) after the last step.
    """

    def __init__(
        self,
        load: Callable[[], RunningBatch],
        *,
        threads: int,
        deliver: Callable[[Steps], None],
        failed: Callable[[str], None],
    ) -> None:
        self.occupancy = (0, 0, 0)
        self._load = load
        self._threads = threads
        self._deliver = deliver
        self._failed = failed
        self._asked: set[asyncio.Future[Any]] = set()
        self._commands: list[Callable[[RunningBatch], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def runs(self) -> bool:
        return self._thread is not None and not self._stopping

    async def start(self) -> None:
        """Load the model. Raises: whatever `load` does."""
        self._loop = asyncio.get_running_loop()
        loaded: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(loaded,), name="steno-model", daemon=True)
        self._thread.start()
        await loaded

    async def stop(self) -> None:
        """End after the step that runs. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def tell(self, command: Callable[[RunningBatch], None]) -> None:
        """Have it done between two steps."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    async def ask(self, work: Callable[[RunningBatch], T]) -> T:
        """Run `work` on the batch between two steps, and return its result. Raises: ValueError: of `work`; EngineFailed: by
        `fail_waiting`."""
        assert self._loop is not None
        loop, done = self._loop, self._loop.create_future()

        def command(batch: RunningBatch) -> None:
            try:
                result = work(batch)
            except ValueError as error:
                loop.call_soon_threadsafe(_settle, done, error)
            else:
                loop.call_soon_threadsafe(_settle, done, None, result)

        self._asked.add(done)
        done.add_done_callback(self._asked.discard)
        self.tell(command)
        result: T = await done
        return result

    def fail_waiting(self, message: str) -> None:
        """Whoever waits for an answer gets none."""
        for asked in list(self._asked):
            _settle(asked, EngineFailed(message))

    # -- in the thread

    def _run(self, loaded: asyncio.Future[None]) -> None:
        assert self._loop is not None
        loop = self._loop
        try:
            torch.set_num_threads(self._threads)
            batch = self._load()
        except Exception as error:  # reported: start() raises it
            loop.call_soon_threadsafe(_settle, loaded, error)
            return
        loop.call_soon_threadsafe(_settle, loaded, None)
        try:
            while self._obey(batch):
                steps = batch.step()
                self.occupancy = (batch.running, batch.waiting, batch.cached_tokens)
                if steps:
                    loop.call_soon_threadsafe(self._deliver, steps)
        except Exception as error:  # reported: every request fails with it, and the engine is unhealthy from here on
            log.exception("the model thread failed")
            loop.call_soon_threadsafe(self._failed, f"{type(error).__name__}: {error}")

    def _obey(self, batch: RunningBatch) -> bool:
        """Carry out what was asked since the last step; sleep while there is nothing to compute. False: end."""
        with self._wake:
            while not self._commands and not self._stopping and not len(batch):
                self.occupancy = (0, 0, 0)
                self._wake.wait()
            if self._stopping:
                return False
            commands, self._commands = self._commands, []
        for command in commands:
            command(batch)
        return True


def _settle(future: asyncio.Future[Any], error: Exception | None, result: Any = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
