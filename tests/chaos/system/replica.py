"""Runs a proxy as the suite needs its replicas: with a wall clock that jumps, and if asked for with something made wrong.

    python -m tests.chaos.system.replica JUMP_S MUTANT proxy --port 8000 …

SIGUSR2 moves the clock forward by JUMP_S, SIGUSR1 back to the true time. `time.time` is replaced before anything of Steno's is
imported; the monotonic clock, by which timers run, is left alone, as a real jump leaves it. MUTANT: one of
`chaos/mutants.py`, or `-`.
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
    jump_s, mutant = float(sys.argv[1]), sys.argv[2]
    time.time = _shifted
    signal.signal(signal.SIGUSR2, lambda *_: _set(jump_s))
    signal.signal(signal.SIGUSR1, lambda *_: _set(0.0))
    if mutant != "-":
        from tests.chaos.mutants import MUTANTS

        MUTANTS.get(mutant, lambda: None)()  # else it is one of the workers'
    sys.argv = ["steno", *sys.argv[3:]]
    runpy.run_module("steno", run_name="__main__", alter_sys=True)
