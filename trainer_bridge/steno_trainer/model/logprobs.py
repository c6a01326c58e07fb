"""Log-probabilities and entropies of given tokens, without the logits of all of them at once.

The head's weight times the hidden states is [tokens, vocabulary]: 32,768 tokens of a 152,064-word vocabulary are 20 GB in
float32, and autograd would keep several of them. Here the product is made chunk by chunk, and made again in the backward pass, so
that one chunk exists at a time and nothing of that shape is kept between the passes.

Shapes: N trained tokens, D hidden size, V vocabulary, C chunk of N.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from steno_trainer.errors import BadBatch


def token_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperatures_N: Tensor, chunks: int
) -> tuple[Tensor, Tensor]:
    """What the policy gives each target, and how undecided it is, at the temperature that the token was sampled at.

        z = (W h) / temperature;  logprob = z[target] - logsumexp(z);  entropy = logsumexp(z) - sum(softmax(z) z)

    The recorded log-probability is the engine's at its temperature, so the trainer's must be too, or their ratio compares two
    laws. Both results carry gradients to `hidden_ND` and `weight_VD`; not to the temperatures, and not twice.

    Precision: logits are made in the dtype of hidden and weight, as engines make them, then taken to float32 (float64 stays);
    the weight's gradient is summed over chunks in float32. Memory: C x V x 4 bytes a few times over, and V x D x 4 bytes in the
    backward pass. N may be 0 (a dummy micro-batch): the results are empty, their sum is 0 and its gradients are zeros.

    Args: hidden_ND: states at the positions *before* the targets. chunks: into how many parts N is cut, by the step's plan, at
        least 1; parts may be empty. temperatures_N: positive.
    Returns: logprobs_N, entropies_N in nats, float32 (float64 for float64 input).
    Raises: BadBatch: shapes that do not fit; a weight that ZeRO-3 has not gathered.
    """
    n = len(targets_N)
    if hidden_ND.shape[:1] != (n,) or temperatures_N.shape != (n,) or hidden_ND.ndim != 2:
        raise BadBatch(f"{n} targets, {tuple(hidden_ND.shape)} states, {tuple(temperatures_N.shape)} temperatures")
    if weight_VD.ndim != 2 or weight_VD.shape[1] != hidden_ND.shape[1]:
        raise BadBatch(
            f"a head of shape {tuple(weight_VD.shape)} for states of {hidden_ND.shape[1]}; under ZeRO-3 only the module that "
            "owns a weight sees it whole: use LogprobHead"
        )
    if chunks < 1:
        raise BadBatch(f"{chunks} chunks")
    logprobs_N, entropies_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, targets_N, temperatures_N, chunks
    )
    return logprobs_N, entropies_N


class LogprobHead(nn.Module):
    """`token_logprobs` as a module that owns the head's weight, in place of the model's own head (the same Parameter).

    ZeRO-3 gathers a weight around the calls of the module that owns it: so once for all chunks here, forward and backward, and as
    often on each rank as it calls this. Put it in place before `deepspeed.initialize`.
    """

    def __init__(self, weight_VD: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_VD

    def forward(
        self, hidden_ND: Tensor, targets_N: Tensor | None = None, temperatures_N: Tensor | None = None, chunks: int = 1
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Without temperatures: the logits [..., V], as the head in whose place it is. Without targets: the logits over their
        temperatures, [N, V] float32, and nothing: for a few tokens at most."""
        if temperatures_N is None:
            return hidden_ND @ self.weight.T
        if targets_N is None:
            return _logits(hidden_ND, self.weight, temperatures_N, torch.float32), hidden_ND.new_empty(0)
        return token_logprobs(hidden_ND, self.weight, targets_N, temperatures_N, chunks)


class _TokenLogprobs(torch.autograd.Function):
    # Not torch.utils.checkpoint around each chunk: it would call the head's module once more per chunk in the backward pass, each
    # a gather of the largest weight of the model, and its check of recomputed shapes trips over ZeRO-3's empty ones.

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperatures_N: Tensor, chunks: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs, entropies, normalisers = [], [], []
        for hidden_CD, targets_C, temperatures_C in _cut(chunks, hidden_ND, targets_N, temperatures_N):
            logits_CV = _logits(hidden_CD, weight_VD, temperatures_C, wide)
            normalisers_C = torch.logsumexp(logits_CV, dim=-1)
            logprobs.append(logits_CV.gather(-1, targets_C[:, None])[:, 0] - normalisers_C)
            p_CV = (logits_CV - normalisers_C[:, None]).exp_()
            entropies.append(normalisers_C - p_CV.mul_(logits_CV).sum(-1))
            normalisers.append(normalisers_C)
        entropies_N = torch.cat(entropies)
        ctx.chunks = chunks
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, temperatures_N, torch.cat(normalisers), entropies_N)
        return torch.cat(logprobs), entropies_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: Tensor | None, grad_entropies_N: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """d logprob / d z = [target] - p;  d entropy / d z = -p (log p + entropy);  d z = d(W h) / temperature."""
        hidden_ND, weight_VD, targets_N, temperatures_N, normalisers_N, entropies_N = ctx.saved_tensors
        wide = normalisers_N.dtype
        zeros_N = torch.zeros_like(normalisers_N)
        by_logprob_N = zeros_N if grad_logprobs_N is None else grad_logprobs_N
        by_entropy_N = zeros_N if grad_entropies_N is None else grad_entropies_N
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grads_hidden = []
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None
        parts = (hidden_ND, targets_N, temperatures_N, normalisers_N, entropies_N, by_logprob_N, by_entropy_N)
        for hidden_CD, targets_C, temperatures_C, normalisers_C, entropies_C, by_logprob_C, by_entropy_C in _cut(
            ctx.chunks, *parts
        ):
            logprobs_CV = _logits(hidden_CD, weight_VD, temperatures_C, wide).sub_(normalisers_C[:, None])
            p_CV = logprobs_CV.exp()
            if grad_entropies_N is not None:
                spread_CV = logprobs_CV.add_(entropies_C[:, None]).mul_(by_entropy_C[:, None])
                grad_CV = p_CV.mul_(spread_CV.add_(by_logprob_C[:, None]).neg_())
            else:
                grad_CV = p_CV.mul_(by_logprob_C.neg()[:, None])
            grad_CV.scatter_add_(-1, targets_C[:, None], by_logprob_C[:, None])
            # What no gradient reaches gives none, even if it is not a number: 0 x NaN would spoil the whole weight's.
            dead_C1 = ((by_logprob_C == 0) & (by_entropy_C == 0))[:, None]
            grad_CV.masked_fill_(dead_C1, 0.0)
            grad_narrow_CV = grad_CV.div_(temperatures_C.to(wide)[:, None]).to(weight_VD.dtype)
            if needs_hidden:
                grads_hidden.append(grad_narrow_CV @ weight_VD)
            if grad_weight_VD is not None:
                grad_weight_VD += grad_narrow_CV.T @ hidden_CD.masked_fill(dead_C1, 0.0)
        return (
            torch.cat(grads_hidden) if needs_hidden else None,
            grad_weight_VD.to(weight_VD.dtype) if grad_weight_VD is not None else None,
            None,
            None,
            None,
        )


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperatures_C: Tensor, wide: torch.dtype) -> Tensor:
    return (hidden_CD @ weight_VD.T).to(wide).div_(temperatures_C.to(wide)[:, None])


def _cut(chunks: int, *tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    """The tensors in equally many parts of nearly equal length."""
    return zip(*(tensor.tensor_split(chunks) for tensor in tensors), strict=True)
