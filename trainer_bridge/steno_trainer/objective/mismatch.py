"""Measures and corrects the mismatch between the probabilities of the sampling engine and those of the trainer.

Even with equal weights, other kernels, batch shapes and precisions give other log-probabilities; weights that have moved on since
give more. What was sampled from q (`sampling_logprobs`, recorded: I1) is corrected to the trainer's p by importance weights

    rho = p(token) / q(token) = exp(proximal_logprobs - sampling_logprobs)

which carry no gradient. A sequence may have one rho for all of its tokens:

    sequence    the product of theirs, exp(sum of log rho): the importance weight of all; far from 1 where they are many
    geometric   their geometric mean, exp(mean of log rho): how far the two are apart by token, however long it is

Where a sequence has one importance ratio (`ratios`), it has one rho in any case: a weight of each token's own would turn GSPO's
gradient into another one.

Shapes: N tokens. Positions outside the mask may hold anything, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from steno.contracts.errors import ConfigError
from steno_trainer.objective.ratios import MAX_LOG_RATIO, Sequences, sequence_means, sequence_sums


class Correction(StrEnum):
    """The weight of a token, from rho.

    OFF        1
    TRUNCATED  min(rho, high). Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); the
               truncation itself: Ionides, "Truncated Importance Sampling", JCGS 17(2), 2008
    MASKED     rho if low <= rho <= high, else 0: a token the two disagree about teaches nothing. IcePop, arXiv:2510.18855
    """

    OFF = "off"
    TRUNCATED = "truncated"
    MASKED = "masked"


class CorrectionLevel(StrEnum):
    """What has one rho: a token, or all that is trained of a sequence, by the product or by the mean of its tokens' (above). In
    verl `rollout_is: token | sequence` and `rollout_rs: geometric`; in TRL `token_truncate`, `sequence_mask`, …"""

    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


@dataclass(frozen=True)
class Mismatch:
    """low is read by MASKED only. Both dimensionless; `high` 2.0 as in verl and TRL, `low` its inverse. level: None: GEOMETRIC
    where there are sequences, else TOKEN."""

    correction: Correction = Correction.TRUNCATED
    low: float = 0.5
    high: float = 2.0
    level: CorrectionLevel | None = None

    def __post_init__(self) -> None:
        if self.correction is Correction.MASKED and not 0.0 <= self.low < self.high:
            raise ConfigError(
                f"mismatch bounds: got {self.low} and {self.high}, must be 0 <= low < high", field="mismatch"
            )


@dataclass(frozen=True)
class CorrectedWeights:
    """weights_N: float, 0 outside the mask. masked_N, truncated_N: tokens of the mask that the correction took out, or whose
    weight it cut. ratios_N: rho by token, 1 outside the mask. log_ratios_N: log rho by token as it is, not cut, 0 outside."""

    weights_N: Tensor
    masked_N: Tensor
    truncated_N: Tensor
    ratios_N: Tensor
    log_ratios_N: Tensor


def correct(
    settings: Mismatch, proximal_logprobs_N: Tensor, sampling_logprobs_N: Tensor, mask_N: Tensor,
    sequences: Sequences | None = None,
) -> CorrectedWeights:  # fmt: skip
    """Importance weights, detached. A collective of the ranks that share the micro-batch, given sequences.

    Args: mask_N: bool, the tokens to train. sequences: what has one weight; None: every token. Raises: ConfigError: a level of
    sequences, and there are none.
    """
    level = settings.level or (CorrectionLevel.TOKEN if sequences is None else CorrectionLevel.GEOMETRIC)
    difference_N = (proximal_logprobs_N - sampling_logprobs_N).detach()
    log_ratios_N = difference_N.masked_fill(~mask_N, 0.0)
    ratios_N = log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    rho_N = ratios_N
    if settings.correction is not Correction.OFF and level is not CorrectionLevel.TOKEN:
        if sequences is None:
            told = f"mismatch_level: got {level}, must be {CorrectionLevel.TOKEN}: the loss was given no sequences"
            raise ConfigError(told, field="mismatch_level")
        over = sequence_sums if level is CorrectionLevel.SEQUENCE else sequence_means
        log_rho_N = over(log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), sequences)
        rho_N = log_rho_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    kept_N, truncated_N = mask_N, torch.zeros_like(mask_N)
    match settings.correction:
        case Correction.OFF:
            weights_N = torch.ones_like(ratios_N)
        case Correction.TRUNCATED:
            weights_N = rho_N.clamp(max=settings.high)
            truncated_N = mask_N & (rho_N > settings.high)
        case Correction.MASKED:
            weights_N = rho_N
            kept_N = mask_N & (rho_N >= settings.low) & (rho_N <= settings.high)
        case _:
            told = f"mismatch.correction: got {settings.correction}, must be one of {', '.join(Correction)}"
            raise ConfigError(told, field="mismatch.correction")
    return CorrectedWeights(weights_N.masked_fill(~kept_N, 0.0), mask_N & ~kept_N, truncated_N, ratios_N, log_ratios_N)
