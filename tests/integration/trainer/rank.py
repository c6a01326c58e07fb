"""One rank of a test's training run: `python -m tests.integration.trainer.rank FOLDER`, under torchrun or alone.

FOLDER/job.json: settings (of `TrainerSettings`); batches (arguments of `random_batch`, one step each); resume: from the newest
checkpoint, if there is one; save_after: steps after which there is one; die: [step, method of `Checkpoints` in which the first
rank is killed]; by_deepspeed: write checkpoints of format 2; forever: go on with the last batch; refused: [folder of checkpoints,
run] that must be refused before anything else; states: the optimizer's, after the checkpoint was read and at the end; gradients:
compare each pass's gradient with the float32 mean over ranks (`Gradients`); probe: so many tokens, of the weights as
they were loaded; pushed: what workers would be sent at the end, in this type; adapter_to: a folder for a push of the adapter
alone. The first rank writes result.pt: a report per step, and the last weights.
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

from steno_trainer.checkpoints import checkpoint, partitions
from steno_trainer.checkpoints.checkpoint import Checkpoints, RunState
from steno_trainer.config import TrainerSettings
from steno_trainer.data.ledger import Ledger
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.errors import BadCheckpoint
from steno_trainer.model.zero_engine import PolicyEngine
from steno_trainer.step.scoring import PolicyProbe
from steno_trainer.step.step import Stepper
from steno_trainer.weights.adapters import AdapterWeights, adapter_entry, weights_of
from steno_trainer.weights.files.copies import WeightsCopies
from steno_trainer.weights.probe import ProbeTolerance
from tests.integration.trainer.materials import random_batch


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    settings = TrainerSettings(**job["settings"])
    settings.check()
    ranks = Ranks.open("cpu", sequence_size=settings.sequence_parallel, collective_s=200.0, wait_s=200.0)
    stepper = Stepper(PolicyEngine.open(settings, ranks))
    checkpoints = Checkpoints(settings.checkpoint_dir, stepper, keep=settings.checkpoints_kept)
    refusals = [refusal(Path(root), run, stepper) for root, run in job.get("refused", [])]
    resumed = checkpoints.resume(job.get("run", "r")) if job.get("resume") else None
    run = resumed or RunState.of("r", VersionHistory((PolicyVersion("a", 0),)), Ledger(), set())
    tolerance = ProbeTolerance.of(settings.precision)
    probe = PolicyProbe(stepper.engine, tokens=job["probe"], tolerance=tolerance).make() if "probe" in job else None
    reports = []
    states = [whole_states(stepper.engine)] if job.get("states") and resumed else []
    gradients = Gradients(stepper.engine) if job.get("gradients") else None
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
            if job.get("by_deepspeed"):
                write_by_deepspeed()
            checkpoints.save(RunState.of("r", history, ledger, {f"g{report.step}"}))
            (folder / "saved").touch()
    weights = whole_weights(stepper.engine)
    pushed = whole_pushed(stepper.engine, job["pushed"]) if "pushed" in job else None
    if "adapter_to" in job:
        push_adapter(stepper.engine, Path(job["adapter_to"]))
    states += [whole_states(stepper.engine)] if job.get("states") else []
    if ranks.first:
        found = {"reports": reports, "weights": weights, "random": (random.random(), torch.rand(3)), "resumed": resumed}
        told = probe.model_dump_json() if probe is not None else None
        rest = {
            "ledger": ledger.to_bytes(),
            "probe": told,
            "gradients": gradients and gradients.found,
            "states": states,
            "refusals": refusals,
            "pushed": pushed,
            "takes": (stepper.engine.vocabulary, stepper.engine.context_tokens),
        }
        torch.save(found | rest, folder / "result.pt")
    ranks.barrier()
    ranks.close()


def refusal(root: Path, run: str, stepper: Stepper) -> str:
    """Why a folder's newest checkpoint is no one to go on from."""
    try:
        Checkpoints(root, stepper).resume(run)
    except BadCheckpoint as error:
        return error.message
    raise AssertionError(f"{root}: {run} went on from it")


def whole_states(engine: PolicyEngine) -> dict[str, list[Any]]:
    """Parameter that is trained -> float32 weight, both moments, and how many steps the optimizer counts."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer = engine.deepspeed.optimizer.optimizer
    [steps] = {float(state["step"]) for state in optimizer.state.values()}
    return {
        name: [safe_get_full_fp32_param(parameter).clone()]
        + [safe_get_full_optimizer_state(parameter, kind).clone() for kind in ("exp_avg", "exp_avg_sq")]
        + [torch.tensor(steps)]
        for name, parameter in engine.lm.named_parameters()
        if parameter.requires_grad
    }


def write_by_deepspeed() -> None:
    """As releases did before format 3."""
    checkpoint.FORMAT = checkpoint.BY_DEEPSPEED

    def save(engine: PolicyEngine, folder: Path) -> None:
        engine.deepspeed.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)

    partitions.save = save


class Gradients:
    """found: of each pass, parameter -> the gradient that the optimizer is about to use, and the float32 mean over ranks of the
    gradients that each of them computed, summed over micro-batches. Autograd's own, taken before DeepSpeed has them."""

    def __init__(self, engine: PolicyEngine) -> None:
        self.found: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []
        self._engine, self._update = engine, engine.update
        self._computed: dict[str, list[torch.Tensor]] = {}
        for name, parameter in engine.lm.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self._take(name, gradient))
        engine.update = self._compare  # type: ignore[method-assign]

    def _take(self, name: str, gradient: torch.Tensor) -> None:
        self._computed.setdefault(name, []).append(gradient.detach().clone())

    def _compare(self, rate: float, *, skip: bool = False) -> float | None:
        from deepspeed.utils import safe_get_full_grad

        pairs = {}
        for name, parameter in self._engine.lm.named_parameters():
            total = torch.zeros(parameter.ds_shape)  # type: ignore[attr-defined]
            for mine in self._computed[name]:
                assert mine.dtype is torch.bfloat16, name
                total += self._engine.ranks.add(mine.float() / self._engine.ranks.size)
            pairs[name] = (safe_get_full_grad(parameter).clone(), total)
        self.found.append(pairs)
        self._computed.clear()
        return self._update(rate, skip=skip)


def whole_weights(engine: PolicyEngine) -> dict[str, Any]:
    import deepspeed

    found = {}
    for name, parameter in engine.lm.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            found[name] = parameter.detach().clone()
    return found


def whole_pushed(engine: PolicyEngine, dtype: str) -> dict[str, torch.Tensor]:
    buckets = weights_of(engine.lm, getattr(torch, dtype)).buckets()
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.items()}


def push_adapter(engine: PolicyEngine, folder: Path) -> None:
    """As `steno train --push adapter` does."""
    entry = adapter_entry(engine.lm, Path(engine.settings.model)) if engine.ranks.first else None
    copies = WeightsCopies(folder, ranks=engine.ranks, adapter=entry)
    copies.write(PolicyVersion("run", 1), AdapterWeights(engine.lm))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
