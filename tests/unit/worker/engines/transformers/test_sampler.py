"""The sampling law, token by token, against its definition."""

import math

import pytest
import torch

from steno.contracts.chat import Sampling
from steno_worker.engines.transformers.sampler import SamplerRow, draw

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
NO_STOPS: frozenset[int] = frozenset()


def row(**law: object) -> SamplerRow:
    return SamplerRow(Sampling(**law), prompt_ids=[], stops=NO_STOPS)  # type: ignore[arg-type]


def drawn_ids(count: int, **law: object) -> list[int]:
    one = row(seed=7, **law)
    return [draw(LOGITS[None], [one])[0].id for _ in range(count)]


def support(**law: object) -> set[int]:
    """Ids that have a finite log-probability under a law."""
    one = row(**law)
    one.top = len(LOGITS)
    return {token for token, _ in draw(LOGITS[None], [one])[0].top}


def test_plain_sampling_draws_with_the_policys_probabilities() -> None:
    ids = drawn_ids(20000)
    wanted = LOGITS.softmax(-1)
    for token in range(len(LOGITS)):
        assert ids.count(token) / len(ids) == pytest.approx(wanted[token].item(), abs=0.012)


def test_temperature_scales_and_is_in_the_logprob() -> None:
    one = row(temperature=0.5, seed=3)
    drawn = draw(LOGITS[None], [one])[0]
    assert drawn.logprob == pytest.approx((LOGITS / 0.5).log_softmax(-1)[drawn.id].item(), abs=1e-6)


def test_greedy_takes_the_likeliest_and_reports_it_at_temperature_one() -> None:
    drawn = draw(LOGITS[None], [row(temperature=0.0, top_k=3)])[0]
    assert (drawn.id, drawn.logprob) == (0, pytest.approx(LOGITS.log_softmax(-1)[0].item(), abs=1e-6))


@pytest.mark.parametrize(
    ("law", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 100}, set(range(6))),
        ({"top_p": 0.01}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.99}, {0, 1, 2}),
    ],
)
def test_truncation_keeps_exactly_what_it_says(law: dict[str, float], kept: set[int]) -> None:
    assert support(**law) == kept
    assert set(drawn_ids(500, **law)) <= kept


def test_truncated_logprobs_are_those_drawn_from() -> None:
    one = row(top_k=2, seed=1)
    drawn = draw(LOGITS[None], [one])[0]
    assert drawn.logprob == pytest.approx(LOGITS[:2].log_softmax(-1)[drawn.id].item(), abs=1e-6)


def test_logit_bias_is_added() -> None:
    assert set(drawn_ids(50, logit_bias={5: 100.0})) == {5}


def test_repetition_penalty_sees_prompt_and_output_by_sign() -> None:
    one = SamplerRow(
        Sampling(repetition_penalty=2.0, temperature=0.0), prompt_ids=[0, 4], stops=NO_STOPS, top=6, drawn=[1]
    )
    wanted = torch.tensor([1.0, 0.5, 0.5, 0.0, -2.0, -3.0]).log_softmax(-1)
    assert dict(draw(LOGITS[None], [one])[0].top) == pytest.approx(dict(enumerate(wanted.tolist())), abs=1e-6)


def test_presence_and_frequency_penalties_see_output_only() -> None:
    law = Sampling(presence_penalty=0.5, frequency_penalty=0.25, temperature=0.0)
    one = SamplerRow(law, prompt_ids=[3, 3], stops=NO_STOPS, top=6, drawn=[1, 1, 2])
    wanted = torch.tensor([2.0, 1.0 - 0.5 - 0.5, 0.5 - 0.25 - 0.5, 0.0, -1.0, -3.0]).log_softmax(-1)
    assert dict(draw(LOGITS[None], [one])[0].top) == pytest.approx(dict(enumerate(wanted.tolist())), abs=1e-6)


def test_min_tokens_keeps_stop_ids_out_until_then() -> None:
    one = SamplerRow(Sampling(min_tokens=2, temperature=0.0), prompt_ids=[], stops=frozenset({0}))
    ids = []
    for _ in range(3):
        ids.append(draw(LOGITS[None], [one])[0].id)
        one.drawn.append(ids[-1])
    assert ids == [1, 1, 0]


def test_a_seed_repeats_whatever_else_is_in_the_batch() -> None:
    def run(others: list[SamplerRow]) -> list[tuple[int, float]]:
        one = row(seed=11)
        rows = [*others, one]
        steps = [draw(LOGITS.expand(len(rows), -1), rows)[-1] for _ in range(20)]
        return [(step.id, step.logprob) for step in steps]

    alone = run([])
    crowded = run([row(temperature=0.0), row(top_k=1, temperature=0.3), row(seed=5, min_p=0.2)])
    assert [token for token, _ in alone] == [token for token, _ in crowded]
    assert [value for _, value in alone] == pytest.approx([value for _, value in crowded], abs=1e-6)


def test_one_rows_law_leaves_the_logits_of_the_others_alone() -> None:
    before = LOGITS.clone()
    rows = [row(logit_bias={1: 50.0}), row(temperature=0.0)]
    both = draw(LOGITS.expand(2, -1), rows)
    assert [both[0].id, both[1].id] == [1, 0]
    assert torch.equal(LOGITS, before)


def test_alternatives_are_best_first_and_leave_out_the_impossible() -> None:
    one = row(top_k=3)
    one.top = 5
    top = draw(LOGITS[None], [one])[0].top
    assert [token for token, _ in top] == [0, 1, 2]
    assert math.fsum(math.exp(value) for _, value in top) == pytest.approx(1.0, abs=1e-5)


def test_a_row_that_nothing_can_be_drawn_from_fails_alone() -> None:
    impossible = SamplerRow(Sampling(min_tokens=1), prompt_ids=[], stops=frozenset(range(len(LOGITS))))
    alone = draw(LOGITS[None], [row(seed=4)])[0]
    fine, failed = draw(LOGITS.expand(2, -1), [row(seed=4), impossible])
    assert failed.fault and fine == alone and not fine.fault


def test_only_allowed_ids_can_be_drawn_and_their_logprob_says_so() -> None:
    assert support(allowed_token_ids=[4, 1]) == {1, 4}
    drawn = draw(LOGITS[None], [row(allowed_token_ids=[4, 1], temperature=0.0)])[0]
    assert (drawn.id, drawn.logprob) == (1, pytest.approx(LOGITS[[1, 4]].log_softmax(-1)[0].item(), abs=1e-6))
    beside = draw(LOGITS.expand(2, -1), [row(allowed_token_ids=[5]), row(temperature=0.0)])
    assert [one.id for one in beside] == [5, 0]  # other rows draw from all
