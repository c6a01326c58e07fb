"""A step over tries is the step over each sample by itself: loss, gradient and weights after three steps, in float64.

The model is a real one (transformers' layers, our attention and head), the plan, the layout and the objective are the step's;
ranks are run one after the other, and their gradients added, as ZeRO-3 does. tests/integration/trainer/ has real ranks.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steno_trainer.model.model import PolicyModel, cost_model, load_model
from steno_trainer.model.sequence_parallel import take_share
from steno_trainer.objective.aggregation import Aggregation, SampleShare, token_weights
from steno_trainer.objective.loss import Objective, Tokens, means, policy_loss
from steno_trainer.objective.mismatch import Correction, Mismatch
from steno_trainer.objective.ratios import RatioLevel, Sequences
from steno_trainer.packing.collate import collate
from steno_trainer.packing.forest import Forest
from steno_trainer.packing.plan import CostModel, PackingItem, plan_step
from steno_trainer.step.step import _booked, _positions, _slots
from tests.unit.trainer.families import build
from tests.unit.trainer.rows import row

OBJECTIVE = Objective(0.01, 0.02, entropy_bonus=0.01, mismatch=Mismatch(Correction.MASKED, low=0.2, high=5.0))


@pytest.fixture(scope="module", params=["qwen3", "mistral"])
def model(request, tmp_path_factory) -> PolicyModel:
    """The second has windows shorter than the samples."""
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param, folder)
    return load_model(str(folder), precision="float32", zero=None, checkpointing=True).double()


def random_rows(rng, vocabulary=3):
    """Each goes on from somewhere in another, or is new: equal ones, beginnings of others, and what several trials sampled."""
    generator = torch.Generator().manual_seed(rng.randint(0, 2**31))
    rows: list = []
    for number in range(rng.randint(2, 9)):
        stem = rng.choice(rows).token_ids_T if rows and rng.random() < 0.7 else torch.empty(0, dtype=torch.int64)
        stem = stem[: rng.randint(0, len(stem))]
        new = rng.randint(0 if len(stem) > 1 else 2, 12)
        ids = torch.cat([stem, torch.randint(0, vocabulary, (new,), generator=generator)])
        tokens = len(ids)
        trained = [at for at in range(1, tokens) if rng.random() < 0.6 or (at == 1 and not rows)]
        one = row(f"t{rng.randint(0, 3)}", tokens, trained, seed=number)
        temperatures_T = torch.tensor([0.7, 1.0])[torch.randint(0, 2, (tokens,), generator=generator)]
        version_T = torch.where(one.loss_mask_T, torch.randint(0, 2, (tokens,), generator=generator), -1)
        rows.append(
            replace(
                one, token_ids_T=ids, temperatures_T=temperatures_T, version_T=version_T, versions=("a/0", "a/1"),
                completion_starts=(1, max(1, tokens // 2)),
            )
        )  # fmt: skip
    return rows


def moved(logprobs, sampling):
    """Log-probabilities of a proximal policy that is near the current one: a function of the token alone."""
    return logprobs.detach() + 0.1 * torch.sin(100.0 * sampling.double())


def take_step(model, optimizer, rows, advantages, level, *, share, ranks, budget, chunk):
    """Loss, norm of the gradient, metrics, what was booked, and how many tokens went through the model."""
    items = [PackingItem(one.tokens, one.trained_tokens) for one in rows]
    forest = Forest.of([one.token_ids_T.numpy() for one in rows]) if share else None
    plan = plan_step(
        items, forest, ranks=ranks, budget_tokens=budget, chunk_tokens=chunk, cost=cost_model(model.lm), alone=not share
    )
    weights = token_weights(
        [SampleShare(one.trial_id, one.trained_tokens) for one in rows], Aggregation.ROLLOUT_MEAN, None
    )
    loss, sums, maxima, computed, slots = 0.0, [], [], 0, _slots(rows)
    masked_N = torch.zeros(slots[-1], dtype=torch.bool)
    optimizer.zero_grad()
    for batches in plan.ranks:
        for chunks, batch in zip(plan.chunks, batches, strict=True):
            packed = collate(
                [rows[i] for i in batch.items], advantages, [weights[i] for i in batch.items], level, share=share
            )
            part = take_share(packed)
            logprobs, entropies = model(part.packed, part.segments, chunks)
            tokens = Tokens(packed.sampling_logprobs_N, packed.advantages_N, packed.weights_N, packed.loss_mask_N)
            sequences = None
            if level is not RatioLevel.TOKEN:
                tokens = replace(tokens, proximal_logprobs_N=moved(logprobs, packed.sampling_logprobs_N))
                sequences = Sequences(packed.sequence_N, packed.sequence_tokens_N, packed.sequences)
            found = policy_loss(OBJECTIVE, tokens, logprobs, entropies, sequences)
            found.total.backward()
            loss += found.total.item()
            sums.append(found.sums_M2)
            maxima.append(found.maxima_X)
            computed += packed.input_ids_1S.shape[1] if batch.items else 0
            masked_N[_positions(batch.items, slots)] = found.mismatch_masked_N
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    metrics = means(torch.stack(sums).sum(0), torch.stack(maxima).amax(0))
    return {"loss": loss, "norm": norm, **metrics}, _booked(rows, slots, masked_N, ()).accounts(), computed


@settings(max_examples=12, deadline=None)
@given(
    rng=st.randoms(use_true_random=False), ranks=st.integers(1, 3), budget=st.integers(60, 160), chunk=st.integers(1, 40),
    level=st.sampled_from(RatioLevel),
)  # fmt: skip
def test_three_steps_over_tries_are_three_steps_over_samples(model, rng, ranks, budget, chunk, level):
    batches = [random_rows(rng) for _ in range(3)]
    trials = {one.trial_id: rng.choice([-1.0, 0.5, 2.0]) for rows in batches for one in rows}
    results = []
    for way in (
        {"share": False, "ranks": 1, "budget": 10_000, "chunk": 10_000},
        {"share": True, "ranks": ranks, "budget": budget, "chunk": chunk},
    ):
        mine = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3, eps=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        steps = [take_step(mine, optimizer, rows, trials, level, **way) for rows in batches]
        results.append((steps, [parameter.detach() for parameter in mine.parameters()]))
    (plain, weights), (shared, ours) = results
    for (expected, booked, paths), (found, same, computed) in zip(plain, shared, strict=True):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert same == booked
        assert computed <= paths
    for mine, theirs in zip(ours, weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_what_two_trials_sampled_alike_has_a_term_for_each():
    """One token in the model, two in the loss: each with its own advantage, log-probability, temperature, weight and version."""
    one = row("a", 4, [2, 3])
    other = replace(
        row("b", 4, [1, 3], seed=1),
        token_ids_T=one.token_ids_T,
        temperatures_T=torch.full((4,), 0.5),
        versions=("a/7",),
    )
    packed = collate([other, one], {"a": 2.0, "b": -1.0}, [0.25, 0.5], share=True)
    assert packed.input_ids_1S.tolist() == [one.token_ids_T.tolist()]
    assert packed.predictor_N.tolist() == [0, 2, 1, 2]
    assert packed.advantages_N.tolist() == [-1.0, -1.0, 2.0, 2.0] and packed.weights_N.tolist() == [
        0.25,
        0.25,
        0.5,
        0.5,
    ]
    assert packed.temperatures_N.tolist() == [0.5, 0.5, 1.0, 1.0]
    assert packed.sampling_logprobs_N[1] != packed.sampling_logprobs_N[3]


def test_a_batch_that_shares_nothing_is_planned_as_without_a_forest():
    rng = random.Random(0)
    rows = [row(f"t{n}", rng.randint(2, 50), [1], seed=n) for n in range(40)]
    rows = [replace(one, token_ids_T=one.token_ids_T + 100 * n) for n, one in enumerate(rows)]
    items = [PackingItem(one.tokens, one.trained_tokens) for one in rows]
    order = sorted(range(40), key=lambda n: rows[n].token_ids_T.tolist())
    assert order == list(range(40))
    terms = {"ranks": 3, "budget_tokens": 120, "chunk_tokens": 8, "cost": CostModel(10.0, 1.0, 5.0)}
    assert plan_step(items, Forest.of([one.token_ids_T.numpy() for one in rows]), **terms) == plan_step(items, **terms)
