"""The parts of the check: what each looks at, and the bounds within which it is right."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_check.calls import Calls, Failed, OutOfTime
from benchmarks.gpu_check.verdict import Verdict, below, beyond, judged, not_possible
from steno.models import TINY

GIB = 2**30
STEP_BOUNDS = {"bfloat16": (0.05, 0.05, 0.98), "float32": (1e-3, 1e-3, 0.9999)}
"""Precision -> nats by which log-probabilities may differ on average, relative difference of the gradient's norm, least cosine of
gradients: to the step in float32 on the CPU. Nats as for a worker's probe (docs/trainer-operations.md)."""
SAMPLED_BOUNDS = {"bfloat16": 0.05, "float32": 1e-3}
"""Nats on average between what an engine recorded and what the trainer computes."""


@dataclass(frozen=True)
class Sizes:
    """path, shape: of the step that is compared. model, vocabulary, budget, lengths: of the steps that are timed. streams,
    tokens: that engines sample. elements: float32 values of a collective."""

    path: int
    shape: dict[str, int]
    model: str
    vocabulary: int
    budget: int
    lengths: tuple[int, ...]
    streams: int
    tokens: int
    elements: int


def _shape(vocabulary: int, hidden: int, layers: int) -> dict[str, int]:
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip


REAL = Sizes(1024, _shape(32768, 256, 4), "0.6b", 151936, 32768, (1024, 4096, 16384, 32768), 32, 256, 64 << 20)
SMALL = Sizes(96, _shape(512, 64, 2), "tiny", 4096, 256, (64, 256), 3, 16, 1 << 12)


@dataclass
class Check:
    """device: `cuda`, or `cpu` in a rehearsal. facts: what the process `facts` found. vllm: a Python."""

    calls: Calls
    device: str
    sizes: Sizes
    facts: dict[str, Any]
    vllm: str
    timed: dict[str, Any] | Failed | None = None

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def times(self) -> dict[str, Any]:
        """What `lengths` found; run once, for two parts."""
        if self.timed is None:
            sizes = self.sizes
            job = {
                "device": self.device, "model": str(self.calls.folder / "timed"), "shape": sizes.model,
                "vocabulary": sizes.vocabulary, "budget": sizes.budget, "lengths": sizes.lengths,
            }  # fmt: skip
            try:
                self.timed = self.calls("lengths", job)
            except Failed as error:
                self.timed = error
        if isinstance(self.timed, Failed):
            raise self.timed
        return self.timed


def kernel(check: Check) -> Verdict:
    """Fewer queries than keys: aligned to the lower right, forwards and backwards."""
    found = check.calls("facts", {"kernel": check.device})
    return judged(found, [] if found["aligned"] else [f"{found['kernel']} does not count keys from the end"])


def step(check: Check) -> Verdict:
    """A step on the device against the same in float32 on the CPU; on more than one GPU, also by all of them together."""
    kept = str(check.calls.folder / "reference.pt")
    job = {
        "model": str(check.calls.folder / "step"), "shape": check.sizes.shape, "path": check.sizes.path, "shared": "half",
        "vocabulary": check.sizes.shape["vocab_size"],
    }  # fmt: skip
    figures = {"reference": check.calls("one_step", {**job, "device": "cpu", "precision": "float32", "keep": kept})}
    ways = [("bfloat16", 1), ("float32", 1)] if check.cuda else [("bfloat16", 1)]
    ways += [("bfloat16", len(check.facts["gpus"]))] if len(check.facts["gpus"]) > 1 and check.cuda else []
    wrong = []
    for precision, ranks in ways:
        name = f"{precision}, {ranks} rank{'s' * (ranks > 1)}"
        given = {**job, "device": check.device, "precision": precision, "against": kept}
        found = figures[name] = check.calls("one_step", given, ranks=ranks)
        wrong += [] if found["shares"] else [f"{name}: the trainer does not let samples share tokens"]
        for what in ("against_reference", "once_against_whole"):
            wrong += [f"{name}, {what.replace('_', ' ')}: {one}" for one in off(found[what], precision)]
    return judged(figures, wrong)


def off(found: dict[str, Any], precision: str) -> list[str]:
    """What of a comparison (`one_step.compare`) is out of bounds."""
    nats, norm, cosine = STEP_BOUNDS[precision]
    return [
        *beyond("log-probabilities, nats on average", found["logprobs_mean"], nats),
        *beyond("gradient norm, relative", found["grad_norm_relative"], norm),
        *below("cosine of gradients", found["gradient_cosine"], cosine),
    ]


def engine(check: Check) -> Verdict:
    """The embedded engine's recorded log-probabilities against the trainer's."""
    return _sampled(check, {"engine": "transformers", "device": check.device}, ("float32", "bfloat16"))


def vllm(check: Check) -> Verdict:
    """vLLM's recorded log-probabilities against the trainer's."""
    asked = [check.vllm, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"]
    try:
        missing = subprocess.run(asked, capture_output=True, timeout=60, check=False).returncode
    except OSError as error:
        return not_possible(f"{check.vllm} can't be run: {error.strerror}")
    except subprocess.TimeoutExpired as error:
        return not_possible(f"{check.vllm} did not say in {error.timeout:.0f} s whether it has vLLM")
    if missing:
        return not_possible(f"{check.vllm} has no vLLM; --vllm names a Python that does")
    # bfloat16 as models are served; where there is no GPU, vLLM would compile for a minute.
    arguments: dict[str, Any] = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3}
    if not check.cuda:
        arguments = {"dtype": "float32", "enforce_eager": True}
    job = {"engine": "vllm", "device": check.device, "arguments": arguments}
    return _sampled(check, job, ("bfloat16",) if check.cuda else ("float32",), python=check.vllm)


def _sampled(check: Check, job: dict[str, Any], precisions: tuple[str, ...], **how: str) -> Verdict:
    kept = check.calls.folder / f"{job['engine']}.json"
    given = {**job, "model": str(TINY), "streams": check.sizes.streams, "tokens": check.sizes.tokens}
    sampled = check.calls("sampled", given, **how)
    kept.write_text(json.dumps(sampled))
    scored = check.calls("scored", {
        "records": str(kept), "model": str(TINY), "device": check.device, "precisions": precisions,
        "budget": check.sizes.budget,
    })  # fmt: skip
    records = sampled.pop("records")
    wrong = []
    for record in records:
        if len(record["ids"]) != check.sizes.tokens or len(record["logprobs"]) != check.sizes.tokens:
            wrong.append(
                f"{len(record['ids'])} ids, {len(record['logprobs'])} log-probabilities, not {check.sizes.tokens}"
            )
    for precision, found in scored.items():
        what = f"trainer in {precision}: nats on average"
        wrong += beyond(what, found["logprob_difference"], SAMPLED_BOUNDS[precision])
    return judged({**sampled, "trainer": scored}, wrong)


def memory(check: Check) -> Verdict:
    """What a step allocates against the estimate."""
    found = check.times()
    expected = found["estimated_bytes"]
    peaks = {name: row["peak_bytes"] for name, row in found["lengths"].items()}
    figures = {
        "estimated_bytes": expected, "estimate": found["estimate"], "parameters": found["parameters"],
        "budget_tokens": found["budget_tokens"], "peak_bytes": peaks,
        "reserved_bytes": {name: row["reserved_bytes"] for name, row in found["lengths"].items()},
    }  # fmt: skip
    if not check.cuda:
        return not_possible("on a CPU the peak is that of the whole process", figures)
    wrong = [
        f"{name}: {peak / GIB:.2f} GiB were allocated, {expected / GIB:.2f} GiB estimated"
        for name, peak in peaks.items()
        if not peak <= expected
    ]
    return judged(figures, wrong, f"{max(peaks.values()) / expected:.2f} of the estimate")


def speed(check: Check) -> Verdict:
    """Tokens a second and MFU by length; reported, not judged."""
    found = check.times()
    kept = ("sample_tokens", "computed_tokens", "train_s", "tokens_per_s", "mfu")
    figures = {
        "model": found["model"], "parameters": found["parameters"], "budget_tokens": found["budget_tokens"],
        "lengths": {name: {key: row[key] for key in kept} for name, row in found["lengths"].items()},
    }  # fmt: skip
    if check.cuda and any(row["mfu"] is None for row in found["lengths"].values()):
        return judged(figures, [], f"no MFU: the peak of {check.facts['gpus'][0]} is not known; set peak_tflops")
    return judged(figures, [])


def nccl(check: Check) -> Verdict:
    """Collectives over all GPUs."""
    ranks = len(check.facts["gpus"]) if check.cuda else 2
    found = check.calls("collectives", {"device": check.device, "elements": check.sizes.elements}, ranks=ranks)
    wrong = (
        [f"{found['wrong_ranks']} ranks got wrong answers, of: {', '.join(found['wrong'])}"]
        if found["wrong_ranks"]
        else []
    )
    if not wrong and ranks == 1:
        return not_possible("one GPU: NCCL takes one rank of each; a group of one rank answered rightly", found)
    return judged(found, wrong)


def _in_time(part: Callable[[Check], Verdict]) -> Callable[[Check], Verdict]:
    def look(check: Check) -> Verdict:
        try:
            return part(check)
        except OutOfTime as error:
            return not_possible(str(error))

    return look


PARTS: dict[str, Callable[[Check], Verdict]] = {
    part.__name__: _in_time(part) for part in (kernel, step, engine, memory, speed, nccl, vllm)
}
"""In the order in which they run."""
