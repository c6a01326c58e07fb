"""Makes each Python process stand still at random moments, as on a busy machine: tests that depend on luck fail more often then.

    PYTHONPATH=tests/support/stalls STALLS=0.3,0.25 .venv/bin/python -m pytest tests/integration/rollouts

STALLS: seconds between two stalls (mean), and the longest stall. A thread holds the interpreter's lock meanwhile: all of the
process waits, and no processor time is used. Forks have a thread of their own.
"""

import ctypes
import os
import random
import threading
import time


def _stall(every_s: float, longest_s: float) -> None:
    chance = random.Random(os.urandom(8))
    hold = ctypes.PyDLL(None).usleep  # unlike CDLL, it keeps the lock
    while True:
        time.sleep(chance.expovariate(1 / every_s))
        hold(int(1e6 * longest_s * chance.random() ** 3))


def _start() -> None:
    every_s, longest_s = (float(number) for number in os.environ["STALLS"].split(","))
    threading.Thread(target=_stall, args=(every_s, longest_s), daemon=True, name="stalls").start()


if "STALLS" in os.environ:
    _start()
    os.register_at_fork(after_in_child=_start)
