"""The objective, its correction and its metrics, against plain float64 loops written from the papers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from steno.contracts.errors import ConfigError
from steno_trainer.errors import BadBatch
from steno_trainer.objective import cispo
from steno_trainer.objective.loss import MAXIMA, MEANS, Objective, Tokens, means, policy_loss
from steno_trainer.objective.mismatch import Correction, Mismatch, correct

N = 64


def case(seed=0, spread=0.8, n=N, proximal=True, reference=True):
    """Log-probabilities that differ enough for every bound to be met somewhere."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    sampling = -torch.rand(n, generator=generator, dtype=torch.float64) * 5
    near = sampling + normal(spread)
    tokens = Tokens(
        sampling_logprobs_N=sampling,
        advantages_N=normal(1.0),
        weights_N=torch.rand(n, generator=generator, dtype=torch.float64),
        loss_mask_N=torch.rand(n, generator=generator) < 0.7,
        proximal_logprobs_N=near if proximal else None,
        reference_logprobs_N=sampling + normal(0.3) if reference else None,
    )
    logprobs = (near + normal(0.4)).requires_grad_()
    entropies = torch.rand(n, generator=generator, dtype=torch.float64).requires_grad_()
    return tokens, logprobs, entropies


def by_hand(objective, tokens, logprobs, entropies):
    """One token after the other, with math and nothing else. Returns the loss and the metrics."""
    settings, total, rows = objective.mismatch, 0.0, []
    for i in range(len(logprobs)):
        if not tokens.loss_mask_N[i]:
            continue
        now, asked = logprobs[i].item(), tokens.sampling_logprobs_N[i].item()
        near = tokens.proximal_logprobs_N[i].item() if tokens.proximal_logprobs_N is not None else now
        advantage, entropy = tokens.advantages_N[i].item(), entropies[i].item()
        if objective.distillation:
            advantage += objective.distillation * (tokens.reference_logprobs_N[i].item() - near)
        rho, masked, truncated = math.exp(near - asked), False, False
        if settings.correction is Correction.OFF:
            m = 1.0
        elif settings.correction is Correction.TRUNCATED:
            truncated, m = rho > settings.high, min(rho, settings.high)
        else:
            masked = not settings.low <= rho <= settings.high
            m = 0.0 if masked else rho
        r = math.exp(now - near)
        bounded = min(max(r, 1 - objective.clip_low), 1 + objective.clip_high)
        value = -m * min(r * advantage, bounded * advantage)
        k3 = away = None
        if tokens.reference_logprobs_N is not None:
            x = tokens.reference_logprobs_N[i].item() - now
            k3, away = math.exp(x) - x - 1, -x
            value += objective.reference_kl * k3
        value -= objective.entropy_bonus * entropy
        total += tokens.weights_N[i].item() * value
        rows.append({
            "policy/ratio": r,
            "policy/clip_high_fraction": float(advantage > 0 and r > 1 + objective.clip_high),
            "policy/clip_low_fraction": float(advantage < 0 and r < 1 - objective.clip_low),
            "policy/kl": r - 1 - math.log(r),
            "policy/entropy": entropy,
            "reference/kl": k3,
            "reference/log_ratio": away,
            "mismatch/kl": asked - near,
            "mismatch/kl_k3": rho - 1 - math.log(rho),
            "mismatch/ratio": rho,
            "mismatch/logprob_difference": abs(asked - near),
            "mismatch/truncated_fraction": float(truncated),
            "mismatch/masked_fraction": float(masked),
            "policy/ratio_max": r,
            "mismatch/ratio_max": rho,
        })  # fmt: skip
    metrics = {name: sum(row[name] for row in rows) / len(rows) for name in MEANS if rows[0].get(name) is not None}
    return total, metrics | {name: max(row[name] for row in rows) for name in MAXIMA}


OBJECTIVES = [
    Objective(mismatch=Mismatch(Correction.OFF)),
    Objective(),
    Objective(clip_low=0.1, clip_high=0.5, mismatch=Mismatch(Correction.TRUNCATED, high=1.2)),
    Objective(mismatch=Mismatch(Correction.MASKED, low=0.6, high=1.5)),
    Objective(reference_kl=0.1, entropy_bonus=0.02, mismatch=Mismatch(Correction.MASKED)),
    Objective(distillation=0.7, reference_kl=0.1),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("proximal", [True, False])
def test_the_loss_and_every_metric_are_their_formulas(objective, proximal):
    for seed in range(3):
        tokens, logprobs, entropies = case(seed, proximal=proximal)
        found = policy_loss(objective, tokens, logprobs, entropies)
        total, metrics = by_hand(objective, tokens, logprobs, entropies)
        assert found.total.item() == pytest.approx(total, rel=1e-12)
        assert means(found.sums_M2, found.maxima_X) == pytest.approx(metrics, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("correction", Correction)
def test_around_the_sampler_the_ratio_is_to_what_was_recorded_and_corrects_itself(correction):
    """As PPO has it, with the sampler's probabilities as the old ones: clipped although there is one optimizer step."""
    tokens, logprobs, entropies = case(proximal=False)
    found = policy_loss(Objective(mismatch=Mismatch(correction), around_sampler=True), tokens, logprobs, entropies)
    plain = Objective(mismatch=Mismatch(Correction.OFF))
    total, metrics = by_hand(
        plain, replace(tokens, proximal_logprobs_N=tokens.sampling_logprobs_N), logprobs, entropies
    )
    assert found.total.item() == pytest.approx(total, rel=1e-12)
    kept = {name: value for name, value in metrics.items() if not name.startswith("mismatch/")}
    assert means(found.sums_M2, found.maxima_X) == pytest.approx(kept, rel=1e-12, abs=1e-12)
    assert kept["policy/clip_high_fraction"] > 0 < kept["policy/clip_low_fraction"]
    assert not found.mismatch_masked_N.any()


@pytest.mark.parametrize("sampled_by", ["policy", "another"])
def test_distillation_follows_the_gradient_of_the_kl_to_the_teacher(sampled_by):
    """Of KL(policy || teacher) of the next token, exactly: every token of a vocabulary once, weighed by how likely it was. What
    another policy sampled is corrected for, by m or by the ratio to it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, generator=generator, dtype=torch.float64).requires_grad_()
    teacher, other = torch.log_softmax(torch.randn(2, 9, generator=generator, dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)
    assert expected.abs().max() > 0.01
    drawn = logprobs.detach() if sampled_by == "policy" else other
    all_of_them = torch.ones(9, dtype=torch.bool)
    tokens = Tokens(drawn, torch.zeros(9), drawn.exp(), all_of_them, reference_logprobs_N=teacher)
    for objective in (
        Objective(distillation=0.25, mismatch=Mismatch(Correction.TRUNCATED, high=math.inf)),
        Objective(distillation=0.25, around_sampler=True, losses=cispo.losses, clip_low=1.0, clip_high=math.inf),
    ):
        found = policy_loss(objective, tokens, logprobs, torch.zeros(9, dtype=torch.float64))
        (gradient,) = torch.autograd.grad(found.total, logits, retain_graph=True)
        assert gradient.tolist() == pytest.approx((0.25 * expected).tolist(), abs=1e-12)


def test_the_case_meets_every_bound():
    """Or the test above would say little."""
    tokens, logprobs, entropies = case()
    seen = policy_loss(OBJECTIVES[3], tokens, logprobs, entropies)
    truncated = policy_loss(OBJECTIVES[2], tokens, logprobs, entropies)
    found = means(seen.sums_M2, seen.maxima_X)
    assert min(found[f"policy/clip_{side}_fraction"] for side in ("high", "low")) > 0
    assert 0 < found["mismatch/masked_fraction"] < 1
    assert 0 < means(truncated.sums_M2, truncated.maxima_X)["mismatch/truncated_fraction"] < 1


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_gradient_is_that_of_the_formula(objective):
    """Central differences of the loops above: also that no gradient flows through importance weights."""
    tokens, logprobs, entropies = case(n=12)
    policy_loss(objective, tokens, logprobs, entropies).total.backward()
    step = 1e-6
    for given, gradient in ((logprobs, logprobs.grad), (entropies, entropies.grad)):
        if gradient is None:
            assert objective.entropy_bonus == 0.0 and given is entropies
            continue
        for i in range(12):
            values = []
            for sign in (1, -1):
                moved = given.detach().clone()
                moved[i] += sign * step
                arguments = (moved, entropies) if given is logprobs else (logprobs, moved)
                values.append(by_hand(objective, tokens, *arguments)[0])
            assert gradient[i].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-8)


def test_on_policy_the_gradient_is_the_policy_gradient():
    """r is 1; what remains is w m A d logprob."""
    tokens, logprobs, entropies = case(proximal=False, reference=False)
    settings = Mismatch(Correction.TRUNCATED)
    policy_loss(Objective(mismatch=settings), tokens, logprobs, entropies).total.backward()
    rho = (logprobs.detach() - tokens.sampling_logprobs_N).exp().clamp(max=2.0)
    expected = torch.where(tokens.loss_mask_N, -tokens.weights_N * rho * tokens.advantages_N, 0.0)
    torch.testing.assert_close(logprobs.grad, expected)


def test_the_sampler_can_be_the_proximal_policy():
    tokens, logprobs, entropies = case(reference=False)
    tokens = replace(tokens, proximal_logprobs_N=tokens.sampling_logprobs_N)
    found = policy_loss(Objective(), tokens, logprobs, entropies)
    assert means(found.sums_M2, found.maxima_X)["mismatch/ratio"] == 1.0
    off = policy_loss(Objective(mismatch=Mismatch(Correction.OFF)), tokens, logprobs, entropies)
    assert found.total.item() == off.total.item()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nothing_outside_the_mask_reaches_loss_gradient_or_metrics(objective):
    tokens, logprobs, entropies = case()
    clean = policy_loss(objective, tokens, logprobs, entropies)
    clean.total.backward()
    outside = ~tokens.loss_mask_N
    spoilt = Tokens(
        **{
            name: torch.where(outside, bad, getattr(tokens, name))
            for name, bad in (
                ("sampling_logprobs_N", math.nan), ("advantages_N", math.inf), ("weights_N", math.nan),
                ("proximal_logprobs_N", -math.inf), ("reference_logprobs_N", math.nan),
            )
        },
        loss_mask_N=tokens.loss_mask_N,
    )  # fmt: skip
    bad_logprobs = torch.where(outside, math.nan, logprobs.detach()).requires_grad_()
    bad_entropies = torch.where(outside, math.nan, entropies.detach()).requires_grad_()
    found = policy_loss(objective, spoilt, bad_logprobs, bad_entropies)
    found.total.backward()
    assert found.total.item() == clean.total.item()
    torch.testing.assert_close(bad_logprobs.grad, logprobs.grad, rtol=0, atol=0)
    torch.testing.assert_close(found.sums_M2, clean.sums_M2, rtol=0, atol=0)
    assert (bad_logprobs.grad[outside] == 0).all()


def test_a_missing_log_probability_of_a_trained_token_is_seen_and_not_hidden():
    tokens, logprobs, entropies = case()
    tokens.sampling_logprobs_N[tokens.loss_mask_N.nonzero()[0]] = math.nan
    assert policy_loss(Objective(), tokens, logprobs, entropies).total.isnan()


@pytest.mark.parametrize("difference", [500.0, -500.0])
def test_log_ratios_of_hundreds_stay_finite(difference):
    tokens, logprobs, entropies = case(reference=False)
    far = replace(tokens, sampling_logprobs_N=tokens.sampling_logprobs_N - difference)
    found = policy_loss(Objective(mismatch=Mismatch(Correction.TRUNCATED)), far, logprobs, entropies)
    (found.total + policy_loss(Objective(), tokens, logprobs + difference, entropies).total).backward()
    assert logprobs.grad.isfinite().all()
    assert all(math.isfinite(value) for value in means(found.sums_M2, found.maxima_X).values())


def test_masked_tokens_are_named_for_the_ledger():
    tokens, logprobs, entropies = case()
    found = policy_loss(Objective(mismatch=Mismatch(Correction.MASKED)), tokens, logprobs, entropies)
    rho = (tokens.proximal_logprobs_N - tokens.sampling_logprobs_N).exp()
    assert torch.equal(found.mismatch_masked_N, tokens.loss_mask_N & ((rho < 0.5) | (rho > 2.0)))
    assert not policy_loss(Objective(), tokens, logprobs, entropies).mismatch_masked_N.any()


def test_parts_add_up_to_the_whole():
    tokens, logprobs, entropies = case()
    whole = policy_loss(Objective(reference_kl=0.1), tokens, logprobs, entropies)
    parts = []
    for at in (slice(0, 5), slice(5, 40), slice(40, 40), slice(40, N)):
        cut = Tokens(**{name: getattr(tokens, name)[at] for name in Tokens.__dataclass_fields__})
        parts.append(policy_loss(Objective(reference_kl=0.1), cut, logprobs[at], entropies[at]))
    assert sum(part.total.item() for part in parts) == pytest.approx(whole.total.item(), rel=1e-12)
    summed = torch.stack([part.sums_M2 for part in parts]).sum(0)
    highest = torch.stack([part.maxima_X for part in parts]).amax(0)
    assert means(summed, highest) == pytest.approx(means(whole.sums_M2, whole.maxima_X), rel=1e-12)


def test_a_micro_batch_without_tokens_has_a_graph_and_no_metrics():
    tokens, logprobs, entropies = case(n=0, reference=False)
    found = policy_loss(Objective(), tokens, logprobs, entropies)
    found.total.backward()
    assert found.total.item() == 0.0
    assert means(found.sums_M2, found.maxima_X) == {}


def test_what_was_not_measured_is_absent():
    tokens, logprobs, entropies = case(reference=False)
    found = policy_loss(Objective(), tokens, logprobs, entropies)
    assert "reference/kl" not in means(found.sums_M2, found.maxima_X)


def test_shapes_and_settings_that_do_not_fit_are_refused():
    tokens, logprobs, entropies = case(reference=False)
    with pytest.raises(BadBatch, match=r"mask of \(64,\) over"):
        policy_loss(Objective(), tokens, logprobs[:-1], entropies)
    with pytest.raises(BadBatch, match=r"float64 mask"):
        policy_loss(Objective(), replace(tokens, loss_mask_N=tokens.weights_N), logprobs, entropies)
    for needs in ({"reference_kl": 0.1}, {"distillation": 0.1}):
        with pytest.raises(BadBatch, match=f"{next(iter(needs))} is set, .* no reference log-probabilities"):
            policy_loss(Objective(**needs), tokens, logprobs, entropies)
    for wrong in ({"clip_low": -0.1}, {"reference_kl": -1.0}, {"distillation": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Objective(**wrong)
    with pytest.raises(ConfigError, match="mismatch bounds"):
        Mismatch(Correction.MASKED, low=2.0, high=1.0)
    assert Mismatch(Correction.TRUNCATED, high=0.25).high == 0.25, "which reads no lowest ratio"


def test_importance_weights_carry_no_gradient():
    near = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights = correct(Mismatch(), near, torch.tensor([-1.5, -2.0]), torch.tensor([True, True])).weights_N
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([math.exp(0.5), 1.0])
