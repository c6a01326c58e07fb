"""`sft`: what was recorded is imitated, whatever it was rewarded with and whoever sampled it.

    loss = -logprob        at temperature 1

Supervised fine-tuning, as of InstructGPT, arXiv:2203.02155, 3.5, on completions alone: the context has no loss. A warm start from
records, through the same packing as everything else. There are no advantages, ratios or corrections.
"""

from __future__ import annotations

from steno_trainer.objective.terms import Terms, TokenLosses


def losses(terms: Terms) -> TokenLosses:
    return TokenLosses(-terms.logprobs_N, {"policy/nll": -terms.logprobs_N.detach()})
