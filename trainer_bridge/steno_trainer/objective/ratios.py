"""Importance ratios of the current policy to the proximal one: one per token, or one for all tokens of a sequence.

With l = logprobs - proximal_logprobs, and n the trained tokens of a sequence:

    token      r = exp(l)                                          PPO, arXiv:1707.06347
    sequence   s = exp(sum of l over the sequence / n)             GSPO, arXiv:2507.18071, equation 7
               r = sg[s] exp(logprobs - sg[logprobs])              GSPO-token, equation 14

All tokens of a sequence have the same r then, so that they are clipped together, and each its own gradient: that of GSPO, since
they share their advantage (equations 11 and 18).

Shapes: N tokens, Q sequences of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are cut to +-20 before exp (as verl and TRL): e^20 is 5e8, and a float32 sum of such stays finite."""


class RatioLevel(StrEnum):
    """What has one ratio.

    TOKEN       a token
    COMPLETION  what the policy sampled in one turn, in one go
    SEQUENCE    all that is trained of a sample, a path through the conversation: what verl and TRL call a sequence
    """

    TOKEN = "token"
    COMPLETION = "completion"
    SEQUENCE = "sequence"


CLIP = {RatioLevel.TOKEN: (0.2, 0.28), RatioLevel.COMPLETION: (3e-4, 4e-4), RatioLevel.SEQUENCE: (3e-4, 4e-4)}
"""(clip_low, clip_high) where nothing is said: DAPO's, and those of GSPO, 5.1: a mean over a sequence moves less than a token."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of a micro-batch. Each is in one micro-batch whole; ranks may share it by tokens.

    index_N: int64, below count: which one a token is of. tokens_N: how many trained tokens that one has, at least 1, on all
    ranks that share the micro-batch. count: Q, the same on these. add: the sum over these of [Q]; a collective of theirs.
    """

    index_N: Tensor
    tokens_N: Tensor
    count: int
    add: Callable[[Tensor], Tensor] = lambda sums_Q: sums_Q


def importance_ratios(log_ratios_N: Tensor, sequences: Sequences | None) -> Tensor:
    """r, with its gradient. A collective of the ranks that share the micro-batch.

    Args: log_ratios_N: l, 0 where no token is trained. sequences: None: by token.
    """
    cut_N = log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if sequences is None:
        return cut_N.exp()
    return (sequence_means(cut_N, sequences) + (cut_N - cut_N.detach())).exp()


def sequence_means(values_N: Tensor, sequences: Sequences) -> Tensor:
    """At each token the mean over its sequence, without gradient. [N]. A collective of the ranks that share the micro-batch."""
    return (_sums(values_N, sequences) / sequences.tokens_N).to(values_N.dtype)


def sequence_sums(values_N: Tensor, sequences: Sequences) -> Tensor:
    """At each token the sum over its sequence, as `sequence_means`."""
    return _sums(values_N, sequences).to(values_N.dtype)


def _sums(values_N: Tensor, sequences: Sequences) -> Tensor:
    # float64: a mean over a hundred thousand tokens is compared with bounds of 3e-4.
    sums_Q = torch.zeros(sequences.count, dtype=torch.float64, device=values_N.device)
    return sequences.add(sums_Q.index_add(0, sequences.index_N, values_N.detach().double()))[sequences.index_N]
