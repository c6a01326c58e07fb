"""One ratio for many tokens: against GSPO as its paper writes it, with autograd through the mean; and what must not change it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.errors import ConfigError
from steno_trainer.model.sequence_parallel import take_share
from steno_trainer.objective.loss import MEANS, Objective, Tokens, means, policy_loss
from steno_trainer.objective.mismatch import Correction, CorrectionLevel, Mismatch
from steno_trainer.objective.ratios import RatioLevel, Sequences, importance_ratios
from steno_trainer.packing.collate import collate
from tests.unit.trainer.rows import row

GSPO = Objective(clip_low=0.03, clip_high=0.04, mismatch=Mismatch(Correction.OFF))


def sequences(lengths):
    tokens = torch.tensor(lengths, dtype=torch.int64)
    index = torch.arange(len(lengths)).repeat_interleave(tokens)
    return Sequences(index, tokens[index], len(lengths))


def case(lengths, seed=0, spread=0.1, mismatched=True):
    """Tokens of so many sequences, each with an advantage, weighed as the mean over sequences of the mean over their tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = sequences(lengths)
    n = sum(lengths)

    def normal(scale, of=n):
        return scale * torch.randn(of, generator=generator, dtype=torch.float64)

    proximal = -3.0 + normal(1.0)
    tokens = Tokens(
        sampling_logprobs_N=proximal + (normal(0.5) if mismatched else 0.0),
        advantages_N=normal(1.0, len(lengths))[made.index_N],
        weights_N=1.0 / (len(lengths) * made.tokens_N.double()),
        loss_mask_N=torch.ones(n, dtype=torch.bool),
        proximal_logprobs_N=proximal,
    )
    drift = normal(spread, len(lengths))[made.index_N]
    return made, tokens, (proximal + drift + normal(spread)).requires_grad_(), torch.zeros(n, dtype=torch.float64)


def paper(lengths, tokens, logprobs, low, high):
    """Equations 5 and 7: -1/G sum of min(s A, clip(s) A), with s = (p(y) / p_old(y)) ^ (1 / |y|), and autograd through s."""
    total, at, clipped = torch.zeros((), dtype=torch.float64), 0, Counter()
    for length in lengths:
        here = slice(at, at + length)
        ratio = (logprobs[here].sum() - tokens.proximal_logprobs_N[here].sum()).exp() ** (1.0 / length)
        advantage = tokens.advantages_N[at]
        total = total - torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage) / len(lengths)
        clipped["high"] += bool(advantage > 0 and ratio > 1 + high)
        clipped["low"] += bool(advantage < 0 and ratio < 1 - low)
        at += length
    return total, clipped


@pytest.mark.parametrize("seed", range(5))
def test_loss_gradient_and_clipping_are_the_papers(seed):
    lengths = [1, 7, 3, 12, 2, 30, 5, 4]
    made, tokens, logprobs, entropies = case(lengths, seed)
    found = policy_loss(GSPO, tokens, logprobs, entropies, made)
    found.total.backward()
    ours, logprobs.grad = logprobs.grad, None
    expected, clipped = paper(lengths, tokens, logprobs, GSPO.clip_low, GSPO.clip_high)
    expected.backward()
    assert found.total.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(ours, logprobs.grad, rtol=1e-12, atol=1e-15)
    metrics = means(found.sums_M2, found.maxima_X)
    for side in ("high", "low"):
        assert metrics[f"policy/sequence_clip_{side}_fraction"] == pytest.approx(clipped[side] / len(lengths))
    assert 0 < clipped.total() < len(lengths), "or this would say little"
    assert (ours == 0).any() and (ours != 0).any()


def test_by_hand():
    """Log ratios 0.1 and 0.3, then -0.4: s is e^0.2, which is clipped above for a positive advantage; and e^-0.4, which is not,
    for a positive one."""
    logprobs = torch.tensor([-0.9, -0.7, -1.4], dtype=torch.float64, requires_grad=True)
    tokens = Tokens(
        sampling_logprobs_N=torch.full((3,), -1.0, dtype=torch.float64),
        advantages_N=torch.tensor([2.0, 2.0, 3.0], dtype=torch.float64),
        weights_N=torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64),
        loss_mask_N=torch.ones(3, dtype=torch.bool),
        proximal_logprobs_N=torch.full((3,), -1.0, dtype=torch.float64),
    )
    objective = Objective(clip_low=0.1, clip_high=0.1, mismatch=Mismatch(Correction.OFF))
    found = policy_loss(objective, tokens, logprobs, torch.zeros(3, dtype=torch.float64), sequences([2, 1]))
    found.total.backward()
    assert found.total.item() == pytest.approx(-0.25 * 1.1 * 2.0 * 2 - 0.5 * math.exp(-0.4) * 3.0)
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, -0.5 * math.exp(-0.4) * 3.0])
    assert means(found.sums_M2, found.maxima_X)["policy/sequence_clip_high_fraction"] == pytest.approx(0.5)
    assert means(found.sums_M2, found.maxima_X)["policy/clip_high_fraction"] == pytest.approx(2 / 3)


def test_sequences_of_one_token_are_the_token_level():
    made, tokens, logprobs, entropies = case([1] * 40)
    objective = Objective(entropy_bonus=0.01)
    by_token = policy_loss(objective, tokens, logprobs, entropies)
    by_token.total.backward()
    expected, logprobs.grad = logprobs.grad, None
    found = policy_loss(objective, tokens, logprobs, entropies, made)
    found.total.backward()
    assert found.total.item() == pytest.approx(by_token.total.item(), rel=1e-13)
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-13, atol=0)
    ours, theirs = (means(loss.sums_M2, loss.maxima_X) for loss in (found, by_token))
    own = ours.keys() - theirs.keys()
    assert own == {"policy/sequence_clip_high_fraction", "policy/sequence_clip_low_fraction"}
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-12)
    for name in own:
        assert ours[name] == pytest.approx(ours[name.replace("sequence_", "")])


def test_without_a_proximal_policy_the_level_changes_nothing():
    made, tokens, logprobs, entropies = case([3, 9, 4])
    tokens = replace(tokens, proximal_logprobs_N=None)
    grads = []
    for given_ in (None, made):
        logprobs.grad = None
        policy_loss(Objective(mismatch=GSPO.mismatch), tokens, logprobs, entropies, given_).total.backward()
        grads.append(logprobs.grad)
    torch.testing.assert_close(*grads, rtol=1e-14, atol=0)


@pytest.mark.parametrize("level", [None, CorrectionLevel.GEOMETRIC, CorrectionLevel.SEQUENCE])
@pytest.mark.parametrize("correction", Correction)
def test_the_correction_for_the_sampler_is_one_factor_per_sequence_of_the_papers_gradient(correction, level):
    """m is of the geometric mean of rho, as s is, or of their product: a factor for each token would make another gradient."""
    lengths = [4, 1, 9, 6, 12]
    made, tokens, logprobs, entropies = case(lengths, seed=3)
    low, high = (0.3, 3.0) if level is CorrectionLevel.SEQUENCE else (0.5, 1.1)
    settings = Mismatch(correction, low=low, high=high, level=level)
    found = policy_loss(replace(GSPO, mismatch=settings), tokens, logprobs, entropies, made)
    found.total.backward()
    ours, logprobs.grad = logprobs.grad, None
    paper(lengths, tokens, logprobs, GSPO.clip_low, GSPO.clip_high)[0].backward()
    factors = []
    for part in (tokens.proximal_logprobs_N - tokens.sampling_logprobs_N).split(lengths):
        rho = math.exp(sum(part.tolist()) / (1 if level is CorrectionLevel.SEQUENCE else len(part)))
        kept = {"off": 1.0, "truncated": min(rho, high), "masked": rho if low <= rho <= high else 0.0}
        factors += [kept[correction]] * len(part)
    m = torch.tensor(factors, dtype=torch.float64)
    torch.testing.assert_close(ours, m * logprobs.grad, rtol=1e-12, atol=1e-15)
    assert torch.equal(found.mismatch_masked_N, m == 0)
    assert (correction == "off") == (len(set(factors)) == 1), "or the bounds were met by nothing"


@pytest.mark.parametrize("level", [CorrectionLevel.GEOMETRIC, CorrectionLevel.SEQUENCE])
@pytest.mark.parametrize("correction", [Correction.TRUNCATED, Correction.MASKED])
def test_tokens_of_their_own_ratios_can_have_one_weight(correction, level):
    """PPO's gradient by token, times one factor for each sequence."""
    lengths = [4, 1, 9, 6, 12]
    made, tokens, logprobs, entropies = case(lengths, seed=3)
    low, high = (0.3, 3.0) if level is CorrectionLevel.SEQUENCE else (0.5, 1.1)
    objective = Objective(0.1, 0.1, mismatch=Mismatch(correction, low=low, high=high, level=level))
    found = policy_loss(objective, tokens, logprobs, entropies, None, made)
    found.total.backward()
    ours, logprobs.grad = logprobs.grad, None
    policy_loss(replace(objective, mismatch=Mismatch(Correction.OFF)), tokens, logprobs, entropies).total.backward()
    factors = []
    for part in (tokens.proximal_logprobs_N - tokens.sampling_logprobs_N).split(lengths):
        rho = math.exp(sum(part.tolist()) / (1 if level is CorrectionLevel.SEQUENCE else len(part)))
        kept = {"truncated": min(rho, high), "masked": rho if low <= rho <= high else 0.0}
        factors += [kept[correction]] * len(part)
    m = torch.tensor(factors, dtype=torch.float64)
    torch.testing.assert_close(ours, m * logprobs.grad, rtol=1e-12, atol=1e-15)
    assert torch.equal(found.mismatch_masked_N, m == 0) and len(set(factors)) > 1
    assert (
        means(found.sums_M2, found.maxima_X)
        .keys()
        .isdisjoint({"policy/sequence_clip_high_fraction", "policy/sequence_clip_low_fraction"})
    ), "each is clipped by itself"


def test_a_product_of_very_many_ratios_stays_a_number():
    made, tokens, logprobs, entropies = case([5000, 5000], mismatched=False)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64)[made.index_N]
    far = replace(tokens, sampling_logprobs_N=tokens.proximal_logprobs_N - sign)
    for correction in (Correction.TRUNCATED, Correction.MASKED):
        mismatch = Mismatch(correction, level=CorrectionLevel.SEQUENCE)
        found = policy_loss(Objective(0.1, 0.1, mismatch=mismatch), far, logprobs, entropies, None, made)
        assert found.total.isfinite() and bool(found.mismatch_masked_N.all()) == (correction == "masked")


def test_a_level_of_sequences_needs_sequences():
    _, tokens, logprobs, entropies = case([4, 6])
    objective = Objective(mismatch=Mismatch(level=CorrectionLevel.SEQUENCE))
    with pytest.raises(
        ConfigError, match="mismatch_level: got sequence, must be token: the loss was given no sequences"
    ):
        policy_loss(objective, tokens, logprobs, entropies)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 1000), cut=st.data(),
    level=st.sampled_from([None, CorrectionLevel.SEQUENCE, CorrectionLevel.GEOMETRIC]),
)  # fmt: skip
def test_ranks_that_share_a_micro_batch_add_up_to_one_that_does_not(lengths, seed, cut, level):
    """Any token on any of three ranks: what each adds is known to all, as an all-reduce makes it."""
    made, tokens, logprobs, entropies = case(lengths, seed)
    objective, by_token = GSPO, level is not None
    if by_token:
        objective = replace(GSPO, mismatch=Mismatch(Correction.MASKED, low=0.5, high=2.0, level=level))

    def both(shared):
        return (None, shared) if by_token else (shared, None)

    whole = policy_loss(objective, tokens, logprobs, entropies, *both(made))
    whole.total.backward()
    expected, logprobs.grad = logprobs.grad, None
    ranks = torch.tensor(cut.draw(st.lists(st.integers(0, 2), min_size=sum(lengths), max_size=sum(lengths))))
    parts: list[torch.Tensor] = []

    def part(rank, add):
        here = ranks == rank
        mine = Tokens(**{f.name: None if (v := getattr(tokens, f.name)) is None else v[here] for f in fields(Tokens)})
        shared = Sequences(made.index_N[here], made.tokens_N[here], made.count, add)
        return policy_loss(objective, mine, logprobs[here], entropies[here], *both(shared))

    def say(sums):
        parts.append(sums)
        return sums

    for rank in range(3):
        part(rank, say)
    found = [part(rank, lambda sums: torch.stack(parts).sum(0)) for rank in range(3)]
    sum(loss.total for loss in found).backward()
    assert sum(loss.total.item() for loss in found) == pytest.approx(whole.total.item(), rel=1e-11, abs=1e-14)
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-11, atol=1e-15)
    summed = torch.stack([loss.sums_M2 for loss in found]).sum(0)
    torch.testing.assert_close(summed, whole.sums_M2, rtol=1e-11, atol=1e-12)


def test_a_share_keeps_what_its_tokens_are_of():
    rows = [
        replace(row("a", 20, [3, 4, 5, 11, 12, 19]), completion_starts=(3, 11)),
        replace(row("b", 9, [2, 8]), completion_starts=(2, 7)),
    ]
    packed = collate(rows, {"a": 1.0, "b": -1.0}, [0.1, 0.2], RatioLevel.COMPLETION)
    assert packed.sequence_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 3]
    shares = [take_share(packed, ranks=3, rank=rank) for rank in range(3)]
    for name in ("sequence_N", "sequence_tokens_N"):
        assert torch.equal(torch.cat([getattr(share.packed, name) for share in shares]), getattr(packed, name))
    assert {share.packed.sequences for share in shares} == {4}


def test_what_is_outside_the_mask_is_in_no_mean():
    made, tokens, logprobs, entropies = case([4, 6])
    inside = torch.tensor([True, False, True, True, True, True, False, True, False, True])
    kept = torch.tensor([3, 4])
    masked = Sequences(made.index_N, kept[made.index_N], 2)
    spoilt = replace(
        tokens, loss_mask_N=inside, proximal_logprobs_N=tokens.proximal_logprobs_N.masked_fill(~inside, math.nan)
    )
    found = policy_loss(GSPO, spoilt, logprobs, entropies, masked)
    alone = Tokens(**{f.name: None if (v := getattr(tokens, f.name)) is None else v[inside] for f in fields(Tokens)})
    expected = policy_loss(GSPO, alone, logprobs[inside], entropies[inside], sequences([3, 4]))
    assert found.total.item() == pytest.approx(expected.total.item(), rel=1e-13)
    torch.testing.assert_close(found.sums_M2, expected.sums_M2)


def test_by_token_nothing_is_measured_of_sequences_and_a_dummy_adds_nothing():
    _, tokens, logprobs, entropies = case([4, 6])
    rows = [MEANS.index(f"policy/sequence_clip_{side}_fraction") for side in ("high", "low")]
    assert (policy_loss(GSPO, tokens, logprobs, entropies).sums_M2[rows] == 0).all()
    none = Tokens(**{f.name: None if (v := getattr(tokens, f.name)) is None else v[:0] for f in fields(Tokens)})
    empty = policy_loss(GSPO, none, logprobs[:0], entropies[:0], sequences([]))
    empty.total.backward()
    assert empty.total.item() == 0.0 and means(empty.sums_M2, empty.maxima_X) == {}


def test_a_ratio_of_hundreds_stays_finite():
    far = torch.tensor([500.0, -900.0, 0.1], requires_grad=True)
    ratios = importance_ratios(far, sequences([1, 2]))
    ratios.sum().backward()
    assert ratios.tolist() == pytest.approx([math.exp(20.0), *[math.exp(-9.95)] * 2])
    assert far.grad.isfinite().all()
