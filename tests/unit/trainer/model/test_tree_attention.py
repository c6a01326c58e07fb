"""Attention over a trie is that over each of its paths: forward and backward, with windows, and by the lengths that GPUs get."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steno_trainer.model import attention
from steno_trainer.model.attention import TILE, Segments, packed_attention
from steno_trainer.model.paths import Made, Paths
from steno_trainer.model.sharing import aligned_to_the_end

HEADS, GROUPS, SIZE = 4, 2, 8


def segments_of(starts, paths):
    return Segments(tuple(starts), torch.tensor(starts, dtype=torch.int32), tuple(map(tuple, paths)))


def random_tree(rng):
    """Segments, each of which goes on from some point of a path that is there."""
    starts, paths, whole = [0], [], []
    for _ in range(rng.randint(1, 6)):
        path = []
        if whole and rng.random() < 0.7:
            path = rng.choice(whole)
            *kept, (first, last) = path[: rng.randint(1, len(path))]
            path = [*kept, (first, rng.randint(first + 1, last))]
        starts.append(starts[-1] + rng.randint(1, 9))
        paths.append(path)
        whole.append([*path, (starts[-2], starts[-1])])
    return segments_of(starts, paths)


def given_tensors(tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(1, heads, tokens, SIZE, generator=generator, dtype=dtype).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]


def by_mask(q, k, v, segments, window=None):
    """[S, S]: who sees whom, token by token."""
    seen = torch.zeros(segments.starts[-1], segments.starts[-1], dtype=torch.bool)
    for (start, end), path in zip(pairwise(segments.starts), segments.paths, strict=True):
        before = [at for first, last in path for at in range(first, last)]
        for at in range(start, end):
            reached = [*before, *range(start, at + 1)]
            seen[at, reached[-window:] if window else reached] = True
    wide = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, *wide, attn_mask=seen).transpose(1, 2)


def compare(segments, window=None):
    results = []
    weights = None
    for attend in (
        lambda *x: packed_attention(nn.Module(), *x, None, segments=segments, sliding_window=window)[0],
        None,
    ):
        tensors = given_tensors(segments.starts[-1])
        out = attend(*tensors) if attend else by_mask(*tensors, segments, window)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        (out * weights).sum().backward()
        results.append([out.detach(), *(tensor.grad for tensor in tensors)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)


@given(st.randoms(use_true_random=False), st.sampled_from([None, 1, 2, 3, 5, 8, 40]))
def test_attention_over_a_trie_is_that_over_its_paths(rng, window):
    compare(random_tree(rng), window)


@pytest.mark.parametrize("own", [1, TILE - 1, TILE, TILE + 1, 2 * TILE + 3])
def test_a_long_segment_is_cut_into_tiles(own):
    compare(segments_of([0, 70, 70 + own], [(), ((0, 50),)]))


def test_gradients_of_what_branches_share_are_added_up_in_float32():
    x = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    Paths(x).along([(0, 1)] * 512).tensor.sum().backward()
    assert x.grad.item() == 512, "256 + 1 is 256 in bfloat16"


def lower_right(q, k, v, starts, key_starts, longest_own, longest, scaling, window):
    """What variable-length attention is asked for, in the form that a GPU's kernel has. Grouped heads as there."""
    parts = []
    for (a, b), (c, d) in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        own, whole = b - a, d - c
        assert own <= longest_own and whole <= longest
        seen = torch.ones(own, whole, dtype=torch.bool).tril(whole - own)
        seen = seen if window is None else seen & ~torch.ones(own, whole, dtype=torch.bool).tril(whole - own - window)
        wide = (x[c:d].transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (k, v))
        parts.append(F.scaled_dot_product_attention(q[a:b].transpose(0, 1), *wide, attn_mask=seen, scale=scaling))
    return torch.cat(parts, 1).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 2, 5])
def test_a_kernel_for_variable_lengths_is_told_the_same_lengths(window, monkeypatch):
    """The way of GPUs, with a kernel of plain torch in the place of theirs."""
    segments = segments_of([0, 5, 8, 9, 13], [(), ((0, 3),), ((0, 3), (5, 7)), ()])
    monkeypatch.setattr(attention, "variable_lengths", lower_right)
    q, k, v = given_tensors(13)
    found = attention._one_kernel(q[0], k[0], v[0], segments, None, window)
    torch.testing.assert_close(found.transpose(0, 1)[None], by_mask(q, k, v, segments, window))


def upper_left(q, k, v, starts, key_starts, *_):
    """As kernels were before FlashAttention 2.1."""
    parts = []
    for (a, b), (c, d) in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril()
        parts.append(
            F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d])), attn_mask=seen)
        )
    return torch.cat(parts, 1).transpose(0, 1)


class Kernel(torch.autograd.Function):
    """Keeps what it was given for the backward pass, as a GPU's does, which is that of `backwards`."""

    @staticmethod
    def forward(ctx, q, k, v, starts, key_starts, backwards):
        ctx.save_for_backward(q, k, v, starts, key_starts)
        ctx.backwards = backwards
        return lower_right(q, k, v, starts, key_starts, 1000, 1000, None, None)

    @staticmethod
    def backward(ctx, grad):
        *kept, starts, key_starts = ctx.saved_tensors  # once: each look gathers again
        with torch.enable_grad():
            tensors = [x.detach().requires_grad_() for x in kept]
            out = ctx.backwards(*tensors, starts, key_starts, 1000, 1000, None, None)
        return (*torch.autograd.grad(out, tensors, grad), None, None, None)


@pytest.mark.parametrize("kernel", [False, True])
def test_what_is_gathered_along_paths_is_gathered_again_in_the_backward_pass(kernel, monkeypatch):
    """All paths together are several times as long as a micro-batch, so autograd keeps none of them."""
    gathered = []

    def along(self, pieces, repeats=1, real=Paths.along):
        found = real(self, pieces, repeats)

        def again():
            gathered.append(pieces)
            return found.again()

        return Made(found.tensor, again)

    monkeypatch.setattr(Paths, "along", along)
    monkeypatch.setattr(attention, "variable_lengths", lambda *x: Kernel.apply(*x[:5], lower_right))
    segments = segments_of([0, 5, 8, 9, 13], [(), ((0, 3),), ((0, 3), (5, 7)), ()])
    q, k, v = given_tensors(13)
    out = (attention._one_kernel if kernel else attention._one_by_one)(q[0], k[0], v[0], segments, None, None)
    assert not gathered
    out.sum().backward()
    assert len(gathered) == (2 if kernel else 8), "keys and values, of each call"
    expected = given_tensors(13)
    by_mask(*expected, segments).sum().backward()
    for ours, theirs in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-13)


def test_a_kernel_is_asked_how_it_aligns_fewer_queries_than_keys():
    device = torch.device("cpu")
    assert aligned_to_the_end(device, lower_right)
    assert not aligned_to_the_end(device, upper_left)
    assert not aligned_to_the_end(device, lambda *x: Kernel.apply(*x[:5], upper_left)), (
        "its gradients are asked for too"
    )
