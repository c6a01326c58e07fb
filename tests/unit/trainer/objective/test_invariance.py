"""A step is one number and one gradient, however it is cut: packing, ranks, micro-batches and chunks change nothing.

From recorded turns to the gradient of a toy causal model, with everything this package has in between; the reference is one
sample after the other, in float64, from the definitions.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from steno_trainer.data.advantages import Estimator, ScoredTrial, group_advantages
from steno_trainer.data.ledger import Ledger, received
from steno_trainer.data.rows import TrainingTerms, drop_groups, read_samples
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.model.logprobs import LogprobHead
from steno_trainer.objective.aggregation import Aggregation, SampleShare, token_weights
from steno_trainer.objective.loss import Objective, Tokens, means, policy_loss
from steno_trainer.objective.mismatch import Correction, Mismatch
from steno_trainer.objective.ratios import RatioLevel, Sequences
from steno_trainer.packing.collate import collate
from steno_trainer.packing.plan import CostModel, PackingItem, plan_step
from steno_trainer.step.step import _booked, _positions, _slots
from tests.unit.trainer.recorded import VOCABULARY, Recording, session

D = 5
TERMS = TrainingTerms(
    VersionHistory((PolicyVersion("a", 9),)), max_staleness_steps=9, max_tokens=400, vocabulary=VOCABULARY
)
COST = CostModel(per_token=10.0, per_pair=1.0, per_trained=5.0)
OBJECTIVE = Objective(0.01, 0.02, entropy_bonus=0.01, mismatch=Mismatch(Correction.MASKED, low=0.2, high=5.0))


class Toy(nn.Module):
    """The state at a position is the mean of the embeddings so far, within its sample."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, D, generator=generator, dtype=torch.float64))
        self.head = LogprobHead(nn.Parameter(torch.randn(VOCABULARY, D, generator=generator, dtype=torch.float64)))

    def forward(self, packed) -> torch.Tensor:
        embedded = self.embedding[packed.input_ids_1S[0]]
        bounds = packed.starts_Q1.tolist()
        parts = [embedded[a:b].cumsum(0) for a, b in itertools.pairwise(bounds)]
        return torch.cat(parts) / (packed.position_ids_1S[0] + 1)[:, None]


def recorded(seed):
    """Some groups of trials, forked and not, with unequal sizes and rewards; (samples, turns)."""
    rng = random.Random(seed)
    samples, turns = [], []
    for group in range(rng.randint(1, 3)):
        for trial in range(rng.randint(2, 4)):
            recording = Recording(rng.random())
            ids = [recording.turn(None, rng.randint(1, 6), rng.randint(1, 6), f"a/{rng.randint(1, 9)}")]
            for _ in range(rng.randint(0, 4)):
                ids.append(
                    recording.turn(
                        rng.choice(ids), rng.randint(1, 4), rng.randint(1, 5), f"a/{rng.randint(1, 9)}",
                        law={"temperature": rng.choice([0.6, 1.0])},
                    )
                )  # fmt: skip
            reward = float(trial == 0) + 0.1 * rng.randint(0, 2)
            samples += recording.samples(session(f"g{group}.{trial}", f"g{group}", reward))
            turns += recording.turns
    return samples, turns


def prepared(seed, mode):
    samples, turns = recorded(seed)
    ledger = Ledger()
    for version, tokens in received(turns).items():
        ledger.sampled(version, tokens)
    rows = read_samples(samples, TERMS, ledger)
    reward_of = {sample.trial_id: sample.reward for sample in samples}
    rewards = {row.trial_id: ScoredTrial(row.trial_id, row.group_id, reward_of[row.trial_id]) for row in rows}
    advantages = group_advantages(rewards.values(), Estimator.GRPO)
    rows = drop_groups(rows, advantages.dropped, ledger)
    parts = [SampleShare(row.trial_id, row.trained_tokens) for row in rows]
    weights = token_weights(parts, mode, 64 if mode is Aggregation.CONSTANT else None)
    return rows, advantages.by_trial, weights, ledger


def moved(logprobs, sampling):
    """Log-probabilities of a proximal policy that is near the current one: a function of the token alone."""
    return logprobs.detach() + 0.1 * torch.sin(100.0 * sampling.double())


def one_by_one(rows, advantages, mode, level):
    """Loss and gradients from the definitions: whole logits of one sample at a time, weights counted here. With a proximal policy
    of its own (`moved`) where tokens share a ratio."""
    model = Toy()
    by_trial = Counter()
    for row in rows:
        by_trial[row.trial_id] += row.trained_tokens
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        states = model.embedding[row.token_ids_T].cumsum(0) / torch.arange(1, row.tokens + 1)[:, None]
        sequences = defaultdict(list)
        for t in row.loss_mask_T.nonzero()[:, 0].tolist():
            logits = model.head.weight @ states[t - 1] / row.temperatures_T[t].double()
            p = torch.softmax(logits, 0)
            logprob, entropy = p[row.token_ids_T[t]].log(), -(p * p.log()).sum()
            sampling = row.sampling_logprobs_T[t]
            proximal = logprob.detach() if level is RatioLevel.TOKEN else moved(logprob, sampling)
            weight = {
                Aggregation.TOKEN_MEAN: 1 / by_trial.total(),
                Aggregation.ROLLOUT_MEAN: 1 / len(by_trial) / by_trial[row.trial_id],
                Aggregation.CONSTANT: 1 / len(by_trial) / 64,
            }[mode]
            total = total - weight * 0.01 * entropy
            completion = max(start for start in row.completion_starts if start <= t)
            number = {RatioLevel.TOKEN: t, RatioLevel.COMPLETION: completion, RatioLevel.SEQUENCE: 0}[level]
            sequences[number].append((logprob, proximal, weight, proximal.item() - sampling.item()))
        advantage = advantages[row.trial_id]
        for members in sequences.values():
            change = sum(logprob - proximal for logprob, proximal, *_ in members) / len(members)
            rho = math.exp(sum(apart for *_, apart in members) / len(members))
            m = rho if 0.2 <= rho <= 5.0 else 0.0
            for logprob, _, weight, _ in members:
                ratio = (change.detach() + logprob - logprob.detach()).exp()
                total = total - weight * m * torch.min(ratio * advantage, ratio.clamp(0.99, 1.02) * advantage)
    total.backward()
    return total.item(), [parameter.grad for parameter in model.parameters()]


def in_pieces(rows, advantages, weights, level, ranks, budget, chunk, ledger):
    """As ranks do it under DeepSpeed, which divides by ranks and by accumulation steps."""
    items = [PackingItem(row.tokens, row.trained_tokens) for row in rows]
    plan = plan_step(items, ranks=ranks, budget_tokens=budget, chunk_tokens=chunk, cost=COST)
    model, total, sums, maxima = Toy(), 0.0, [], []
    slots = _slots(rows)
    masked_N = torch.zeros(slots[-1], dtype=torch.bool)
    for batches in plan.ranks:
        for chunks, batch in zip(plan.chunks, batches, strict=True):
            packed = collate([rows[i] for i in batch.items], advantages, [weights[i] for i in batch.items], level)
            states = model(packed)[packed.predictor_N]
            logprobs, entropies = model.head(states, packed.targets_N, packed.temperatures_N, chunks)
            tokens = Tokens(packed.sampling_logprobs_N, packed.advantages_N, packed.weights_N, packed.loss_mask_N)
            sequences = None
            if level is not RatioLevel.TOKEN:
                tokens = replace(tokens, proximal_logprobs_N=moved(logprobs, packed.sampling_logprobs_N))
                sequences = Sequences(packed.sequence_N, packed.sequence_tokens_N, packed.sequences)
            found = policy_loss(OBJECTIVE, tokens, logprobs, entropies, sequences)
            undone = found.total * len(plan.ranks) * len(plan.chunks)
            (undone / len(plan.ranks) / len(plan.chunks)).backward()
            total += found.total.item()
            sums.append(found.sums_M2)
            maxima.append(found.maxima_X)
            masked_N[_positions(batch.items, slots)] = found.mismatch_masked_N
    ledger.add(_booked(rows, slots, masked_N, ()))
    metrics = means(torch.stack(sums).sum(0), torch.stack(maxima).amax(0))
    return total, [parameter.grad for parameter in model.parameters()], metrics


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000), mode=st.sampled_from(Aggregation), ranks=st.integers(1, 5), budget=st.integers(60, 200),
    chunk=st.integers(1, 40), order=st.randoms(use_true_random=False), level=st.sampled_from(RatioLevel),
)  # fmt: skip
def test_packing_ranks_micro_batches_and_chunks_change_nothing(seed, mode, ranks, budget, chunk, order, level):
    rows, advantages, weights, ledger = prepared(seed, mode)
    total, gradients = one_by_one(rows, advantages, mode, level)
    whole = in_pieces(rows, advantages, weights, level, 1, 100_000, 100_000, Ledger())
    shuffled = order.sample(range(len(rows)), len(rows))
    cut = in_pieces(
        [rows[i] for i in shuffled], advantages, [weights[i] for i in shuffled], level, ranks, budget, chunk, ledger
    )
    # Weights and advantages are float32 in a batch; whatever the cut, they are the same ones.
    assert cut[0] == pytest.approx(whole[0], rel=1e-9, abs=1e-12)
    assert cut[2] == pytest.approx(whole[2], rel=1e-9)
    for ours, same, theirs in zip(cut[1], whole[1], gradients, strict=True):
        torch.testing.assert_close(ours, same, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
    assert cut[0] == pytest.approx(total, rel=1e-4, abs=1e-6)
    ledger.check()
