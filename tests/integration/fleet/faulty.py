"""`steno`, but that the embedded engine fails at its Nth step of running sequences; half way there it waits until it has M.

python -m tests.integration.fleet.faulty N M worker …
"""

from __future__ import annotations

import sys
import time

from steno_cli.main import main
from steno_worker.engines.transformers.batch import RunningBatch


def arm(at: int, together: int) -> None:
    step, steps = RunningBatch.step, 0

    def fail(self: RunningBatch):  # type: ignore[no-untyped-def]
        nonlocal steps
        if steps >= at // 2 and len(self) < together:
            time.sleep(0.01)
            return []
        steps += self.running > 0
        if steps >= at:
            raise RuntimeError("the GPU has fallen off the bus")
        return step(self)

    RunningBatch.step = fail  # type: ignore[method-assign]


if __name__ == "__main__":
    arm(int(sys.argv.pop(1)), int(sys.argv.pop(1)))
    main()
