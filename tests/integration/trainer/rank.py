"""One rank of a test's training run: `python -m tests.integration.trainer.rank FOLDER`, under torchrun or alone.

FOLDER/job.json: settings (of `TrainerSettings`); batches (arguments of `random_batch`, one step each); resume: from the newest
checkpoint, if there is one; save_after: steps after which there is one; die: [step, method of `Checkpoints` in which the first
rank is killed]; forever: go on with the last batch; probe: so many tokens, of
the weights as they were loaded. The first rank writes result.pt: a report per step, and the last weights.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tests.integration.trainer.materials import random_batch
from trainer_bridge.checkpoint import Checkpoints, RunState
from trainer_bridge.config import TrainerSettings
from trainer_bridge.engine import PolicyEngine
from trainer_bridge.ledger import Ledger
from trainer_bridge.ranks import Ranks
from trainer_bridge.scoring import PolicyProbe
from trainer_bridge.staleness import History, Version
from trainer_bridge.step import Stepper
from trainer_bridge.weights.probe import Limits


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    settings = TrainerSettings(**job["settings"])
    settings.check()
    ranks = Ranks.open("cpu", sequence_size=settings.sequence_parallel, collective_s=200.0, wait_s=200.0)
    stepper = Stepper(PolicyEngine.open(settings, ranks))
    checkpoints = Checkpoints(settings.checkpoint_dir, stepper, keep=settings.checkpoints_kept)
    resumed = checkpoints.resume(job.get("run", "r")) if job.get("resume") else None
    run = resumed or RunState.of("r", History((Version("a", 0),)), Ledger(), set())
    limits = Limits.of(settings.precision)
    probe = PolicyProbe(stepper.engine, tokens=job["probe"], limits=limits).make() if "probe" in job else None
    reports = []
    ledger, history = run.read_ledger(), run.history
    batches = job["batches"][stepper.steps_done :]
    for drawn in itertools.chain(batches, itertools.repeat(job["batches"][-1]) if job.get("forever") else []):
        report = stepper.step(random_batch(**drawn) if ranks.first else None)
        said = {"step": report.step, "updated": report.updated, "poisoned": report.poisoned}
        reports.append({**said, "metrics": report.metrics, "ledger": report.ledger.to_bytes()})
        ledger.add(report.ledger)
        history = history.stepped()
        if job.get("die", [None])[0] == report.step and ranks.first:
            setattr(checkpoints, job["die"][1], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        if report.step in job.get("save_after", []):
            checkpoints.save(RunState.of("r", history, ledger, {f"g{report.step}"}))
            (folder / "saved").touch()
    weights = whole_weights(stepper.engine)
    if ranks.first:
        found = {"reports": reports, "weights": weights, "random": (random.random(), torch.rand(3)), "resumed": resumed}
        told = probe.model_dump_json() if probe is not None else None
        torch.save(found | {"ledger": ledger.to_bytes(), "probe": told}, folder / "result.pt")
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
