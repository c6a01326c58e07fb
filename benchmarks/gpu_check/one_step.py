"""One ZeRO-3 step over a group that shares tokens: log-probabilities, loss and gradient, with each token once and with each
sample whole; and how far they are from what another process found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.calls import answer, job_of_this_process
from benchmarks.train_step import GROUP_BUDGET
from benchmarks.train_step_steno import batch
from steno_trainer.config import TrainerSettings
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.model.zero_engine import PolicyEngine
from steno_trainer.step.step import Stepper

Found = dict[str, Any]
"""loss, grad_norm, logprobs_N, gradients by name."""
RATE = 1e-12
"""So small that both steps are of the same weights."""


def make_model(folder: str, shape: dict[str, int]) -> None:
    """Random, with weights large enough that attention moves log-probabilities."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**shape, tie_word_embeddings=False, max_position_embeddings=32768, initializer_range=0.05)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def take(engine: PolicyEngine, job: dict[str, Any], share: bool) -> Found:
    gradients: dict[str, Tensor] = {}
    update = engine.update

    def watched(rate: float, *, skip: bool = False) -> float | None:
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in engine.lm.named_parameters():
            gradients[name] = safe_get_full_grad(parameter).float().cpu()
        return update(rate, skip=skip)

    engine.update = watched  # type: ignore[method-assign]
    shares, engine.shares = engine.shares, share
    report = Stepper(engine).step(batch(job) if engine.ranks.first else None)
    engine.update, engine.shares = update, shares  # type: ignore[method-assign]
    assert report.differences_N is not None
    return {
        "loss": report.metrics["loss"], "grad_norm": report.metrics["optimizer/grad_norm"],
        "logprobs_N": report.differences_N, "gradients": gradients,
        "computed_tokens": report.metrics["compute/unique_tokens"] + report.metrics["compute/repeated_tokens"],
    }  # fmt: skip


def compare(found: Found, other: Found) -> dict[str, Any]:
    """Nats per token; cosines of gradients, of all and of the tensor where it is least."""
    away_N = (found["logprobs_N"] - other["logprobs_N"]).abs()
    cosines = {name: _cosine(grad, other["gradients"][name]) for name, grad in found["gradients"].items()}
    least = min(cosines, key=lambda name: cosines[name])
    whole = [torch.cat([grad.flatten() for grad in one["gradients"].values()]) for one in (found, other)]
    return {
        "logprobs_mean": float(away_N.mean()), "logprobs_largest": float(away_N.max()),
        "grad_norm_relative": abs(found["grad_norm"] - other["grad_norm"]) / other["grad_norm"],
        "gradient_cosine": _cosine(*whole), "least_cosine": cosines[least], "least_cosine_of": least,
        "loss_difference": abs(found["loss"] - other["loss"]),
    }  # fmt: skip


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def main() -> None:
    job = job_of_this_process()
    ranks = Ranks.open(job["device"])
    if not Path(job["model"]).exists():
        make_model(job["model"], job["shape"])
    settings = TrainerSettings(
        model=job["model"], device=job["device"], precision=job["precision"], learning_rate=RATE, max_grad_norm=0.0,
        mismatch="off", annotate=True, micro_batch_tokens=GROUP_BUDGET * job["path"],
    )  # fmt: skip
    engine = PolicyEngine.open(settings, ranks)
    once, whole = take(engine, job, True), take(engine, job, False)
    found = {
        "precision": job["precision"], "device": job["device"], "ranks": ranks.size, "shares": engine.shares,
        "loss": once["loss"], "grad_norm": once["grad_norm"], "tokens": len(once["logprobs_N"]),
        "computed_tokens": [once["computed_tokens"], whole["computed_tokens"]], "once_against_whole": compare(once, whole),
    }  # fmt: skip
    if "against" in job:
        found["against_reference"] = compare(once, torch.load(job["against"], weights_only=True))
    if ranks.first:
        if "keep" in job:
            torch.save(once, job["keep"])
        answer(job, found)
    ranks.close()


if __name__ == "__main__":
    main()
