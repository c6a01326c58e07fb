"""Samples that begin alike are one trie: counted as sets of their beginnings, and cut where the fewest tokens are repeated."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno_trainer.errors import BadPlan
from steno_trainer.packing import plan as plan_
from steno_trainer.packing.cut import fewest_repeats
from steno_trainer.packing.forest import Forest
from steno_trainer.packing.plan import CostModel, MicroBatch, PackingItem, PackingPlan, Size, plan_step

COST = CostModel(per_token=100.0, per_pair=1.0, per_trained=50.0)
SAMPLES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)
"""Of an alphabet of three: samples that are equal, that are parts of others, and that share some tokens."""


def beginnings(samples):
    """Each token once, as what it is: the samples up to it."""
    return {tuple(sample[:end]) for sample in samples for end in range(1, len(sample) + 1)}


def items_of(samples):
    return [PackingItem(len(sample), number % (len(sample) + 1)) for number, sample in enumerate(samples)]


@given(SAMPLES, st.randoms(use_true_random=False))
def test_any_selection_computes_each_beginning_once(samples, rng):
    forest, items = Forest.of(samples), items_of(samples)
    chosen = rng.sample(range(len(samples)), rng.randint(0, len(samples)))
    size = Size.of(chosen, items, forest)
    picked = [samples[i] for i in chosen]
    assert size.tokens == len(beginnings(picked))
    assert size.paths == sum(map(len, picked))
    assert Size.of(range(len(chosen)), [items[i] for i in chosen], forest.only(chosen)) == size
    expected = sum(100.0 + 2 * len(beginning) - 1 for beginning in beginnings(picked))
    assert COST.together(items, forest, chosen) == expected + 50.0 * size.trained


@given(SAMPLES)
def test_each_sample_follows_one_that_it_shares_the_most_with(samples):
    forest = Forest.of(samples)
    before = []
    for i, shared in forest.walk(range(len(samples))):
        alike = [
            len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(samples[i], b, strict=False))])
            for b in before
        ]
        assert shared == max(alike, default=0)
        before.append(samples[i])
    for trie in forest.tries():
        assert len({samples[forest.order[place]][0] for place in trie}) == 1


def test_ids_are_compared_as_numbers_of_four_bytes():
    """Little-endian, or byte by byte, 256 and 1 would be neighbours of others."""
    assert Forest.of([[256, 7], [1, 7], [256, 9], [1, 7, 2]]) == Forest((1, 3, 0, 2), (0, 2, 0, 1))


@given(SAMPLES, st.integers(9, 30))
def test_a_trie_is_cut_where_the_fewest_tokens_are_repeated(samples, budget):
    samples = [[0, *sample] for sample in samples]
    forest, items = Forest.of(samples), items_of(samples)
    places = range(len(samples))

    def size(first, last):
        return Size.of(forest.order[first : last + 1], items, forest).tokens

    def fits(first, last):
        return size(first, last) <= budget

    ways = []
    for cuts in itertools.product([False, True], repeat=len(samples) - 1):
        edges = [0, *(at for at, cut in enumerate(cuts, 1) if cut), len(samples)]
        pieces = list(itertools.pairwise(edges))
        if all(fits(a, b - 1) or b - a == 1 for a, b in pieces):
            ways.append((sum(size(a, b - 1) for a, b in pieces), len(pieces)))
    found = fewest_repeats(places, forest.shared, fits)
    assert [place for piece in found for place in piece] == list(places)
    assert all(fits(piece[0], piece[-1]) or len(piece) == 1 for piece in found)
    assert (sum(size(piece[0], piece[-1]) for piece in found), len(found)) == min(ways)


@given(SAMPLES, st.integers(1, 4), st.integers(9, 30), st.integers(1, 9))
def test_a_plan_places_each_sample_once_and_counts_what_is_computed(samples, ranks, budget, chunk):
    items, forest = items_of(samples), Forest.of(samples)
    made = plan_step(items, forest, ranks=ranks, budget_tokens=budget, chunk_tokens=chunk, cost=COST)
    made.check(items, forest)
    for batches in made.ranks:
        for batch in batches:
            assert batch.tokens == len(beginnings([samples[i] for i in batch.items])) <= budget
            assert sum(items[i].tokens for i in batch.items) <= plan_.PATHS * budget
    if ranks == 1 and len(beginnings(samples)) <= budget and sum(map(len, samples)) <= plan_.PATHS * budget:
        assert made.tokens == len(beginnings(samples)), "what fits together repeats nothing"
    assert made.tokens <= sum(map(len, samples))
    again = plan_step(items, Forest.of(samples), ranks=ranks, budget_tokens=budget, chunk_tokens=chunk, cost=COST)
    assert again == made


def group(*, trials=8, prompt=60, own=40):
    """Of one prompt, and completions that share nothing."""
    return [[*range(prompt), *range(1000 * (trial + 1), 1000 * (trial + 1) + own)] for trial in range(trials)]


def test_a_group_on_one_rank_computes_its_prompt_once_and_on_several_once_each():
    items, forest = items_of(group()), Forest.of(group())
    for ranks in (1, 2, 4):
        made = plan_step(items, forest, ranks=ranks, budget_tokens=400, chunk_tokens=64, cost=COST)
        assert made.tokens == 60 * ranks + 8 * 40
        assert made.balance(items, forest, COST) > 0.98


def test_ranks_share_the_work_of_a_trie_although_that_repeats_tokens():
    """One rank with all of it would take as long as both with half of it and the stem."""
    samples = group(trials=2, prompt=10, own=90)
    made = plan_step(items_of(samples), Forest.of(samples), ranks=2, budget_tokens=400, chunk_tokens=64, cost=COST)
    assert [[batch.items for batch in batches] for batches in made.ranks] in ([[(0,)], [(1,)]], [[(1,)], [(0,)]])
    # Where there is next to nothing beside the stem, the parts are no shorter than the whole.
    samples = [[*range(90), 500 + trial] for trial in range(2)]
    made = plan_step(items_of(samples), Forest.of(samples), ranks=2, budget_tokens=400, chunk_tokens=64, cost=COST)
    assert made.tokens in (92, 182)


def test_what_begins_as_all_samples_do_keeps_no_rank_waiting():
    """All begin with the same token, as a tokenizer's first one."""
    rng = random.Random(0)
    samples = [[1, *(rng.randint(10, 10_000) for _ in range(rng.randint(20, 400)))] for _ in range(64)]
    items, forest = items_of(samples), Forest.of(samples)
    made = plan_step(items, forest, ranks=4, budget_tokens=2000, chunk_tokens=64, cost=COST)
    assert made.balance(items, forest, COST) > 0.9


def test_paths_are_bounded_since_keys_are_gathered_along_them():
    samples = [[*range(90), 500 + trial] for trial in range(40)]
    items, forest = items_of(samples), Forest.of(samples)
    made = plan_step(items, forest, ranks=1, budget_tokens=200, chunk_tokens=64, cost=COST)
    assert all(91 * len(batch.items) <= plan_.PATHS * 200 for batch in made.ranks[0])
    assert len(made.chunks) == -(-40 * 91 // (plan_.PATHS * 200))
    whole = MicroBatch(tuple(range(40)), 130, sum(item.trained for item in items))
    with pytest.raises(BadPlan, match="paths of 3640 tokens, 8 x the budget at most"):
        PackingPlan(200, 10_000, ((whole,),), (1,)).check(items, forest)


def test_a_plan_of_another_forest_is_refused():
    samples = group(trials=2)
    items, forest = items_of(samples), Forest.of(samples)
    made = plan_step(items, forest, ranks=1, budget_tokens=400, chunk_tokens=64, cost=COST)
    with pytest.raises(BadPlan, match="200 tokens in a budget of 400"):
        made.check(items, Forest.apart(2))


def test_many_samples_are_planned_in_a_second_or_so():
    """Linear in the samples but for sorting: 4,096 samples of 64 tries, by counting what is looked at."""
    rng = random.Random(1)
    stems = [[stem, *(rng.randint(0, 9) for _ in range(50))] for stem in range(64)]
    samples = [[*rng.choice(stems), *(rng.randint(0, 9) for _ in range(rng.randint(1, 30)))] for _ in range(4096)]
    forest = Forest.of(samples)
    asked = 0

    def fits(first, last):
        nonlocal asked
        asked += 1
        return last - first < 500

    for trie in forest.tries():
        fewest_repeats(trie, forest.shared, fits)
    assert asked <= 2 * len(samples)
