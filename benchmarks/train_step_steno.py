"""Steno's side of `train_step`: one process, ZeRO-3 of one rank. Prints one line of JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.train_step_batch import completions, forget_peak, peak
from steno_trainer.config import TrainerSettings
from steno_trainer.data.rows import TrainingRow
from steno_trainer.data.staleness import StalenessVerdict
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.model.zero_engine import PolicyEngine
from steno_trainer.step.step import Stepper, Work
from steno_trainer.step.step_plan import StepBatch, draw_up


def batch(job: dict[str, Any]) -> StepBatch:
    rows, advantages = [], {}
    for prompt, completion, trained, advantage, trial in completions(job):
        mask = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), trained])
        rows.append(
            TrainingRow(
                trial_id=f"t{trial}", group_id="g",
                token_ids_T=torch.cat([prompt, completion]), loss_mask_T=mask,
                sampling_logprobs_T=torch.where(mask, -10.0, torch.nan), temperatures_T=torch.ones(len(mask)),
                version_T=torch.where(mask, 0, -1), versions=("a/0",), verdict=StalenessVerdict(None),
            )
        )  # fmt: skip
        advantages[f"t{trial}"] = advantage
    return StepBatch(rows, advantages)


def main(job: dict[str, Any]) -> None:
    settings = TrainerSettings(
        model=job["model"], precision="float32", learning_rate=1e-6, max_grad_norm=1.0, mismatch="off",
        micro_batch_tokens=job["micro_batch_tokens"], chunk_tokens=job.get("chunk_tokens", 1024),
    )  # fmt: skip
    ranks = Ranks.open("cpu")
    engine = PolicyEngine.open(settings, ranks)
    engine.shares &= job.get("share", True)
    stepper = Stepper(engine)
    fixed = batch(job)
    norms, seconds, cpu, rest, metrics = [], [], [], 0, {}
    for number in range(job["steps"] + 1):
        if number == 1:
            rest = forget_peak()
        started, spent = time.perf_counter(), time.process_time()
        report = stepper.step(fixed)
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - spent)
        metrics = report.metrics
        norms.append(metrics["optimizer/grad_norm"])
    orders = draw_up(fixed, stepper._layout, seed="0")
    work = Work.of(orders, list(fixed.rows), engine.cost)
    found = {
        "unique_tokens": metrics["compute/unique_tokens"],
        "computed_tokens": work.tokens,
        "path_tokens": work.path_tokens,
        "flops": work.flops,
        "step_s": statistics.median(seconds[1:]),
        "cpu_s": statistics.median(cpu[1:]),
        "seconds": seconds,
        "grad_norms": norms,
    }
    print(json.dumps(found | {"rest_bytes": rest, "peak_bytes": peak()}), flush=True)
    ranks.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
