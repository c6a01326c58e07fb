"""What the trainer's own weights say of a few tokens: workers compare it with theirs before they say that they serve them (I10).

It sees weights in the wrong place (a layer left out, a tied head that kept its old values): whole units. It can't tell one step
from the next in bfloat16, where two correct engines differ by as much; the digests of the manifest can.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from proxy.contracts.policy import Probe
from trainer_bridge.errors import WeightsUnavailable

PROBE_TOKENS = 24
TOLERANCE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Nats, by the dtype that is computed in. Logits lie around 16, where bfloat16 has steps of 0.06 to 0.125, and two engines add up
in another order."""


def probe_ids(vocabulary: int, *, count: int = PROBE_TOKENS, seed: int = 0) -> list[int]:
    """Some ids below `vocabulary`, the same ones for the same arguments everywhere."""
    return random.Random(seed).choices(range(vocabulary), k=count)


def as_probe(token_ids: Sequence[int], logprobs: Sequence[float], tolerance: float) -> Probe:
    """Args: logprobs: of token_ids[1:]. Raises: WeightsUnavailable: log-probabilities that are no numbers."""
    if not all(map(math.isfinite, logprobs)):
        raise WeightsUnavailable("the model's log-probabilities of the probe are no numbers: such weights are not sent")
    return Probe(token_ids=list(token_ids), logprobs=list(logprobs), tolerance=tolerance)


@torch.no_grad()
def make_probe(module: nn.Module, token_ids: Sequence[int], *, tolerance: float | None = None) -> Probe:
    """Of a plain module, or of one that ZeRO-3 has partitioned (a collective then, with the same ids on all ranks), in one pass.
    The trainer's own goes through the packing and the head of a step: `scoring.make_policy_probe`.

    Args:
        module: maps ids int64 (1, T) to logits (1, T, V), bare or as the `logits` of what it returns.
        tolerance: nats; None: `TOLERANCE` of the module's dtype.
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
    return as_probe(token_ids, logprobs_T.tolist(), TOLERANCE[parameter.dtype] if tolerance is None else tolerance)
