"""Log-probabilities of given tokens under the policy, on all ranks together: the probe that workers compare with before they
serve weights (I10).

Through the same packing, head and ranks as a step, so that it also sees what a step would see.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from steno.contracts.policy import Probe
from steno_trainer.data.rows import TrainingRow, all_trained
from steno_trainer.errors import WeightsUnavailable
from steno_trainer.model.sequence_parallel import take_share
from steno_trainer.model.zero_engine import PolicyEngine
from steno_trainer.packing.collate import collate
from steno_trainer.weights.probe import ProbeTolerance, as_probe

log = logging.getLogger(__name__)

MOVED_NATS = 0.5
"""By how much less likely, on average, the probe's ids may become before they are drawn anew."""


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


class PolicyProbe:
    """The probe of one run. Its ids are sampled from the first weights, so that they are likely tokens: for unlikely tokens,
    log-probabilities are far from 0, and two correct engines differ more. When training has made the ids less likely by
    `MOVED_NATS`, new ones are sampled."""

    def __init__(self, engine: PolicyEngine, *, tokens: int, tolerance: ProbeTolerance) -> None:
        self._engine, self._tokens, self._tolerance = engine, tokens, tolerance
        self._ids: list[int] = []
        self._drawn_at = 0.0  # mean log-probability of the ids, by the weights that drew them

    def make(self) -> Probe | None:
        """The probe of the weights as they are. A collective. None: no tokens are asked for.

        Raises: WeightsUnavailable: the weights give no numbers.
        """
        if self._tokens < 2:
            return None
        logprobs = score_tokens(self._engine, self._ids) if self._ids else []
        # The sums are the same on all ranks, so all draw or none does.
        if not logprobs or fmean(logprobs) < self._drawn_at - MOVED_NATS:
            started = time.monotonic()
            self._ids = draw_tokens(self._engine, self._tokens)
            logprobs = score_tokens(self._engine, self._ids)
            self._drawn_at = fmean(logprobs)
            log.info("the probe's %d ids were drawn in %.1f s", len(self._ids), time.monotonic() - started)
        return as_probe(self._ids, logprobs, self._tolerance)


def draw_tokens(engine: PolicyEngine, count: int, *, seed: int = 0) -> list[int]:
    """What the policy says at temperature 1 after the token that begins its texts, `count` ids with that one. A collective; the
    same on all ranks. One forward pass per id: under ZeRO-3 each gathers the model once, as a micro-batch of a step does.

    Raises: WeightsUnavailable: the weights give no numbers.
    """
    ranks = engine.ranks
    generator = torch.Generator().manual_seed(seed)
    ids = [first_token(engine.lm.config)]
    count = min(count, engine.context_tokens - 1)
    while len(ids) < count:
        packed = collate([_last_only([*ids, 0])], {"probe": 0.0}, [0.0]).to(ranks.device)
        share = take_share(packed, ranks=ranks.sequence_size, rank=ranks.sequence_rank, group=ranks.sequence)
        # N is 1 on the rank that has the last token, and 0 on the others.
        logits_NV = engine.logits(share).double().cpu()
        # Gumbel's way: what is drawn depends on the seed and the logits, and on no kernel's way of drawing.
        noise_V = -torch.empty(engine.vocabulary, dtype=torch.float64).exponential_(generator=generator).log()
        found = torch.zeros(2, dtype=torch.int64)  # the id, and whether there are numbers
        if ranks.pack == 0 and len(logits_NV):
            found[0] = int((logits_NV[0, : engine.vocabulary] + noise_V).argmax())
            found[1] = int(logits_NV.isfinite().all())
        drawn, numbers = ranks.add(found).tolist()
        if not numbers:
            raise WeightsUnavailable("the model's logits are NaN or infinite: the weights are not sent")
        ids.append(drawn)
    return ids


def first_token(config: Any) -> int:
    """What a text begins with: the model's token for that, else the one that ends texts, else the first of its vocabulary."""
    for name in ("bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and 0 <= value < config.vocab_size:
            return value
    return 0


def _last_only(token_ids: Sequence[int]) -> TrainingRow:
    mask_T = torch.zeros(len(token_ids), dtype=torch.bool)
    mask_T[-1] = True
    return dataclasses.replace(all_trained(token_ids), loss_mask_T=mask_T)
