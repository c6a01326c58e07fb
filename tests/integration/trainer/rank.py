"""One rank of a test's training run: `python -m tests.integration.trainer.rank FOLDER`, under torchrun or alone.

FOLDER/job.json: settings (of `TrainerSettings`), batches (arguments of `random_batch`, one step each). The first rank writes
result.pt: a report per step, and the weights after the last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.integration.trainer.materials import random_batch
from trainer_bridge.config import TrainerSettings
from trainer_bridge.engine import PolicyEngine
from trainer_bridge.ranks import Ranks
from trainer_bridge.step import Stepper


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    settings = TrainerSettings(**job["settings"])
    settings.check()
    ranks = Ranks.open("cpu", sequence_size=settings.sequence_parallel, collective_s=200.0, wait_s=200.0)
    stepper = Stepper(PolicyEngine.open(settings, ranks))
    reports = []
    for drawn in job["batches"]:
        report = stepper.step(random_batch(**drawn) if ranks.first else None)
        reports.append({"step": report.step, "metrics": report.metrics, "ledger": report.ledger.to_bytes()})
    weights = whole_weights(stepper.engine)
    if ranks.first:
        torch.save({"reports": reports, "weights": weights}, folder / "result.pt")
    ranks.barrier()
    ranks.close()


def whole_weights(engine: PolicyEngine) -> dict[str, Any]:
    import deepspeed

    found = {}
    for name, parameter in engine.lm.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            found[name] = parameter.detach().clone()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
