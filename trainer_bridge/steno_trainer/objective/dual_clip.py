"""`dual_clip`: `clip`, with a floor under tokens that are pushed down although they have become far likelier.

    g    = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    loss = -g              where A >= 0
    loss = -max(g, c A)    where A < 0, with c = dual_clip > 1

Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", arXiv:1912.09729, equation 5; c = 3 as
there and in verl (`clip_ratio_c`). `clip` bounds r from above for A > 0 alone: where A < 0 and r is large, its loss grows with r,
and so does its gradient. Beyond c there is none.
"""

from __future__ import annotations

import torch

from steno_trainer.objective import clip
from steno_trainer.objective.terms import Terms, TokenLosses


def losses(terms: Terms) -> TokenLosses:
    by_clip = clip.losses(terms)
    floor_N = -terms.dual_clip * terms.advantages_N
    down_N = terms.advantages_N < 0
    losses_N = torch.where(down_N, torch.minimum(by_clip.losses_N, floor_N), by_clip.losses_N)
    beyond_N = down_N & (terms.ratios_N > terms.dual_clip)
    return TokenLosses(losses_N, {**by_clip.metrics, "policy/dual_clip_fraction": beyond_N})
