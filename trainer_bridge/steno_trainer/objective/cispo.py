"""`cispo`: the ratio is a weight, which is cut; no token loses its gradient.

    loss = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprob        sg: no gradient

MiniMax-M1, arXiv:2506.13585, equations 4 and 5. There, as here by default, nothing is cut below (`clip_low` is 1). The paper does
not say its bound above; by default it is 5 here (`clip_high` is 4). `clip` drops tokens that were rare and became likelier fast,
after the first optimizer step already; here each of them is still learned from.
"""

from __future__ import annotations

from steno_trainer.objective.terms import Terms, TokenLosses


def losses(terms: Terms) -> TokenLosses:
    ratios_N = terms.ratios_N.detach()
    low, high = 1.0 - terms.clip_low, 1.0 + terms.clip_high
    metrics = {"policy/clip_high_fraction": ratios_N > high, "policy/clip_low_fraction": ratios_N < low}
    return TokenLosses(-ratios_N.clamp(low, high) * terms.advantages_N * terms.logprobs_N, metrics)
