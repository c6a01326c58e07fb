"""Runs a command of Steno's with a wall clock that jumps: SIGUSR2 moves it forward, SIGUSR1 back to the true time.

    python -m tests.chaos.clock JUMP_S proxy --port 8000 …

`time.time` is replaced before anything of Steno's is imported; the monotonic clock, by which timers run, is left alone, as a real
jump leaves it.
"""

from __future__ import annotations

import runpy
import signal
import sys
import time

_true_time = time.time
_shift_s = 0.0


def _shifted() -> float:
    return _true_time() + _shift_s


def _set(shift_s: float) -> None:
    global _shift_s
    _shift_s = shift_s


if __name__ == "__main__":
    jump_s = float(sys.argv[1])
    time.time = _shifted
    signal.signal(signal.SIGUSR2, lambda *_: _set(jump_s))
    signal.signal(signal.SIGUSR1, lambda *_: _set(0.0))
    sys.argv = ["steno", *sys.argv[2:]]
    runpy.run_module("steno", run_name="__main__", alter_sys=True)
