"""I1 and I10 on the real engine: ids, log-probabilities, alternatives and versions are those of the weights."""

from __future__ import annotations

import asyncio

import pytest
import torch

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import BadRequest
from tests.integration.vllm.drawing import Drawn, ask, draw, gathered, logits_of, to_the_end

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


async def test_logprobs_of_concurrent_requests_are_those_of_a_float32_forward_pass(tokens, reference):
    temperatures = [1.0, 0.7, 1.3, 1.0, 0.5, 1.0]
    drawn = await asyncio.gather(
        *(
            draw(tokens, ask(tokens, "the weather " * (3 * n + 1)), Sampling(temperature=at, max_tokens=24 + n))
            for n, at in enumerate(temperatures)
        )
    )
    for one, temperature in zip(drawn, temperatures, strict=True):
        assert one.ids and len(one.ids) == len(one.logprobs)
        expected = gathered(torch.log_softmax(logits_of(reference, one) / temperature, -1), one.ids)
        assert one.logprobs == pytest.approx(expected, abs=1e-3)
        assert {step.version for step in one.steps} == {"base/0"}


async def test_a_seed_repeats_a_generation_and_no_seed_does_not(tokens):
    prompt = ask(tokens, "today")
    first, again, other = [
        (await draw(tokens, prompt, Sampling(seed=seed, max_tokens=16, ignore_eos=True))).ids for seed in (7, 7, None)
    ]
    assert first == again != other


async def test_greedy_takes_the_best_token(tokens, reference):
    drawn = await draw(tokens, ask(tokens, "nice"), Sampling(temperature=0.0, max_tokens=12))
    assert drawn.ids == logits_of(reference, drawn).argmax(-1).tolist()


async def test_truncation_renormalises_what_is_recorded(tokens, reference):
    one, cut = await asyncio.gather(
        draw(tokens, ask(tokens, "nice"), Sampling(top_k=1, seed=1, max_tokens=12)),
        draw(tokens, ask(tokens, "nice"), Sampling(top_k=5, seed=1, max_tokens=32, ignore_eos=True)),
    )
    assert one.ids == logits_of(reference, one).argmax(-1).tolist()
    assert one.logprobs == pytest.approx([0.0] * len(one.ids), abs=1e-6)
    best = logits_of(reference, cut).topk(5)
    assert all(id_ in row for id_, row in zip(cut.ids, best.indices.tolist(), strict=True))
    logits = torch.full_like(logits_of(reference, cut), -torch.inf).scatter(1, best.indices, best.values)
    assert cut.logprobs == pytest.approx(gathered(torch.log_softmax(logits, -1), cut.ids), abs=1e-3)


async def test_nucleus_and_min_p_keep_to_their_tokens(tokens, reference):
    nucleus, floor = await asyncio.gather(
        draw(tokens, ask(tokens, "nice"), Sampling(top_p=0.3, max_tokens=24)),
        draw(tokens, ask(tokens, "nice"), Sampling(min_p=0.5, max_tokens=24)),
    )
    for id_, row in zip(nucleus.ids, torch.softmax(logits_of(reference, nucleus), -1), strict=True):
        assert row[row > row[id_]].sum() < 0.3 + 1e-4
    for id_, row in zip(floor.ids, torch.softmax(logits_of(reference, floor), -1), strict=True):
        assert row[id_] >= 0.5 * row.max() - 1e-4


async def test_penalties_are_in_the_recorded_logprobs(tokens, reference):
    law = Sampling(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3, max_tokens=24, ignore_eos=True)
    drawn = await draw(tokens, ask(tokens, "the the the"), law)
    logits = logits_of(reference, drawn)
    for at, row in enumerate(logits):
        out = torch.bincount(torch.tensor(drawn.ids[:at], dtype=torch.long), minlength=len(row))
        seen = torch.bincount(torch.tensor(drawn.prompt_ids + drawn.ids[:at]), minlength=len(row)) > 0
        row[:] = torch.where(seen, torch.where(row > 0, row / 1.3, row * 1.3), row)
        row -= 0.5 * out + 1.5 * (out > 0)
    assert drawn.logprobs == pytest.approx(gathered(torch.log_softmax(logits, -1), drawn.ids), abs=1e-3)


async def test_logit_bias_and_its_bounds(tokens):
    wanted = tokens.format.encode("weather")[0]
    drawn = await draw(tokens, ask(tokens, "nice"), Sampling(logit_bias={wanted: 100.0}, max_tokens=4))
    assert drawn.ids == [wanted] * 4
    with pytest.raises(BadRequest) as caught:
        await draw(tokens, ask(tokens, "nice"), Sampling(logit_bias={10**6: 1.0}, max_tokens=4))
    assert caught.value.field == "logit_bias"


async def test_how_a_generation_ends(tokens):
    prompt = ask(tokens, "nice")
    end = min(tokens.format.stop_ids)
    pushed = {end: 100.0}
    stopped, kept_on, at_least, own = await asyncio.gather(
        draw(tokens, prompt, Sampling(logit_bias=pushed, max_tokens=8)),
        draw(tokens, prompt, Sampling(logit_bias=pushed, max_tokens=8, ignore_eos=True)),
        draw(tokens, prompt, Sampling(logit_bias=pushed, max_tokens=8, min_tokens=5)),
        draw(tokens, prompt, Sampling(logit_bias={300: 100.0}, stop_token_ids=[300], max_tokens=8)),
    )
    assert (stopped.ids, stopped.steps[-1].finish) == ([end], "stop")
    assert (kept_on.ids, kept_on.steps[-1].finish) == ([end] * 8, "length")
    assert len(at_least.ids) == 6 and at_least.ids[-1] == end and not tokens.format.stop_ids & set(at_least.ids[:5])
    assert (own.ids, own.steps[-1].finish) == ([300], "stop")


async def test_the_generation_config_of_the_model_does_not_bend_the_law(tokens, model_dir, reference):
    assert '"temperature": 0.6' in (model_dir / "generation_config.json").read_text()
    drawn = await draw(tokens, ask(tokens, "nice"), Sampling(max_tokens=16))
    expected = gathered(torch.log_softmax(logits_of(reference, drawn), -1), drawn.ids)
    assert drawn.logprobs == pytest.approx(expected, abs=1e-3)


async def test_alternatives_are_the_best_by_probability(tokens, reference):
    drawn = await draw(tokens, ask(tokens, "nice"), Sampling(seed=1, max_tokens=16), Job(top_logprobs=4))
    best = torch.log_softmax(logits_of(reference, drawn), -1).topk(4)
    tops = [top for step in drawn.steps for top in step.top]
    assert [[id_ for id_, _ in top] for top in tops] == best.indices.tolist()
    for top, values in zip(tops, best.values.tolist(), strict=True):
        assert [value for _, value in top] == pytest.approx(values, abs=1e-3)


async def test_asking_for_no_alternatives_gives_none_and_too_many_is_refused(tokens):
    drawn = await draw(tokens, ask(tokens, "nice"), Sampling(max_tokens=4), Job(top_logprobs=0))
    assert [step.top for step in drawn.steps] == [[[]] * len(step.ids) for step in drawn.steps]
    with pytest.raises(BadRequest) as caught:
        await draw(tokens, ask(tokens, "nice"), Sampling(max_tokens=4), Job(top_logprobs=21))
    assert "21" in caught.value.message


async def test_a_temperature_that_vllm_would_change_is_refused(tokens):
    with pytest.raises(BadRequest) as caught:
        await draw(tokens, ask(tokens, "nice"), Sampling(temperature=0.001, max_tokens=4))
    assert caught.value.field == "temperature"


async def test_a_delta_that_spans_an_update_is_two_steps(tokens):
    """A slow consumer gets everything since its last look as one output of vLLM's, across the change of version."""
    law = to_the_end(Drawn(prompt := ask(tokens, "nice")))
    steps = tokens.sample("spanning", prompt, law, Job())
    seen = [await anext(steps)]
    await draw(tokens, ask(tokens, "today"), Sampling(max_tokens=8, ignore_eos=True))
    await tokens.llm.update_weight_version("run-a/1")
    await draw(tokens, ask(tokens, "today"), Sampling(max_tokens=8, ignore_eos=True))
    seen += [await anext(steps), await anext(steps)]
    assert [step.version for step in seen] == ["base/0", "base/0", "run-a/1"]
    assert len(seen[1].ids) > 1 and len(seen[2].ids) > 1
    rest = [step async for step in steps]
    assert {step.version for step in rest} == {"run-a/1"}
    assert sum(len(step.ids) for step in seen + rest) == law.max_tokens
    await tokens.llm.update_weight_version("base/0")
