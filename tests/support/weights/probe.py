"""A probe as a plain forward pass has it. The trainer's own goes through the packing and the head of a step (`PolicyProbe`)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steno.contracts.policy import Probe
from steno_trainer.weights.probe import ProbeTolerance, as_probe


def probe_ids(vocabulary: int, *, count: int = 24, seed: int = 0) -> list[int]:
    """Some ids below `vocabulary`, the same ones for the same arguments everywhere: for a model that can't draw any."""
    return random.Random(seed).choices(range(vocabulary), k=count)


@torch.no_grad()
def make_probe(module: nn.Module, token_ids: Sequence[int], *, tolerance: ProbeTolerance | None = None) -> Probe:
    """Of a plain module, or of one that ZeRO-3 has partitioned (a collective then, with the same ids on all ranks), in one pass.

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
