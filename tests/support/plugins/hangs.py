"""A test that takes too long is ended, whatever it waits in.

pytest-timeout raises in a signal's handler, which uvloop swallows; its other method ends the process, and xdist begins the file
again. So what runs in an event loop is cancelled instead: again and again, since a fixture's end may hang as well.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
from typing import Any

import pytest

AGAIN_S = 20.0


def end_after(seconds: float) -> None:
    """From now on, until `forget`."""
    signal.signal(signal.SIGALRM, _end)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)


def forget() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _end(*_: Any) -> None:
    faulthandler.dump_traceback(sys.__stderr__)
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop runs
        pytest.fail("took too long; its stack is in what was captured", pytrace=True)
    for task in tasks:
        task.print_stack(file=sys.__stderr__)
        task.cancel("the test took too long")
