"""What an objective is given of each token, and what it gives back.

An objective is one function: `losses(terms) -> TokenLosses`. It knows single tokens only. What a token weighs in the step
(`aggregation`), the correction for the sampler's other probabilities (`mismatch`), the KL to the reference and the entropy are
the same for all of them, and come after it (`loss`). What a teacher says of a token is in its advantage already.

Shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """Of N tokens, float [N] each, all finite; N may be 0.

    logprobs_N, ratios_N: of the current policy, with gradients; ratios_N to the proximal one, by token or by sequence
    (`ratios`). advantages_N, sampling_logprobs_N, proximal_logprobs_N: without gradients. clip_low, clip_high, dual_clip: the
    settings of these names.
    """

    logprobs_N: Tensor
    ratios_N: Tensor
    advantages_N: Tensor
    sampling_logprobs_N: Tensor
    proximal_logprobs_N: Tensor
    clip_low: float
    clip_high: float
    dual_clip: float


@dataclass(frozen=True)
class TokenLosses:
    """losses_N: what is to become small, with gradients. metrics: by names of `loss.MEANS`, bool or float [N]; what is not here
    is not measured."""

    losses_N: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


TokenObjective = Callable[[Terms], TokenLosses]
