"""A plan places every sample once, keeps its budget, and lets all ranks do the same calls; it balances and it is repeatable."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.errors import ConfigError
from steno_trainer.errors import BadPlan
from steno_trainer.packing.forest import Forest
from steno_trainer.packing.plan import CostModel, MicroBatch, PackingItem, plan_step

COST = CostModel.of(parameters=7_000_000_000, layers=28, attention_width=3584, hidden=3584, vocabulary=152_064)
BUDGET = 4096


def plan(items, ranks=4, budget=BUDGET, chunk=256):
    return plan_step(items, ranks=ranks, budget_tokens=budget, chunk_tokens=chunk, cost=COST)


def apart(items):
    return Forest.apart(len(items))


def some_items(n, seed=0, longest=BUDGET):
    rng = random.Random(seed)
    lengths = [min(longest, max(2, int(rng.lognormvariate(6, 1)))) for _ in range(n)]
    return [PackingItem(length, rng.randint(0, length - 1)) for length in lengths]


items_strategy = st.lists(
    st.integers(1, 500).flatmap(lambda tokens: st.builds(PackingItem, st.just(tokens), st.integers(0, tokens))),
    max_size=40,
)


@given(items_strategy, st.integers(1, 9), st.integers(500, 1200), st.integers(1, 300))
def test_every_sample_is_placed_once_and_ranks_can_run_in_lockstep(items, ranks, budget, chunk):
    made = plan(items, ranks, budget, chunk)
    made.check(items, apart(items))
    assert len(made.ranks) == ranks
    assert {len(batches) for batches in made.ranks} == {len(made.chunks)}
    assert len(made.chunks) >= 1, "also without a sample the calls are made, by everyone"
    assert all(batch.tokens <= budget for batches in made.ranks for batch in batches)
    for i, chunks in enumerate(made.chunks):
        most = max(batches[i].trained for batches in made.ranks)
        assert chunks == max(1, -(-most // chunk))


@given(items_strategy, st.integers(1, 5))
def test_samples_that_share_no_call_are_as_many_calls(items, ranks):
    made = plan_step(items, ranks=ranks, budget_tokens=BUDGET, chunk_tokens=64, cost=COST, alone=True)
    made.check(items, apart(items))
    assert all(len(batch.items) <= 1 for batches in made.ranks for batch in batches)
    assert len(made.chunks) == max(1, -(-len(items) // ranks))


def test_samples_that_share_no_call_are_as_many_calls_also_where_they_cost_nothing():
    """A micro-batch that costs nothing is as cheap as an empty one."""
    head_only = CostModel(per_token=0.0, per_pair=0.0, per_trained=1.0)
    items = [PackingItem(10, trained) for trained in (0, 3, 0, 0, 1)]
    made = plan_step(items, ranks=2, budget_tokens=BUDGET, chunk_tokens=64, cost=head_only, alone=True)
    assert [len(batches) for batches in made.ranks] == [3, 3]
    assert sorted(batch.items for batches in made.ranks for batch in batches) == [(), (0,), (1,), (2,), (3,), (4,)]


def test_the_same_samples_give_the_same_plan():
    items = some_items(200)
    assert plan(items) == plan(list(items)) != plan(items, ranks=8)
    assert plan([]).ranks == ((MicroBatch(),),) * 4


@pytest.mark.parametrize(("n", "ranks"), [(64, 1), (256, 4), (256, 8), (1000, 16)])
def test_ranks_hardly_wait_for_each_other(n, ranks):
    items = some_items(n, seed=n)
    made = plan(items, ranks, budget=16_384)
    assert made.balance(items, apart(items), COST) > 0.9


@pytest.mark.parametrize("seed", range(5))
def test_what_runs_at_the_same_time_costs_alike(seed):
    """Each round's cheapest micro-batch costs at least what the next round's most expensive one does."""
    items = some_items(60, seed, longest=3000)
    made = plan(items, ranks=3)
    rounds = [
        [sum(COST.flops(items[i]) for i in batches[at].items) for batches in made.ranks]
        for at in range(len(made.chunks))
    ]
    assert len(rounds) > 2
    assert all(min(before) >= max(after) for before, after in itertools.pairwise(rounds))


def test_balance_is_of_flops_not_of_tokens():
    """One sample of 4,000 tokens costs more than forty of 500 where attention dominates."""
    attention = CostModel(per_token=1.0, per_pair=1.0, per_trained=0.0)
    items = [PackingItem(4000, 0), *[PackingItem(500, 0)] * 40]
    made = plan_step(items, ranks=2, budget_tokens=40_000, chunk_tokens=1, cost=attention)
    with_long = next(batch for batches in made.ranks for batch in batches if 0 in batch.items)
    assert with_long.items == (0,)


def test_a_micro_batch_without_room_for_one_sample_gets_a_smaller_one():
    """By cost, the square of the tokens: 7 goes alone, 3 + 3 + 3 together, where 2 has no room, but 1 has. Nothing beats 53: at
    least two tokens of the others' twelve must go with the 7."""
    squares = CostModel(per_token=0.0, per_pair=1.0, per_trained=0.0)
    items = [PackingItem(tokens, 0) for tokens in (7, 3, 3, 3, 2, 1)]
    made = plan_step(items, ranks=2, budget_tokens=10, chunk_tokens=1, cost=squares)
    assert len(made.chunks) == 1
    assert sorted(sum(squares.flops(items[i]) for i in batches[0].items) for batches in made.ranks) == [28, 53]


def test_the_rank_with_the_least_work_so_far_gets_the_most_expensive_of_the_next_round():
    linear = CostModel(per_token=1.0, per_pair=0.0, per_trained=0.0)
    made = plan_step([PackingItem(n, 0) for n in (10, 8, 7, 6)], ranks=2, budget_tokens=10, chunk_tokens=1, cost=linear)
    assert [[batch.tokens for batch in batches] for batches in made.ranks] == [[10, 6], [8, 7]]


def test_few_rounds_as_the_budget_allows():
    assert len(plan([PackingItem(1000, 1)] * 8, ranks=2, budget=4096).chunks) == 1
    assert len(plan([PackingItem(1000, 1)] * 9, ranks=2, budget=4096).chunks) == 2
    tight = [PackingItem(tokens, 1) for tokens in (6, 6, 4, 4, 5, 5)]
    assert len(plan(tight, ranks=3, budget=10).chunks) == 1, "only a dense packing comes out"


def test_a_rank_without_samples_runs_dummies():
    made = plan([PackingItem(10, 3)], ranks=3)
    assert sorted(batches[0].tokens for batches in made.ranks) == [0, 0, 10]
    assert made.chunks == (1,)


@pytest.mark.parametrize("item", [PackingItem(BUDGET + 1, 1), PackingItem(0, 0), PackingItem(5, 6), PackingItem(5, -1)])
def test_a_sample_that_can_not_be_is_refused(item):
    with pytest.raises(BadPlan, match="sample 1"):
        plan([PackingItem(5, 1), item])


@pytest.mark.parametrize("name", ["ranks", "budget", "chunk"])
def test_numbers_are_positive(name):
    with pytest.raises(ConfigError, match="got 0, must be above 0"):
        plan([], **{name: 0})


def test_a_rank_sees_a_plan_that_is_not_of_these_samples():
    items = some_items(20)
    made = plan(items)
    first, *others = made.ranks
    dropped = (MicroBatch(first[0].items[1:], first[0].tokens, first[0].trained), *first[1:])
    for wrong, what in (
        (msgspec.structs.replace(made, ranks=(dropped, *others)), "20 samples, but the plan places 19"),
        (msgspec.structs.replace(made, ranks=(first[:-1], *others)), "places|micro-batches of"),
        (msgspec.structs.replace(made, ranks=((*first, MicroBatch()), *others)), "micro-batches of"),
        (msgspec.structs.replace(made, budget_tokens=100), "in a budget of 100"),
        (msgspec.structs.replace(made, chunks=(0,) * len(made.chunks)), "in 0 chunks"),
    ):
        with pytest.raises(BadPlan, match=what):
            wrong.check(items, apart(items))
    with pytest.raises(BadPlan):
        made.check([*items[:-1], PackingItem(items[-1].tokens + 1, 0)], apart(items))


def test_flops_are_those_of_a_transformer_counted_by_hand():
    """2 FLOPs per multiply-add, backward twice the forward, causal attention half of all pairs."""
    cost = CostModel.of(parameters=1000, layers=3, attention_width=8, hidden=16, vocabulary=50)
    tokens, trained = 10, 4
    dense = 3 * 2 * 1000 * tokens
    attention = 3 * 3 * (2 * tokens * tokens * 8 + 2 * tokens * tokens * 8) / 2
    head = 3 * 2 * 16 * 50 * trained
    assert cost.flops(PackingItem(tokens, trained)) == dense + attention + head
