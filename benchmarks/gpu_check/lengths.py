"""Steps of one micro-batch, whose samples are longer and longer: tokens a second, MFU, memory beside its estimate."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.calls import answer, job_of_this_process
from benchmarks.train_step_steno import batch
from benchmarks.vllm_relay import make_model
from steno_trainer.config import TrainerSettings
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.model.memory_estimate import Machine, MemoryOptions, ModelShape, estimate
from steno_trainer.model.zero_engine import PolicyEngine
from steno_trainer.step.step import Stepper

STEPS = 3
"""The first is not counted."""


def cases(job: dict[str, Any]) -> list[tuple[str, int, dict[str, Any]]]:
    """(name, tokens of a sample, what `train_step_batch` makes of it). Half of each sample is trained; a group's share 60 %."""
    budget, vocabulary = job["budget"], job["vocabulary"]
    apart = [
        (
            str(length),
            length,
            {"prompt": length - length // 2, "completions": [length // 2] * (budget // length), "even": True},
        )
        for length in job["lengths"]
    ]
    path = budget // 8
    return [(name, n, {**made, "vocabulary": vocabulary}) for name, n, made in apart] + [
        ("group", path, {"path": path, "shared": "none", "vocabulary": vocabulary})
    ]


def measure(stepper: Stepper, made: dict[str, Any]) -> dict[str, Any]:
    fixed = batch(made) if stepper.ranks.first else None
    metrics = [stepper.step(fixed).metrics for _ in range(STEPS)][1:]
    names = ("time/train_s", "throughput/tokens_per_s", "throughput/mfu", "memory/peak_bytes")
    found = {name.split("/")[1]: _middle([one.get(name) for one in metrics]) for name in names}
    reserved = torch.cuda.max_memory_reserved() if stepper.ranks.device.type == "cuda" else None
    return found | {"reserved_bytes": reserved, "computed_tokens": metrics[0]["compute/unique_tokens"]}


def _middle(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def main() -> None:
    job = job_of_this_process()
    ranks = Ranks.open(job["device"])
    make_model(Path(job["model"]), job["shape"], job["vocabulary"])
    settings = TrainerSettings(
        model=job["model"], device=job["device"], precision="bfloat16", learning_rate=1e-6, mismatch="off",
        micro_batch_tokens=job["budget"],
    )  # fmt: skip
    engine = PolicyEngine.open(settings, ranks)
    stepper = Stepper(engine)
    shape = ModelShape.of(json.loads((Path(job["model"]) / "config.json").read_text()))
    expected = estimate(
        shape, Machine(gpus=ranks.size), MemoryOptions(chunk_tokens=settings.chunk_tokens), job["budget"]
    )
    rows = {name: {"sample_tokens": n, **measure(stepper, made)} for name, n, made in cases(job)}
    answer(job, {
        "model": job["shape"], "parameters": engine.parameters, "budget_tokens": job["budget"], "lengths": rows,
        "estimated_bytes": expected.gpu_total, "estimate": expected.gpu,
    })  # fmt: skip
    ranks.close()


if __name__ == "__main__":
    main()
