"""The probe: log-probabilities of a few tokens under the trainer's weights. Workers compare theirs before they announce a version
(I10).

It sees weights in the wrong place (a layer left out, a tied head that kept its old values). It can't tell one step from the next
in bfloat16, where two correct engines differ by as much; the digests of the manifest can.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from steno.contracts.policy import Probe
from steno_trainer.errors import WeightsUnavailable

PROBE_TOKENS = 24
LARGEST = {"float32": 0.02, "bfloat16": 1.0}
"""Nats, by the least precision that is computed in or sent in. Measured: docs/adr/0015-what-a-probe-lets-pass.md."""
P90, MEAN = 0.15, 0.05
"""Of the largest."""


@dataclass(frozen=True, slots=True)
class ProbeTolerance:
    """What two correct engines may differ by, in nats: at one token, at nine tenths of them, on average."""

    largest: float
    p90: float
    mean: float

    @classmethod
    def of(cls, precision: str, tolerance: float | None = None) -> ProbeTolerance:
        """Args: precision: "bfloat16" or "float32". tolerance: the largest that is asked for. One above the default raises the
        other two with it; one below leaves them, since it says nothing of them."""
        default = LARGEST[precision]
        widest = max(default, tolerance or default)
        return cls(tolerance or default, P90 * widest, MEAN * widest)


def probe_ids(vocabulary: int, *, count: int = PROBE_TOKENS, seed: int = 0) -> list[int]:
    """Some ids below `vocabulary`, the same ones for the same arguments everywhere: for a model that can't draw any."""
    return random.Random(seed).choices(range(vocabulary), k=count)


def as_probe(token_ids: Sequence[int], logprobs: Sequence[float], tolerance: ProbeTolerance) -> Probe:
    """Args: logprobs: of token_ids[1:]. Raises: WeightsUnavailable: log-probabilities that are no numbers."""
    if not all(map(math.isfinite, logprobs)):
        raise WeightsUnavailable(
            "the model's log-probabilities of the probe are NaN or infinite: the weights are not sent"
        )
    return Probe(
        token_ids=list(token_ids), logprobs=list(logprobs), tolerance=tolerance.largest, p90_tolerance=tolerance.p90,
        mean_tolerance=tolerance.mean,
    )  # fmt: skip


@torch.no_grad()
def make_probe(module: nn.Module, token_ids: Sequence[int], *, tolerance: ProbeTolerance | None = None) -> Probe:
    """Of a plain module, or of one that ZeRO-3 has partitioned (a collective then, with the same ids on all ranks), in one pass.
    The trainer's own goes through the packing and the head of a step: `scoring.PolicyProbe`.

    Args:
        module: maps ids int64 (1, T) to logits (1, T, V), bare or as the `logits` of what it returns.
        tolerance: None: those of the module's dtype.
    Returns: the probe, on all ranks. Raises: WeightsUnavailable: log-probabilities that are no numbers.
    """
    parameter = next(module.parameters())
    ids_1T = torch.tensor([list(token_ids)], device=parameter.device)
    was_training = module.training
    module.eval()
    try:
        out = module(ids_1T)
    finally:
        module.train(was_training)
    logits_TV: Tensor = getattr(out, "logits", out)[0, :-1].float()
    logprobs_T = torch.log_softmax(logits_TV, dim=-1).gather(-1, ids_1T[0, 1:, None])[:, 0].cpu()
    precision = "float32" if parameter.dtype is torch.float32 else "bfloat16"
    return as_probe(token_ids, logprobs_T.tolist(), tolerance or ProbeTolerance.of(precision))
