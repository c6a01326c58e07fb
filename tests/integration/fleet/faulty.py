"""`steno`, but that the embedded engine fails at its Nth step of running sequences.

python -m tests.integration.fleet.faulty N worker …
"""

from __future__ import annotations

import sys

from inference_worker.engines.batch import Batch
from steno.cli import main


def arm(at: int) -> None:
    step, steps = Batch.step, 0

    def fail(self: Batch):  # type: ignore[no-untyped-def]
        nonlocal steps
        steps += self.running > 0
        if steps >= at:
            raise RuntimeError("the GPU has fallen off the bus")
        return step(self)

    Batch.step = fail  # type: ignore[method-assign]


if __name__ == "__main__":
    arm(int(sys.argv.pop(1)))
    main()
