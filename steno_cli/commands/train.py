"""`steno train`: one rank of a training run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steno_trainer.run_config import RunSettings


def train(settings: RunSettings) -> None:
    """Train a policy on the completed groups of a run, and push its weights to the workers after each step.

    One rank: start it alone, or on all of a node's GPUs with `torchrun --nproc-per-node 8 -m -- steno train …`, or with the
    deepspeed launcher. Started again with the same checkpoint folder it goes on where it was. Ctrl-C ends it after the step
    that runs, with a checkpoint.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for noisy in ("httpx", "DeepSpeed", "deepspeed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from steno_trainer.run.main import train as run

    run(settings)
