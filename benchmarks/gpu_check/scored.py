"""The trainer's log-probabilities of what an engine sampled, as a step computes them, beside those recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.calls import answer, job_of_this_process
from benchmarks.gpu_check.one_step import RATE
from steno_trainer.config import TrainerSettings
from steno_trainer.data.rows import TrainingRow
from steno_trainer.data.staleness import StalenessVerdict
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.model.zero_engine import PolicyEngine
from steno_trainer.step.step import Stepper
from steno_trainer.step.step_plan import StepBatch

METRICS = ("kl", "kl_k3", "logprob_difference", "ratio_max")


def row(number: int, record: dict[str, Any]) -> TrainingRow:
    before, ids = len(record["prompt"]), record["ids"]
    mask = torch.arange(before + len(ids)) >= before
    logprobs = torch.full((len(mask),), torch.nan)
    logprobs[before:] = torch.tensor(record["logprobs"])
    return TrainingRow(
        trial_id=f"t{number}", group_id="g", token_ids_T=torch.tensor(record["prompt"] + ids), loss_mask_T=mask,
        sampling_logprobs_T=logprobs, temperatures_T=torch.ones(len(mask)), version_T=torch.where(mask, 0, -1),
        versions=("base/0",), verdict=StalenessVerdict(None),
    )  # fmt: skip


def main() -> None:
    job = job_of_this_process()
    ranks = Ranks.open(job["device"])
    rows = [row(*pair) for pair in enumerate(json.loads(Path(job["records"]).read_text())["records"])]
    batch = StepBatch(rows, {row.trial_id: 1.0 for row in rows})
    found = {}
    for precision in job["precisions"]:
        settings = TrainerSettings(
            model=job["model"], device=job["device"], precision=precision, learning_rate=RATE, annotate=True,
            micro_batch_tokens=job["budget"],
        )  # fmt: skip
        report = Stepper(PolicyEngine.open(settings, ranks)).step(batch)
        assert report.differences_N is not None
        away_N = report.differences_N.abs()
        found[precision] = {name: report.metrics[f"mismatch/{name}"] for name in METRICS} | {
            "tokens": len(away_N), "percentile_90": float(away_N.quantile(0.9)), "largest": float(away_N.max()),
        }  # fmt: skip
    answer(job, found)
    ranks.close()


if __name__ == "__main__":
    main()
