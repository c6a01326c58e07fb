"""Signals that a command takes while it runs, one part of it inside another. What was there before is put back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

_TAKEN: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, list[Callable[[], object]]]] = WeakKeyDictionary()
"""By loop and signal: the callbacks, the innermost last. A loop does not tell which callback it would call."""


@contextlib.contextmanager
def taken(call: Callable[[], object], *numbers: signal.Signals) -> Iterator[None]:
    """Have the running loop call `call` on these signals. Afterwards, the callback or handler from before is put back."""
    loop = asyncio.get_running_loop()
    by_signal = _TAKEN.setdefault(loop, {})
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        by_signal.setdefault(number, []).append(call)
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in numbers:
            callers = by_signal[number]
            callers.pop()
            if callers:
                loop.add_signal_handler(number, callers[-1])
            else:
                loop.remove_signal_handler(number)
                if (handler := before[number]) is not None:  # None: it is not Python's
                    signal.signal(number, handler)


@contextlib.contextmanager
def hangup_taken(call: Callable[[], object]) -> Iterator[None]:
    """Call `call` at the first SIGHUP, which a program gets when its terminal is closed; a shell may send a second one. From then
    on, output to the closed terminal is dropped, in place of an error. Does nothing where `nohup` has SIGHUP ignored."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        yield
        return
    terminals = [output for output in (1, 2) if os.isatty(output)]
    came = False

    def hung_up() -> None:
        nonlocal came
        if came:
            return
        came = True
        for output in terminals:
            is_gone = not os.isatty(output)  # it is there still where somebody sent the signal by hand
            if is_gone and not nowhere.closed:
                os.dup2(nowhere.fileno(), output)
        call()

    with Path(os.devnull).open("wb") as nowhere, taken(hung_up, signal.SIGHUP):
        yield
