"""torchrun that exits with 3 where another trainer has taken the run over; torchrun itself exits with 1 for every failure.

python -m steno_cli.torchrun --nproc-per-node 8 -m -- steno train …
"""

from __future__ import annotations

import os
import signal
import sys
import threading

ASKED_TO_END = 128 + signal.SIGTERM
"""The exit code on SIGTERM before there are ranks, as of a process that the signal itself ends."""


def main() -> None:
    """With torchrun's own arguments and PET_… variables. Raises: SystemExit(3); else what torchrun raises."""
    _heed_sigterm()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from steno_cli.terminal.output import EXIT_OTHER_TRAINER

    try:
        torchrun()
    except ChildFailedError as error:
        if any(failure.exitcode == EXIT_OTHER_TRAINER for failure in error.failures.values()):
            sys.exit(EXIT_OTHER_TRAINER)
        raise


def _heed_sigterm() -> None:
    """End on SIGTERM until torch sets its own handler, with the first ranks: before, nodes wait for each other for up to an hour.
    In a container this is process 1, which the system ends by no signal that it has no handler for. A thread hears of it
    too: the main one may be in torch's C++ code, which waits for the first node and lets Python call nothing meanwhile."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told)
    signal.signal(signal.SIGTERM, _end_at_once)
    threading.Thread(target=_listen, args=(heard,), daemon=True).start()


def _listen(heard: int) -> None:
    """heard: of a pipe, to which Python writes the number of each signal."""
    while number := os.read(heard, 1):
        if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _end_at_once:
            os._exit(ASKED_TO_END)


def _end_at_once(*_: object) -> None:
    os._exit(ASKED_TO_END)


if __name__ == "__main__":
    main()
