"""From per-token losses to one number: every aggregation mode as one weight per token, computed once for the whole step.

    loss of a step = sum over its trained tokens of weight x loss of the token

Since the weights know the whole step, this sum may be cut in any way (packing, ranks, micro-batches) and stays the same number.
Nothing after this divides by a count: where DeepSpeed averages over ranks and accumulation steps, the step undoes both.

All trained tokens of a trial weigh the same, so the weights are one number per sample; `loss_mask` says where it applies. The
denominators count what this step trains and, as in the papers, the trials of groups whose rewards are all equal: their advantages
are 0, so they are left out of the computation, but they were drawn. Without them, a token would weigh more the fewer groups say
something. Tokens that are masked later for their mismatch ratio stay in the denominators too: the weight belongs to the batch
that was drawn, not to what a correction leaves of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from steno.contracts.errors import ConfigError
from steno_trainer.errors import BadBatch


class Aggregation(StrEnum):
    """N: trained tokens of the step; R: rollouts (trials) with at least one, both with those of silent groups where these count;
    n: trained tokens of a token's rollout, over all its samples; C: a constant.

    TOKEN_MEAN    1 / N: every token alike, long rollouts count for more. DAPO, arXiv:2503.14476, equation 8
    ROLLOUT_MEAN  1 / (R n): every rollout alike. GRPO, arXiv:2402.03300, equation 3
    CONSTANT      1 / (R C): every token alike whatever else is in the batch; C is usually the longest completion allowed.
                  Dr. GRPO, arXiv:2503.20783, 3.2
    """

    TOKEN_MEAN = "token_mean"
    ROLLOUT_MEAN = "rollout_mean"
    CONSTANT = "constant"


@dataclass(frozen=True)
class SampleShare:
    """What one sample trains of its trial."""

    trial_id: str
    trained_tokens: int


@dataclass(frozen=True)
class SilentTotals:
    """Trained tokens and trials of groups whose rewards are all equal: only the denominators count them. Fractions of either,
    where mini-batches share them."""

    tokens: float = 0.0
    trials: float = 0.0

    @classmethod
    def of(cls, parts: Sequence[SampleShare]) -> SilentTotals:
        return cls(sum(part.trained_tokens for part in parts), len({p.trial_id for p in parts if p.trained_tokens}))

    def share(self, count: int) -> SilentTotals:
        return SilentTotals(self.tokens / count, self.trials / count)


def token_weights(
    parts: Sequence[SampleShare],
    mode: Aggregation,
    constant_tokens: int | None = None,
    silent: SilentTotals = SilentTotals(),
) -> list[float]:
    """The weight of each trained token of each sample, in the order of `parts`. Dimensionless.

    The samples of a trial share what their trial weighs: a trial that forked into ten samples weighs what it would as one (a
    token that several of them have in common is trained in one of them only, see `Sample`). The weights times the trained
    tokens, those of silent groups included, sum to 1, and with CONSTANT to N / (R C).

    Args: parts: every sample of the step, on all ranks. constant_tokens: C, for CONSTANT only.
    Returns: 0.0 where a sample trains nothing.
    Raises: ConfigError: CONSTANT without its constant, or one that is not positive; a constant for another mode.
        BadBatch: a negative count.
    """
    needed = mode is Aggregation.CONSTANT
    if needed != (constant_tokens is not None) or (constant_tokens is not None and constant_tokens < 1):
        raise ConfigError(f"{mode}: constant_tokens is {constant_tokens}", field="constant_tokens")
    by_trial: Counter[str] = Counter()
    for part in parts:
        if part.trained_tokens < 0:
            raise BadBatch(f"trial {part.trial_id}: {part.trained_tokens} trained tokens")
        by_trial[part.trial_id] += part.trained_tokens
    total = sum(by_trial.values()) + silent.tokens
    rollouts = sum(1 for tokens in by_trial.values() if tokens) + silent.trials

    def weight(part: SampleShare) -> float:
        if not part.trained_tokens:
            return 0.0
        match mode:
            case Aggregation.TOKEN_MEAN:
                return 1.0 / total
            case Aggregation.ROLLOUT_MEAN:
                return 1.0 / (rollouts * by_trial[part.trial_id])
            case Aggregation.CONSTANT:
                return 1.0 / (rollouts * (constant_tokens or math.nan))
        raise ConfigError(f"unknown aggregation: {mode}", field="aggregation")

    return [weight(part) for part in parts]
