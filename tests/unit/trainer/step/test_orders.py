"""Orders: what the first rank draws up is what every rank reads, and a mini-batch is weighed as a step of its own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from steno_trainer.data.advantages import Estimator, ScoredTrial
from steno_trainer.data.ledger import Account, Ledger, Reason
from steno_trainer.errors import BadBatch, BadPlan
from steno_trainer.objective.aggregation import Aggregation, SilentTotals
from steno_trainer.packing.plan import CostModel
from steno_trainer.step.step import _booked, _positions, _Seen, _slots
from steno_trainer.step.step_plan import Layout, StepBatch, StepOrders, draw_up, make_batch
from tests.unit.trainer.rows import row

LAYOUT = Layout(
    packs=2, budget_tokens=30, chunk_tokens=4, aggregation=Aggregation.ROLLOUT_MEAN, constant_tokens=None,
    cost=CostModel(10.0, 1.0, 5.0),
)  # fmt: skip
ROWS = [row(f"t{i // 2}", 8 + i, [3, 4, 5 + i], seed=i) for i in range(8)]
BATCH = StepBatch(ROWS, {f"t{i}": float(i) - 1.5 for i in range(4)})


def test_every_rank_reads_what_the_first_one_drew_up() -> None:
    orders = draw_up(BATCH, LAYOUT, seed="s")
    read = StepOrders.decode(orders.encode())
    assert read == orders
    rows = read.rows()
    read.check(rows)
    for ours, theirs in zip(rows, ROWS, strict=True):
        assert (ours.trial_id, ours.versions) == (theirs.trial_id, theirs.versions)
        for name in ("token_ids_T", "loss_mask_T", "sampling_logprobs_T", "temperatures_T", "version_T"):
            mine, sent = getattr(ours, name), getattr(theirs, name)
            assert mine.dtype == sent.dtype
            torch.testing.assert_close(mine, sent, rtol=0, atol=0, equal_nan=True)


def test_each_mini_batch_keeps_trials_whole_and_weighs_one() -> None:
    orders = draw_up(BATCH, replace(LAYOUT, epochs=2, mini_batches=2), seed="s")
    assert len(orders.passes) == 4
    for epoch in (orders.passes[:2], orders.passes[2:]):
        assert sorted(i for part in epoch for i in part.rows) == list(range(8))
        first, second = ({ROWS[i].trial_id for i in part.rows} for part in epoch)
        assert not first & second and first and second
    for part in orders.passes:
        weighed = sum(w * ROWS[i].trained_tokens for i, w in zip(part.rows, part.weights, strict=True))
        assert weighed == pytest.approx(1.0)
    assert orders == draw_up(BATCH, replace(LAYOUT, epochs=2, mini_batches=2), seed="s")
    assert orders != draw_up(BATCH, replace(LAYOUT, epochs=2, mini_batches=2), seed="another")


def test_where_few_trials_are_left_there_are_fewer_mini_batches() -> None:
    """Or a step of which little says something would end the run, and each start after it."""
    orders = draw_up(BATCH, replace(LAYOUT, mini_batches=5), seed="s")
    assert len(orders.passes) == 4
    assert {frozenset(ROWS[i].trial_id for i in part.rows) for part in orders.passes} == {
        frozenset({f"t{i}"}) for i in range(4)
    }
    alone = draw_up(StepBatch(ROWS[:2], {"t0": 1.0}), replace(LAYOUT, mini_batches=5), seed="s")
    assert [part.rows for part in alone.passes] == [(0, 1)]


def test_what_can_not_be_trained_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(BadBatch, match="without samples"):
        draw_up(StepBatch([], {}), LAYOUT, seed="s")
    with pytest.raises(BadBatch, match="t3"):
        draw_up(StepBatch(ROWS, {"t0": 1.0, "t1": 1.0, "t2": 1.0}), LAYOUT, seed="s")
    with pytest.raises(BadPlan, match="in a budget of 10"):
        draw_up(BATCH, replace(LAYOUT, budget_tokens=10), seed="s")
    with pytest.raises(BadBatch, match="not the orders"):
        StepOrders.decode(b"\x01")


def test_a_trial_without_samples_is_part_of_its_groups_mean() -> None:
    rows = [row("a", 5, [2]), row("b", 5, [2]), row("c", 5, [2], group_id="equal")]
    scored = [
        ScoredTrial("a", "g", 1.0), ScoredTrial("b", "g", 1.0), ScoredTrial("gone", "g", 0.0),
        ScoredTrial("c", "equal", 1.0), ScoredTrial("d", "equal", 1.0),
    ]  # fmt: skip
    ledger = Ledger()
    batch, dropped = make_batch(rows, scored, Estimator.GRPO_NO_STD, ledger)
    assert [kept.trial_id for kept in batch.rows] == ["a", "b"]
    assert batch.advantages["a"] == pytest.approx(1 / 3)
    assert dropped == {"equal": Reason.ZERO_VARIANCE}
    assert ledger.total().untrained == {Reason.ZERO_VARIANCE: 1}


def test_groups_that_say_nothing_are_trained_where_a_teacher_scores_their_tokens() -> None:
    rows = [row("a", 5, [2]), row("b", 5, [2]), row("c", 5, [2], group_id="equal"), row("e", 5, [2], group_id="alone")]
    rows.append(row("x", 5, [2], group_id="broken"))
    scored = [
        ScoredTrial("a", "g", 1.0), ScoredTrial("b", "g", 0.0), ScoredTrial("c", "equal", 1.0), ScoredTrial("d", "equal", 1.0),
        ScoredTrial("e", "alone", 1.0), ScoredTrial("x", "broken", math.nan), ScoredTrial("y", "broken", 1.0),
    ]  # fmt: skip
    ledger = Ledger()
    batch, silent = make_batch(rows, scored, Estimator.GRPO_NO_STD, ledger, train_silent=True)
    assert {kept.trial_id: batch.advantages[kept.trial_id] for kept in batch.rows} == {
        "a": 0.5,
        "b": -0.5,
        "c": 0,
        "e": 0,
    }
    assert silent == {"equal": Reason.ZERO_VARIANCE, "alone": Reason.GROUP_TOO_SMALL, "broken": Reason.MALFORMED}
    assert batch.silent == SilentTotals(), "they are rows themselves"
    assert ledger.total().untrained == {Reason.MALFORMED: 1}


def test_what_was_trained_is_booked_by_version_and_what_was_taken_out_by_its_reason() -> None:
    """And what no pass has trained by another one."""
    first = replace(ROWS[0], versions=("a/2", "a/4"), version_T=torch.tensor([-1, -1, -1, 0, 0, 1, -1, -1]))
    rows = [first, replace(ROWS[1], versions=("a/3",)), replace(ROWS[2], versions=("a/3",))]
    taken_out_N = torch.tensor([True, False, False, False, True, True, True, False, False])
    assert _booked(rows, _slots(rows), taken_out_N, {2}).accounts() == {
        "a/2": Account(0, 1, {Reason.MISMATCH: 1}),
        "a/3": Account(0, 1, {Reason.MISMATCH: 2, Reason.POISONED: 3}),
        "a/4": Account(0, 1, {}),
    }
    assert _booked([], [0], torch.zeros(0, dtype=torch.bool), ()).accounts() == {}


def test_what_a_token_is_annotated_with_is_that_of_the_first_pass_whatever_rank_runs_it_later() -> None:
    """Ranks add up what they have: a token that each of two epochs runs on another rank would count twice."""
    orders = draw_up(BATCH, replace(LAYOUT, epochs=2, mini_batches=2), seed="other")
    slots = _slots(ROWS)
    by_rank = [_Seen(orders.passes, slots) for _ in range(LAYOUT.packs)]
    ran: dict[int, set[int]] = {i: set() for i in range(len(ROWS))}
    for number, part in enumerate(orders.passes):
        for rank, batches in enumerate(part.plan.ranks):
            for batch in batches:
                rows = [part.rows[i] for i in batch.items]
                for i in rows:
                    ran[i].add(rank)
                where = _positions(rows, slots)
                by_rank[rank].note(number, where, torch.full((len(where),), number + 1.0), torch.zeros(len(where)))
    assert any(len(ranks) > 1 for ranks in ran.values()), "else this shows nothing"
    added_N = torch.stack([seen.differences_N for seen in by_rank]).sum(0)
    for i in range(len(ROWS)):
        first = next(number for number, part in enumerate(orders.passes) if i in part.rows)
        assert added_N[slots[i] : slots[i + 1]].tolist() == [first + 1.0] * ROWS[i].trained_tokens
