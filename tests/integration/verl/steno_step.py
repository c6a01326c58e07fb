"""The same training step as `steno train` has it, on the record of the same trials: its rows, advantages, loss.

| what | verl 0.9.1 | steno train |
|---|---|---|
| loss | `vanilla`: clipped at 0.2 and 0.2, `clip_ratio_c` 3 | `dual_clip`, 0.2, 0.2, 3 |
| ratio | to the actor's log-probabilities before the first update | to the proximal policy's, mismatch off |
| weights | `loss_agg_mode: token-mean` | aggregation `token_mean` |
| advantages | `grpo`, but for a session alone in its group: its reward | `grpo`, which has 0 there |
| optimizer | AdamW, `optim.lr`, weight decay 0.01, `grad_clip` 1, two epochs of one mini-batch | the same, written out |
| precision | float32, FSDP2 on gloo | float32 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from steno import Client
from steno.models import TINY
from steno_trainer.data.advantages import Estimator, ScoredTrial, group_advantages
from steno_trainer.data.ledger import Ledger
from steno_trainer.data.rows import TrainingRow, TrainingTerms, read_samples
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.objective import dual_clip
from steno_trainer.objective.aggregation import Aggregation, SampleShare, token_weights
from steno_trainer.objective.loss import Objective, Tokens, policy_loss
from steno_trainer.objective.mismatch import Correction, Mismatch

OBJECTIVE = Objective(0.2, 0.2, Mismatch(Correction.OFF), losses=dual_clip.losses, dual_clip=3.0)


def steno_updates(
    client: Client, lineage: str, groups: Mapping[str, Mapping[str, float]], *, updates: int, lr: float
) -> tuple[list[float], list[float]]:
    """Args: groups: rewards by trial, by group. Returns: loss and norm of the gradient of each update."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.01)
    terms = TrainingTerms(VersionHistory((PolicyVersion(lineage, 0),)), None, 1 << 20, model.config.vocab_size)
    rows = [
        row
        for rewards in groups.values()
        for trial in rewards
        for row in read_samples(client.samples(trial), terms, Ledger())
    ]
    scored = [
        ScoredTrial(trial, group, reward) for group, rewards in groups.items() for trial, reward in rewards.items()
    ]
    advantages = dict(group_advantages(scored, Estimator.GRPO).by_trial)
    for rewards in groups.values():
        if len(rewards) == 1:
            advantages |= rewards
    weights = token_weights([SampleShare(row.trial_id, row.trained_tokens) for row in rows], Aggregation.TOKEN_MEAN)
    with torch.no_grad():
        proximal = [_logprobs(model, row) for row in rows]
    losses, norms = [], []
    for _ in range(updates):
        optimizer.zero_grad()
        total = 0.0
        for row, weight, before in zip(rows, weights, proximal, strict=True):
            loss = _loss(model, row, advantages[row.trial_id], weight, before)
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return losses, norms


def _logprobs(model: Any, row: TrainingRow) -> Tensor:
    logits = model(input_ids=row.token_ids_T[None]).logits[0, :-1] / row.temperatures_T[1:, None]
    return torch.log_softmax(logits, -1).gather(-1, row.token_ids_T[1:, None])[:, 0]


def _loss(model: Any, row: TrainingRow, advantage: float, weight: float, proximal: Tensor) -> Tensor:
    now = _logprobs(model, row)
    tokens = Tokens(
        row.sampling_logprobs_T[1:], torch.full_like(now, advantage), torch.full_like(now, weight), row.loss_mask_T[1:],
        proximal,
    )  # fmt: skip
    return policy_loss(OBJECTIVE, tokens, now, torch.zeros_like(now)).total
