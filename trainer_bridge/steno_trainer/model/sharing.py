"""Whether samples of a micro-batch may share the tokens that they begin alike with: asked of the loaded model, and of the kernel.

A token that several samples share is computed once, and its keys and values are read by all of them. That is right where
nothing but attention carries anything from one token to a later one, and where attention with fewer queries than keys counts them
from the end. If either is not so, each sample is computed whole, as a trie without branches; nothing else changes.

Shapes: S tokens of all segments, K of all paths, H heads, D head size.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from steno_trainer.distributed.ranks import Ranks
from steno_trainer.model.attention import variable_lengths
from steno_trainer.model.coverage import BOUNDS, CONTEXT_TOKENS, SAMPLE_TOKENS, keeps_state, score_samples

log = logging.getLogger(__name__)

OWN, WHOLE = (3, 70, 1), (5, 200, 64)
"""Own tokens of three segments, and tokens of their paths: on both sides of the kernels' blocks of 64 and 128."""
KERNEL_BOUND = 0.05
"""Largest difference to float32 of outputs and gradients of size 1, in bfloat16; of a mask aligned to the left it is above 1."""


def why_not_shared(engine: Any, ranks: Ranks, *, name: str, precision: str, longest: int) -> str | None:
    """None: samples may share tokens. A collective: every rank makes two forward passes of up to 122 tokens, or none.

    Two samples that begin alike are scored as one trie, and the second again with a first one that it shares nothing with.

    Args: engine: DeepSpeed's, around a `PolicyModel` that was examined and whose samples may share a call. longest: tokens of the
        longest sample.
    """
    lm = engine.module.lm
    if keeps_state(lm):
        return "it has layers with a state (recurrent or convolutional)"
    one_kernel = ranks.device.type == "cuda" and precision != "float32"
    aligned = torch.tensor([0 if one_kernel and not aligned_to_the_end(ranks.device) else 1])
    if int(ranks.add(aligned)) < ranks.size:
        return "the attention kernel does not count keys from the end where there are fewer queries"
    stem = min(CONTEXT_TOKENS, longest // 2)
    if stem < 1:
        return f"samples are of {longest} token"
    generator = torch.Generator().manual_seed(1)
    lengths = (stem, min(CONTEXT_TOKENS, longest - stem), min(SAMPLE_TOKENS, longest - stem))
    begin, end, other_end = (
        torch.randint(int(lm.config.vocab_size), (n,), generator=generator).tolist() for n in lengths
    )
    sample = begin + other_end
    shared_M = score_samples(engine, ranks, [begin + end, sample], share=True)
    apart_M = score_samples(engine, ranks, [end, sample])
    found = float((shared_M - apart_M).abs().mean())
    if not found <= BOUNDS[precision][1]:
        return f"sharing changes log-probabilities, by {found:.2g} nats on average"
    log.debug("model %s: sharing changes log-probabilities by %.2g nats on average", name, found)
    return None


def aligned_to_the_end(
    device: torch.device, attend: Any = variable_lengths, dtype: torch.dtype = torch.bfloat16
) -> bool:
    """Whether a kernel for variable lengths sees, of more keys than queries, those up to each query's own, counted from the end;
    and its gradients too. attend: as `attention.variable_lengths`."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(sum(n), 2, 64, generator=generator) for n in (OWN, WHOLE, WHOLE)]
    weights_SHD = torch.randn(sum(OWN), 2, 64, generator=generator).to(device)
    starts, key_starts = (torch.tensor([0, *n]).cumsum(0).to(device, torch.int32) for n in (OWN, WHOLE))

    def results(of: torch.dtype, forward: Any) -> list[Tensor]:
        tensors = [tensor.to(device, of).requires_grad_() for tensor in given]
        out = forward(*tensors)
        (out.float() * weights_SHD).sum().backward()
        return [out.detach().float(), *(tensor.grad.float() for tensor in tensors if tensor.grad is not None)]

    ours = results(dtype, lambda q, k, v: attend(q, k, v, starts, key_starts, max(OWN), max(WHOLE), None, None))
    expected = results(torch.float32, _by_masks)
    return all(
        float((found - right).abs().max()) <= KERNEL_BOUND * max(1.0, float(right.abs().max()))
        for found, right in zip(ours, expected, strict=True)
    )


def _by_masks(query_SHD: Tensor, key_KHD: Tensor, value_KHD: Tensor) -> Tensor:
    parts = []
    given = ((query_SHD, OWN), (key_KHD, WHOLE), (value_KHD, WHOLE))
    cut = zip(*(torch.split(x.transpose(0, 1), list(lengths), 1) for x, lengths in given), strict=True)
    for (q, k, v), own, whole in zip(cut, OWN, WHOLE, strict=True):
        seen = torch.ones(own, whole, dtype=torch.bool, device=q.device).tril(whole - own)
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
    return torch.cat(parts, 1).transpose(0, 1)
