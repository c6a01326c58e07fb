"""Calls that may never return (a mount that hangs), in threads that can be left behind.

They are no executor's threads: the interpreter joins those at its end, and would wait for the mount. The worker has one thread
for weights (`steno_worker/weights/threads.py`), which runs every call; here are several threads, calls have deadlines, and a call
that nobody waits for any more is not begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


class DaemonThreads:
    """At most so many calls at a time, begun in the order in which they were told: with one thread, one is over before the next
    begins. A thread ends when nothing is left to do.

    Args: name: of the threads. most: how many; those that hang are counted.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._lock = threading.Lock()
        self._told: deque[Callable[[], None]] = deque()
        self._threads = 0

    async def do(self, within_s: float, work: Callable[..., T], *args: Any, late: bool = False) -> T:
        """Cancel-safe: as at the deadline.

        Args: late: begun also after the deadline, when nobody waits for it any more; else only what has begun goes on then.
        Raises: what the work raised; TimeoutError: it is not over within this time, or has not even begun.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if not done.done():
                if error is not None:
                    done.set_exception(error)
                else:
                    done.set_result(result)  # type: ignore[arg-type]  # the work's own
            elif error is not None:
                log.warning(
                    "an archive call failed after its caller stopped waiting: %s: %s", type(error).__name__, error
                )

        def run() -> None:
            result: T | None = None
            problem: BaseException | None = None
            try:
                result = work(*args)
            except BaseException as error:  # not lost: whoever waits gets it, or the log
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, result, problem)

        self._tell(run)
        try:
            await asyncio.wait({done}, timeout=within_s)
            if not done.done():
                raise TimeoutError(f"no answer within {round(within_s, 2):g} s; does its mount hang?")
            return done.result()
        finally:
            if done.cancel() and not late:
                self._take_back(run)

    def _tell(self, run: Callable[[], None]) -> None:
        with self._lock:
            self._told.append(run)
            if self._threads == self._most:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError:  # this machine gives no more
            with self._lock:
                self._threads -= 1
            self._take_back(run)
            raise

    def _take_back(self, run: Callable[[], None]) -> None:
        with self._lock, contextlib.suppress(ValueError):  # it has begun
            self._told.remove(run)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._told:
                    self._threads -= 1
                    return
                run = self._told.popleft()
            run()
