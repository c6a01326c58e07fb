"""torchrun that exits with 3 where another trainer has taken the run over; torchrun itself exits with 1 for every failure.

python -m steno_cli.torchrun --nproc-per-node 8 -m -- steno train …
"""

from __future__ import annotations

import sys

from steno_cli.terminal.output import EXIT_OTHER_TRAINER


def main() -> None:
    """With torchrun's own arguments and PET_… variables. Raises: SystemExit(3); else what torchrun raises."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun()
    except ChildFailedError as error:
        if any(failure.exitcode == EXIT_OTHER_TRAINER for failure in error.failures.values()):
            sys.exit(EXIT_OTHER_TRAINER)
        raise


if __name__ == "__main__":
    main()
