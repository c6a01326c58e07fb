"""`steno`, but that the first rank writes down each batch that it trains: `python -m …spy FOLDER train …`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from steno_trainer.run import main as run
from steno_trainer.step.step import Stepper, StepReport
from steno_trainer.step.step_plan import StepBatch


def watch(folder: Path) -> None:
    """FOLDER/batch-<step>.pickle: the rows and advantages of the step of that number."""
    run.POSTS_S = 300.0  # what is posted of the last steps is looked at
    step = Stepper.step

    def watched(self: Stepper, batch: StepBatch | None) -> StepReport:
        if batch is not None:
            (folder / f"batch-{self.steps_done + 1}.pickle").write_bytes(pickle.dumps(batch))
        return step(self, batch)

    Stepper.step = watched  # type: ignore[method-assign]


def main() -> None:
    watch(Path(sys.argv.pop(1)))
    from steno_cli.main import main as steno

    steno()


if __name__ == "__main__":
    main()
