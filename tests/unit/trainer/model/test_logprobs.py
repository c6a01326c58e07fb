"""Chunked log-probabilities: exact against float64, autograd-correct, and never [tokens, vocabulary] at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steno_trainer.errors import BadBatch
from steno_trainer.model.logprobs import LogprobHead, token_logprobs

N, D, V = 23, 6, 37


def case(dtype=torch.float64, n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (n,), generator=generator)
    temperatures = torch.rand(n, generator=generator) + 0.5
    return hidden, weight, targets, temperatures


def reference(hidden, weight, targets, temperatures):
    """The definition, whole and in float64."""
    z = (hidden.double() @ weight.double().T) / temperatures.double()[:, None]
    p = torch.softmax(z, dim=-1)
    logp = torch.log_softmax(z, dim=-1)
    return logp[torch.arange(len(targets)), targets], -(p * logp).sum(-1)


@pytest.mark.parametrize("chunks", [1, 2, 7, N, N + 5])
def test_values_and_gradients_are_those_of_the_definition(chunks):
    hidden, weight, targets, temperatures = case()
    coefficients = torch.linspace(-2, 3, N, dtype=torch.float64), torch.linspace(1, -1, N, dtype=torch.float64)

    def gradients(values):
        total = sum((value * by).sum() for value, by in zip(values, coefficients, strict=True))
        return torch.autograd.grad(total, (hidden, weight))

    ours = token_logprobs(hidden, weight, targets, temperatures, chunks)
    theirs = reference(hidden, weight, targets, temperatures)
    for mine, other in zip((*ours, *gradients(ours)), (*theirs, *gradients(theirs)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


def test_gradients_agree_with_finite_differences():
    hidden, weight, targets, temperatures = case(n=5)
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, targets, temperatures, 2), (hidden, weight))


@pytest.mark.parametrize("which", [0, 1])
def test_each_result_can_be_used_alone(which):
    hidden, weight, targets, temperatures = case()
    mine = torch.autograd.grad(token_logprobs(hidden, weight, targets, temperatures, 3)[which].sum(), (hidden, weight))
    other = torch.autograd.grad(reference(hidden, weight, targets, temperatures)[which].sum(), (hidden, weight))
    torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


def test_the_temperature_is_each_tokens_own():
    hidden, weight, targets, _ = case()
    warm = torch.full((N,), 0.6)
    warm[::2] = 1.3
    mixed, _ = token_logprobs(hidden, weight, targets, warm, 2)
    for temperature, where in ((0.6, slice(1, None, 2)), (1.3, slice(0, None, 2))):
        alone, _ = token_logprobs(hidden, weight, targets, torch.full((N,), temperature), 2)
        torch.testing.assert_close(mixed[where], alone[where])
    assert (mixed - token_logprobs(hidden, weight, targets, torch.ones(N), 2)[0]).abs().max() > 0.01


def test_bfloat16_logits_are_summed_up_in_float32():
    hidden, weight, targets, temperatures = case(torch.bfloat16)
    logprobs, entropies = token_logprobs(hidden, weight, targets, temperatures, 3)
    assert (logprobs.dtype, entropies.dtype) == (torch.float32, torch.float32)
    z = (hidden @ weight.T).double() / temperatures[:, None].double()
    expected = torch.log_softmax(z, -1)[torch.arange(N), targets]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    (logprobs.sum() + entropies.sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    sum(value.sum() for value in reference(*exact, targets, temperatures)).backward()
    torch.testing.assert_close(weight.grad.double(), exact[1].grad, rtol=0.05, atol=0.05)


def test_logits_of_hundreds_do_not_overflow():
    hidden, weight, targets, temperatures = case(torch.float32)
    logprobs, entropies = token_logprobs(hidden * 1e3, weight, targets, temperatures, 2)
    (logprobs.sum() + entropies.sum()).backward()
    assert all(tensor.isfinite().all() for tensor in (logprobs, entropies, hidden.grad, weight.grad))


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_dummy_stays_in_the_graph_and_changes_nothing(chunks):
    hidden, weight, targets, temperatures = case(n=0)
    logprobs, entropies = token_logprobs(hidden, weight, targets, temperatures, chunks)
    (logprobs.sum() + entropies.sum()).backward()
    assert (weight.grad == 0).all()
    assert hidden.grad.shape == (0, D)


def test_a_state_that_is_not_a_number_spoils_its_own_row_only():
    hidden, weight, targets, temperatures = case()
    with torch.no_grad():
        hidden[3] = float("nan")
    by = torch.ones(N)
    by[3] = 0.0
    logprobs, _ = token_logprobs(hidden, weight, targets, temperatures, 2)
    assert logprobs.isnan().tolist() == [i == 3 for i in range(N)]
    torch.where(by > 0, logprobs, 0.0).sum().backward()
    assert weight.grad.isfinite().all()
    assert (hidden.grad[3] == 0).all()


def test_nothing_as_wide_as_the_vocabulary_is_kept_for_the_backward_pass():
    hidden, weight, targets, temperatures = case(torch.float32, n=200)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        token_logprobs(hidden, weight, targets, temperatures, 20)
    assert sum(saved) == 200 * D + V * D + 4 * 200, "states, weight, and four numbers per token"
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        reference(hidden, weight, targets, temperatures)
    assert max(saved) >= 200 * V, "which the plain way does keep"


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_operation_forward_or_backward_makes_more_than_one_chunk_of_logits():
    n, vocabulary, chunks = 64, 997, 8
    hidden, weight = torch.randn(n, 2, requires_grad=True), torch.randn(vocabulary, 2, requires_grad=True)
    with Largest() as seen:
        logprobs, entropies = token_logprobs(hidden, weight, torch.arange(n), torch.ones(n), chunks)
        (logprobs.sum() + entropies.sum()).backward()
    assert seen.elements == n // chunks * vocabulary


def test_a_frozen_head_or_a_frozen_body_gets_no_gradient():
    hidden, weight, targets, temperatures = case()
    token_logprobs(hidden, weight.detach(), targets, temperatures, 2)[0].sum().backward()
    assert weight.grad is None and hidden.grad is not None
    token_logprobs(hidden.detach(), weight, targets, temperatures, 2)[0].sum().backward()
    assert weight.grad is not None


def test_the_head_module_owns_the_weight_it_is_given():
    hidden, weight, targets, temperatures = case()
    head = LogprobHead(nn.Parameter(weight.detach()))
    logprobs, _ = head(hidden, targets, temperatures, 3)
    torch.testing.assert_close(logprobs, reference(hidden, weight, targets, temperatures)[0])
    logprobs.sum().backward()
    assert head.weight.grad.abs().sum() > 0


def test_what_does_not_fit_is_refused_by_name():
    hidden, weight, targets, temperatures = case()
    for wrong, what in (
        ((hidden[1:], weight, targets, temperatures, 1), "23 targets"),
        ((hidden, weight, targets, temperatures[1:], 1), "23 targets"),
        ((hidden, torch.empty(0), targets, temperatures, 1), "LogprobHead"),
        ((hidden, weight, targets, temperatures, 0), "0 chunks"),
    ):
        with pytest.raises(BadBatch, match=what):
            token_logprobs(*wrong)
