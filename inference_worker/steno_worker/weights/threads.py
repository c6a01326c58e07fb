"""Blocking work that may never return (a mount that hangs), in threads that can be left behind.

No executor is used: the interpreter joins an executor's threads before it ends, and would wait for the mount.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from steno.contracts.errors import WeightsRefused

logger = logging.getLogger(__name__)
T = TypeVar("T")


class DiskThread:
    """One thread that runs the work that it is given, in order; also work whose result is no longer awaited."""

    def __init__(self, name: str) -> None:
        self._told: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def runs(self) -> bool:
        """Until it has done what it was told before `close`."""
        return self._thread.is_alive()

    def do(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Queue `work` at once. Returns: a future of its result or error. If that is cancelled, the work still runs."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # the work's own

        def run() -> None:
            result: T | None = None
            problem: BaseException | None = None
            try:
                result = work(*args)
            except BaseException as error:  # not lost: whoever waits gets it
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, result, problem)

        self._told.put(run)
        return done

    def tell(self, work: Callable[[], object]) -> None:
        """Nobody waits for it; where it fails the log says so."""
        self._told.put(work)

    def close(self) -> None:
        """It ends once it has done what it was told. Returns at once. Idempotent."""
        self._told.put(None)

    def _run(self) -> None:
        while (work := self._told.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("work on a disk has failed")


def in_readers(work: Callable[[T], None], items: Sequence[T], most: int) -> None:
    """Run `work` once on each item, in at most `most` threads. Returns when all is done. Raises: the first error of `work`; no
    further item is begun after it."""
    left: queue.SimpleQueue[T] = queue.SimpleQueue()
    for item in items:
        left.put(item)
    problems: list[BaseException] = []

    def read() -> None:
        while not problems:
            try:
                item = left.get_nowait()
            except queue.Empty:
                return
            try:
                work(item)
            except BaseException as error:  # not lost: raised below
                problems.append(error)

    # Daemons, so that one that hangs holds up no end of the process.
    count = min(most, os.cpu_count() or 1, len(items))
    readers = [threading.Thread(target=read, name=f"shards-{number}", daemon=True) for number in range(count)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if problems:
        raise problems[0]


async def in_time(timeout_s: float, work: Callable[..., T], *args: Any) -> T:
    """Run `work` in a thread of its own, and return its result. Raises: what it raised; WeightsRefused: it did not return within
    `timeout_s`, and is left behind."""
    thread = DiskThread("steno-weights")
    try:
        async with asyncio.timeout(timeout_s):
            return await thread.do(work, *args)
    except TimeoutError as error:
        raise WeightsRefused(f"the weights could not be read within {timeout_s:g} s; does their mount hang?") from error
    finally:
        thread.close()
