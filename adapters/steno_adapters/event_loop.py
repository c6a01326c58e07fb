"""An event loop in a thread of its own, and tasks on it that other threads start, cancel and wait for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

log = logging.getLogger(__name__)


def started_loop() -> asyncio.AbstractEventLoop:
    """Until it is stopped, or the process ends: nothing waits for its thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_serve, args=(loop,), name="steno-rollouts", daemon=True).start()
    return loop


class LoopTask:
    """A coroutine on an event loop, for other threads.

    future: what came of it; cancelled, it cancels the coroutine. ended: nothing of it runs any more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]) -> None:
        self.future: Future[None] = Future()
        self.ended = threading.Event()
        loop.call_soon_threadsafe(self._begin, loop, coroutine)

    def _begin(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]) -> None:
        task = loop.create_task(coroutine)
        task.add_done_callback(self._over)
        # Also where it is cancelled by now. A task that has ended is not changed by that.
        self.future.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))

    def _over(self, task: asyncio.Task[None]) -> None:
        self.ended.set()
        if task.cancelled():
            self.future.cancel()
        if not self.future.set_running_or_notify_cancel():
            return
        if (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)

    def result(self) -> None:
        """Wait for its end, whatever it comes to. Raises: as the coroutine, or CancelledError (of `concurrent.futures`)."""
        try:
            self.future.result()
        except BaseException:
            self.future.cancel()
            self.ended.wait()
            raise


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped. A task that calls `sys.exit()` ends `run_forever`, and threads that wait for tasks would
    wait for ever: so the loop is run again, and they get the error."""
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            log.error("rollouts: %s on their event loop", error.__class__.__name__)
        else:
            return
