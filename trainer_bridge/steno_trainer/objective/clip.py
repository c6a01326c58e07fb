"""`clip`: a token is pushed no further once its probability has moved by more than a bound, in the direction it is pushed.

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

PPO, arXiv:1707.06347, equation 7; two bounds: DAPO "clip-higher", arXiv:2503.14476, 3.1; r by sequence: GSPO, arXiv:2507.18071.
A token that is clipped has no gradient.
"""

from __future__ import annotations

import torch

from steno_trainer.objective.terms import Terms, TokenLosses


def losses(terms: Terms) -> TokenLosses:
    ratios_N, advantages_N = terms.ratios_N, terms.advantages_N
    clipped_N = ratios_N.clamp(1.0 - terms.clip_low, 1.0 + terms.clip_high)
    metrics = {
        "policy/clip_high_fraction": (advantages_N > 0) & (ratios_N > 1.0 + terms.clip_high),
        "policy/clip_low_fraction": (advantages_N < 0) & (ratios_N < 1.0 - terms.clip_low),
    }
    return TokenLosses(-torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N), metrics)
