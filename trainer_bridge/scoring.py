"""What the policy says of given tokens, on all ranks together: the probe that workers compare with before they serve weights
(I10).

Through the same packing, head and ranks as a step, so that it also sees what a step would see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proxy.contracts.policy import Probe
from trainer_bridge.batch import all_trained
from trainer_bridge.collate import collate
from trainer_bridge.engine import PolicyEngine
from trainer_bridge.sequence import take_share
from trainer_bridge.weights.probe import as_probe, probe_ids


def score_tokens(engine: PolicyEngine, token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of token_ids[1:], each given those before it, at temperature 1. A collective; the same on all ranks."""
    ranks = engine.ranks
    packed = collate([all_trained(token_ids)], {"probe": 0.0}, [0.0]).to(ranks.device)
    share = take_share(packed, ranks=ranks.sequence_size, rank=ranks.sequence_rank, group=ranks.sequence)
    chunks = -(-len(token_ids) // engine.settings.chunk_tokens)
    mine_n = engine.score(share, chunks, reference=False).float().cpu()
    found_N = torch.zeros(len(token_ids) - 1)
    if ranks.pack == 0:  # all packs score the same tokens, since all must make the call
        found_N[share.chosen.cpu()] = mine_n
    return list(ranks.add(found_N).tolist())


def make_policy_probe(engine: PolicyEngine, *, tokens: int, tolerance: float) -> Probe | None:
    """The probe of the weights as they are. A collective. None: no tokens are asked for.

    Raises: WeightsUnavailable: the weights give no numbers.
    """
    if tokens < 2:
        return None
    ids = probe_ids(engine.vocabulary, count=tokens)
    return as_probe(ids, score_tokens(engine, ids), tolerance)
