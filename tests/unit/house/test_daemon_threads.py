"""Calls that may never return: who waits for one is told in time, and neither others nor the end of the process wait for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from steno_proxy.archive.daemon_threads import DaemonThreads
from tests.support.sources import ROOT, SOURCES
from tests.support.waiting import until

SHORT_S = 0.05


@pytest.fixture
def mount() -> Iterator[threading.Event]:
    """Calls wait for it until the test's end."""
    back = threading.Event()
    yield back
    back.set()


async def give_up(threads: DaemonThreads, work: Callable[[], Any]) -> None:
    """A call that has begun."""
    begun = threading.Event()

    def call() -> None:
        begun.set()
        work()

    task = asyncio.create_task(threads.do(600, call))
    await until(begun.is_set)
    task.cancel()
    await asyncio.wait({task}, timeout=60)
    assert task.cancelled()


async def test_what_a_call_returns_or_raises_is_its_callers() -> None:
    threads = DaemonThreads("t", 2)
    assert await threads.do(60, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.do(60, divmod, 7, 0)
    assert await asyncio.gather(*(threads.do(60, abs, -number) for number in range(100))) == list(range(100))
    await until(lambda: not threads._threads)


async def test_a_call_that_never_returns_is_given_up_and_others_go_on(mount: threading.Event) -> None:
    threads = DaemonThreads("t", 2)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s; does its mount hang\?"):
        await threads.do(SHORT_S, mount.wait)
    assert await threads.do(60, abs, -1) == 1
    assert threads._threads <= 2


async def test_where_all_hang_no_threads_are_added_and_what_has_not_begun_never_does(mount: threading.Event) -> None:
    threads, done = DaemonThreads("t", 2), list[int]()
    for _ in range(2):
        await give_up(threads, mount.wait)
    calls = [threads.do(SHORT_S, done.append, number) for number in range(10)]
    assert {type(found) for found in await asyncio.gather(*calls, return_exceptions=True)} == {TimeoutError}
    assert threads._threads == 2 and not threads._told
    mount.set()
    await until(lambda: not threads._threads)
    assert await threads.do(60, abs, -1) == 1 and done == []


async def test_one_thread_does_all_in_turn_and_what_is_to_be_done_late_too(mount: threading.Event) -> None:
    thread, done = DaemonThreads("t", 1), list[str]()

    def write() -> None:
        mount.wait()
        done.append("written")

    await give_up(thread, write)
    calls = [
        thread.do(SHORT_S, done.append, "given up"),
        thread.do(SHORT_S, done.append, "removed", late=True),
    ]
    assert {type(found) for found in await asyncio.gather(*calls, return_exceptions=True)} == {TimeoutError}
    mount.set()
    await thread.do(60, done.append, "next")
    assert done == ["written", "removed", "next"]


async def test_a_call_is_cancelled_at_once(mount: threading.Event) -> None:
    threads = DaemonThreads("t", 1)
    running = asyncio.create_task(threads.do(600, mount.wait))
    waiting = asyncio.create_task(threads.do(600, abs, -1))
    await until(lambda: threads._threads and len(threads._told) == 1)
    for task in (running, waiting):
        task.cancel()
    await asyncio.wait({running, waiting}, timeout=60)
    assert running.cancelled() and waiting.cancelled() and not threads._told


async def test_what_fails_when_nobody_waits_any_more_is_logged(
    mount: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    threads = DaemonThreads("t", 1)

    def fail() -> None:
        mount.wait()
        raise OSError("stale file handle")

    await give_up(threads, fail)
    mount.set()
    await until(lambda: "OSError: stale file handle" in caplog.text)


def test_a_process_ends_though_a_call_of_it_hangs() -> None:
    """Under asyncio.run, which waits for the threads of its executor, and the interpreter's own end, which does too."""
    program = (
        "import asyncio, threading\n"
        "from steno_proxy.archive.daemon_threads import DaemonThreads\n"
        "async def main():\n"
        "    try:\n"
        "        await DaemonThreads('t', 1).do(0.05, threading.Event().wait)\n"
        "    except TimeoutError:\n"
        "        print('given up')\n"
        "asyncio.run(main())\n"
    )
    command, env = [sys.executable, "-c", program], {"PYTHONPATH": SOURCES}
    ended = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "given up\n"), ended.stderr
