"""Rows laid out as tries: every row finds its tokens, its positions and what it sees; what is trained stays a list of tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from steno_trainer.model.sequence_parallel import take_share
from steno_trainer.objective.ratios import RatioLevel
from steno_trainer.packing.collate import PackedBatch, collate
from tests.unit.trainer.rows import row

SAMPLES = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=12)
BY_TOKEN = [name for name in PackedBatch.__dataclass_fields__ if name.endswith("_N") and name != "predictor_N"]


def rows_of(samples):
    made = []
    for number, ids in enumerate(samples):
        one = row(f"t{number % 3}", len(ids), [t for t in range(1, len(ids)) if (t + number) % 3], seed=number)
        made.append(replace(one, token_ids_T=torch.tensor(ids), temperatures_T=0.5 + torch.rand(len(ids))))
    return made


def laid_out(rows, level=RatioLevel.TOKEN, *, share=True):
    advantages = {"t0": 1.0, "t1": -1.0, "t2": 0.5}
    return collate(rows, advantages, [0.1 * (n + 1) for n in range(len(rows))], level, share=share)


def seen_from(packed):
    """Of each position in S the ids up to it, as attention is told of them."""
    found = {}
    for (start, end), path in zip(pairwise(packed.starts_Q1.tolist()), packed.paths, strict=True):
        before = [at for first, last in path for at in range(first, last)]
        for at in range(start, end):
            reached = [*before, *range(start, at + 1)]
            assert packed.position_ids_1S[0, reached].tolist() == list(range(len(reached)))
            found[at] = tuple(packed.input_ids_1S[0, reached].tolist())
    return found


@given(SAMPLES, st.sampled_from(RatioLevel))
def test_each_beginning_is_there_once_and_predicts_what_it_should(samples, level):
    rows = rows_of(samples)
    packed, apart = laid_out(rows, level), laid_out(rows, level, share=False)
    seen = seen_from(packed)
    expected = {tuple(ids[:end]) for ids in samples for end in range(1, len(ids) + 1)}
    assert len(seen) == len(expected) and {*seen.values()} == expected
    for name in BY_TOKEN:
        assert torch.equal(getattr(packed, name), getattr(apart, name)), f"{name}: in the order of rows, one for each"
    assert packed.sequences == apart.sequences
    before = [tuple(ids[:t]) for ids, one in zip(samples, rows, strict=True) for t in one.loss_mask_T.nonzero()[:, 0]]
    assert [seen[at] for at in packed.predictor_N.tolist()] == before
    assert not any(apart.paths) and len(apart.paths) == len(rows)


@given(SAMPLES, st.integers(2, 4))
def test_ranks_that_share_a_micro_batch_hold_each_trained_token_once(samples, ranks):
    packed = laid_out(rows_of(samples))
    shares = [take_share(packed, ranks=ranks, rank=rank) for rank in range(ranks)]
    length = shares[0].packed.input_ids_1S.shape[1]
    found = torch.cat([share.chosen for share in shares]).sort()[0]
    assert torch.equal(found, torch.arange(len(packed.targets_N)))
    for rank, share in enumerate(shares):
        assert share.packed.input_ids_1S.shape[1] == length
        assert torch.equal(share.packed.predictor_N + rank * length, packed.predictor_N[share.chosen])
        segments = share.segments
        assert segments.starts[-1] == ranks * length and len(segments.paths) == len(segments.starts) - 1
        assert segments.paths[: len(packed.paths)] == packed.paths


def test_what_shares_nothing_is_laid_out_as_one_after_the_other():
    rows = rows_of([[2, 1, 0], [0, 1], [1, 1, 1, 1]])
    packed = laid_out(rows)
    assert packed.paths == ((), (), ())
    assert packed.input_ids_1S.tolist() == [[0, 1, 1, 1, 1, 1, 2, 1, 0]]
    assert packed.starts_Q1.tolist() == [0, 2, 6, 9]


def test_a_row_that_goes_on_where_another_ends_is_of_its_segment():
    """Then attention is one causal call over both, and nothing is gathered."""
    packed = laid_out(rows_of([[1, 2, 0, 1], [1, 2], [1, 2], [1, 2, 0]]))
    assert packed.starts_Q1.tolist() == [0, 4] and packed.paths == ((),)
    forked = laid_out(rows_of([[1, 2, 0], [1, 2], [1, 2, 2], [1, 2, 2, 0, 0], [1, 0]]))
    assert forked.input_ids_1S.tolist() == [[1, 0, 2, 0, 2, 0, 0]]
    assert forked.starts_Q1.tolist() == [0, 2, 4, 7]
    assert forked.paths == ((), ((0, 1),), ((0, 1), (2, 3)))


def test_keys_are_gathered_along_whole_paths():
    segments = take_share(laid_out(rows_of([[1, 2, 0], [1, 2, 2, 0], [0, 1]]))).segments
    assert segments.starts == (0, 2, 5, 7)
    assert segments.pieces == [(0, 2), (2, 5), (2, 4), (5, 7)]
    assert segments.key_starts == (0, 2, 5, 9) and segments.key_starts_Q1.tolist() == [0, 2, 5, 9]
    assert (segments.longest_own, segments.longest, segments.branches) == (3, 4, True)
    assert segments.for_kernels() == {}, "nobody who keeps a state from token to token may read these"
