"""The loss of recorded tokens: an objective, corrected for the rollout engine's other probabilities, with reference and entropy.

Per trained token, with A its advantage, w its weight from `aggregation`, m its mismatch weight from `mismatch`:

    r    = exp(logprobs - proximal_logprobs), by token; by sequence as `ratios` has it (GSPO)
    loss = w (  m L(r, A, logprobs)  +  reference_kl k3  -  entropy_bonus H  )
    A    = its trial's + distillation (reference_logprobs - start_logprobs), without a gradient
    k3   = exp(reference_logprobs - logprobs) - (reference_logprobs - logprobs) - 1

    L                   the objective: `clip` (PPO, DAPO), `dual_clip`, `cispo`, `sft`, or a user's
    proximal and behaviour policies apart: decoupled PPO, arXiv:2110.00641; AReaL, arXiv:2505.24298
    k3                  Schulman, "Approximating KL Divergence" (2020); as the term of GRPO, arXiv:2402.03300, equation 4
    A                   on-policy distillation: the gradient of KL(policy || reference), each token's own; Gu et al., MiniLLM,
                        arXiv:2306.08543, without what later tokens add; Lu et al., "On-Policy Distillation" (2025)

There are three policies: the sampler's (recorded), the proximal one (the trainer's at the start of the step), and the current
one. With one optimiser step per batch the last two are the same, r is 1 and only its gradient matters: leave `proximal` out.
Or the sampler's is the proximal one (`around_sampler`): r is to what was recorded, is clipped from the first optimiser step on,
and every m is 1. An objective that imitates asks for none of them: r and m are 1.
What a reference teaches is for the policy, not for the sampler: start_logprobs are the proximal ones, `around_sampler` the
current ones.

Shapes: N tokens. Results are sums that add up over micro-batches and ranks: weights are global, nothing is averaged here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steno.contracts.errors import ConfigError
from steno_trainer.errors import BadBatch
from steno_trainer.objective import clip
from steno_trainer.objective.mismatch import CorrectedWeights, Correction, Mismatch, correct
from steno_trainer.objective.ratios import MAX_LOG_RATIO, Sequences, importance_ratios
from steno_trainer.objective.terms import Terms, TokenObjective

MEANS = (
    "policy/ratio", "policy/clip_high_fraction", "policy/clip_low_fraction", "policy/kl", "policy/entropy", "reference/kl",
    "reference/log_ratio",
    "mismatch/kl", "mismatch/kl_k3", "mismatch/ratio", "mismatch/logprob_difference", "mismatch/truncated_fraction",
    "mismatch/masked_fraction", "policy/sequence_clip_high_fraction", "policy/sequence_clip_low_fraction",
    "policy/dual_clip_fraction", "policy/nll",
)  # fmt: skip
"""Names of `Loss.sums_M2`, in order. What each one means: docs/objective.md."""
CLIPPED = {
    "policy/sequence_clip_high_fraction": "policy/clip_high_fraction",
    "policy/sequence_clip_low_fraction": "policy/clip_low_fraction",
}
"""What is counted by sequence, where tokens share a ratio, and what it is by token."""
MAXIMA = ("policy/ratio_max", "mismatch/ratio_max")
"""Names of `Loss.maxima_X`, in order."""


@dataclass(frozen=True)
class Objective:
    """clip_low, clip_high: dimensionless (`ratios.CLIP`). reference_kl: weight of k3; distillation: of the log ratio to the
    reference in advantages; where both are 0.0 no reference is needed. entropy_bonus: weight of the entropy in nats.
    around_sampler: clip around the recorded probabilities; no `mismatch` then. losses: L. dual_clip: c of `dual_clip`.
    imitates: r and m are 1, whatever was sampled."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    mismatch: Mismatch = field(default_factory=Mismatch)
    reference_kl: float = 0.0
    distillation: float = 0.0
    entropy_bonus: float = 0.0
    around_sampler: bool = False
    losses: TokenObjective = clip.losses
    dual_clip: float = 3.0
    imitates: bool = False

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "reference_kl", "distillation"):
            if getattr(self, name) < 0.0:
                raise ConfigError(f"{name}: got {getattr(self, name)}, must be at least 0", field=name)


@dataclass(frozen=True)
class Tokens:
    """What is known of N tokens before the step. Outside the mask anything may stand, NaN included.

    weights_N: from `aggregation`. loss_mask_N: bool. proximal_logprobs_N, reference_logprobs_N: at the recorded temperature, None
    where there are none.
    """

    sampling_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    loss_mask_N: Tensor
    proximal_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """total: the sum over the mask of w x loss, with gradients; its graph is there even if nothing is trained.

    mismatch_masked_N: bool, tokens that the mismatch correction took out (ledger reason `mismatch`).
    sums_M2: float64 [len(MEANS), 2], sum and count of each metric; add them up over micro-batches and ranks.
    maxima_X: float64 [len(MAXIMA)], -inf without tokens; take the maximum. `means` makes scalars of both.
    """

    total: Tensor
    mismatch_masked_N: Tensor
    sums_M2: Tensor
    maxima_X: Tensor


def policy_loss(
    objective: Objective, tokens: Tokens, logprobs_N: Tensor, entropies_N: Tensor, sequences: Sequences | None = None,
    corrected_by: Sequences | None = None,
) -> Loss:  # fmt: skip
    """The step's loss on these tokens, as it adds to that of all others.

    Args: logprobs_N, entropies_N: the current policy's, from `logprobs.token_logprobs`. sequences: what has one ratio; None:
        every token. corrected_by: what has one weight of the mismatch, where that is something else.
    Raises: BadBatch: shapes that differ; no reference where one is needed.
    """
    mask_N = tokens.loss_mask_N
    _check_shapes(objective, tokens, logprobs_N, entropies_N)
    # Everything is cleaned before it is computed with: a NaN times a zero weight, or behind a where(), is a NaN in the gradient.
    logprobs_N = torch.where(mask_N, logprobs_N, 0.0)
    entropies_N = torch.where(mask_N, entropies_N, 0.0)
    advantages_N = torch.where(mask_N, tokens.advantages_N, 0.0)
    weights_N = torch.where(mask_N, tokens.weights_N, 0.0)
    sampling_N = torch.where(mask_N, tokens.sampling_logprobs_N, 0.0)
    given = tokens.sampling_logprobs_N if objective.around_sampler else tokens.proximal_logprobs_N
    if objective.imitates:
        given = None
    proximal_N = logprobs_N.detach() if given is None else torch.where(mask_N, given, 0.0)
    reference_N = None
    if tokens.reference_logprobs_N is not None:
        reference_N = torch.where(mask_N, tokens.reference_logprobs_N, 0.0)
        start_N = logprobs_N.detach() if objective.around_sampler else proximal_N
        advantages_N = advantages_N + objective.distillation * _cut(reference_N - start_N)

    uncorrected = objective.around_sampler or objective.imitates
    mismatch = Mismatch(Correction.OFF) if uncorrected else objective.mismatch
    corrected = correct(mismatch, proximal_N, sampling_N, mask_N, corrected_by or sequences)
    log_ratios_N = logprobs_N - proximal_N
    ratios_N = importance_ratios(log_ratios_N, sequences)
    found = objective.losses(
        Terms(
            logprobs_N, ratios_N, advantages_N, sampling_N, proximal_N, objective.clip_low, objective.clip_high,
            objective.dual_clip,
        )
    )  # fmt: skip
    losses_N = corrected.weights_N * found.losses_N
    to_reference: dict[str, Tensor] = {}
    if reference_N is not None:
        to_reference = {"reference/kl": _k3(reference_N - logprobs_N), "reference/log_ratio": logprobs_N - reference_N}
        losses_N = losses_N + objective.reference_kl * to_reference["reference/kl"]
    if objective.entropy_bonus:
        losses_N = losses_N - objective.entropy_bonus * entropies_N

    total = (weights_N * losses_N).sum()
    with torch.no_grad():
        measured: dict[str, Tensor] = {"policy/entropy": entropies_N, **found.metrics, **to_reference}
        if not objective.imitates:
            measured |= {"policy/ratio": ratios_N, "policy/kl": _k3(log_ratios_N)}
        if not uncorrected:  # else the ratio is to the sampler itself, or to nobody
            measured |= _of_mismatch(corrected)
        maxima_X = torch.stack([_maximum(measured.get(name.removesuffix("_max")), mask_N) for name in MAXIMA])
        return Loss(total, corrected.masked_N, _sums(measured, mask_N, sequences), maxima_X)


def _of_mismatch(corrected: CorrectedWeights) -> dict[str, Tensor]:
    return {
        "mismatch/kl": -corrected.log_ratios_N,
        "mismatch/kl_k3": _k3(corrected.log_ratios_N),
        "mismatch/ratio": corrected.ratios_N,
        "mismatch/logprob_difference": corrected.log_ratios_N.abs(),
        "mismatch/truncated_fraction": corrected.truncated_N,
        "mismatch/masked_fraction": corrected.masked_N,
    }


def _sums(measured: Mapping[str, Tensor], mask_N: Tensor, sequences: Sequences | None) -> Tensor:
    """Sum and count of each of `MEANS`. [M, 2]"""

    def one(name: str) -> Tensor:
        if name not in CLIPPED:
            return _sum_and_count(measured.get(name), mask_N)
        if sequences is None:
            return _sum_and_count(None, mask_N)
        # Each token stands for its part of a sequence, so that these add up over ranks that share one.
        return _sum_and_count(measured.get(CLIPPED[name]), mask_N, 1.0 / sequences.tokens_N.double())

    return torch.stack([one(name) for name in MEANS])


def means(sums_M2: Tensor, maxima_X: Tensor) -> dict[str, float]:
    """Scalars by name, from sums over all micro-batches and ranks. What nobody measured is absent (`reference/kl` without a
    reference; all, where no token was trained)."""
    found = {name: total / count for name, (total, count) in zip(MEANS, sums_M2.tolist(), strict=True) if count}
    maxima = {name: value for name, value in zip(MAXIMA, maxima_X.tolist(), strict=True) if value != -torch.inf}
    return found | maxima


def _k3(log_ratios_N: Tensor) -> Tensor:
    """exp(x) - x - 1: at least 0, and under q unbiased for KL(q || p) where x = log p - log q. Schulman (2020)."""
    cut_N = _cut(log_ratios_N)
    return torch.expm1(cut_N) - cut_N


def _cut(log_ratios_N: Tensor) -> Tensor:
    return log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sum_and_count(metric_N: Tensor | None, mask_N: Tensor, parts_N: Tensor | float = 1.0) -> Tensor:
    if metric_N is None:
        return torch.zeros(2, dtype=torch.float64, device=mask_N.device)
    # float64: a float32 sum over a million tokens would lose fractions below 1e-7 of it.
    counted_N = torch.where(mask_N, parts_N, 0.0).double()
    return torch.stack([(torch.where(mask_N, metric_N.double(), 0.0) * counted_N).sum(), counted_N.sum()])


def _maximum(metric_N: Tensor | None, mask_N: Tensor) -> Tensor:
    lowest = torch.full((1,), -torch.inf, dtype=torch.float64, device=mask_N.device)
    if metric_N is None:
        return lowest[0]
    return torch.cat([torch.where(mask_N, metric_N.double(), -torch.inf), lowest]).max()


def _check_shapes(objective: Objective, tokens: Tokens, *given: Tensor) -> None:
    known: Sequence[Tensor | None] = (
        tokens.sampling_logprobs_N, tokens.advantages_N, tokens.weights_N, tokens.proximal_logprobs_N,
        tokens.reference_logprobs_N, *given,
    )  # fmt: skip
    shapes = {tuple(tensor.shape) for tensor in known if tensor is not None}
    if shapes != {tuple(tokens.loss_mask_N.shape)} or tokens.loss_mask_N.dtype != torch.bool:
        raise BadBatch(f"a {tokens.loss_mask_N.dtype} mask of {tuple(tokens.loss_mask_N.shape)} over {sorted(shapes)}")
    for name in ("reference_kl", "distillation"):
        if getattr(objective, name) and tokens.reference_logprobs_N is None:
            raise BadBatch(f"{name} is set, but the batch has no reference log-probabilities")
