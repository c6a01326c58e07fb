"""The embedded engine goes on with what another began: the same tokens, at the log-probabilities that they have (I1, I9)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from steno.contracts.chat import Job, Sampling
from steno.contracts.records import bytes_to_ids
from steno.contracts.wire.frames import Generate
from steno.models import TINY
from steno_cli.demo.task import SYSTEM, TOOL, make_world
from steno_worker.engines.transformers.engine import build
from tests.support.workers.takeover import Part, generate, rest_of


def job(**law: Any) -> Job:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": make_world(3).question()}]
    return Job(messages=messages, tools=[TOOL], sampling=Sampling(**law))


@pytest.fixture
async def engine() -> AsyncIterator[Any]:
    options = {"model": str(TINY), "policy": "default", "max_streams": 8, "context_tokens": None, "engine_args": []}
    one = build(SimpleNamespace(**options))
    await one.start()
    yield one
    await one.stop()


async def test_greedy_parts_are_the_whole_wherever_it_was_cut(engine: Any) -> None:
    asked = job(temperature=0.0, max_tokens=80)
    whole = await generate(engine, Generate(1, "a" * 12, 0, "t", asked))
    assert whole.calls and whole.finish is not None
    for count in range(1, len(whole.ids) + 1, 3):
        first = await generate(engine, Generate(1, f"{count:012x}", 0, "t", asked), until=count)
        second = await generate(engine, rest_of(asked, first, turn_id=f"{count:012x}"))
        assert first.ids + second.ids == whole.ids
        assert first.logprobs + second.logprobs == pytest.approx(whole.logprobs, abs=1e-3)
        assert first.said(second) == whole.said()
        assert second.started.prompt_digest == whole.started.prompt_digest
        assert second.finish is not None and second.finish.reason == whole.finish.reason


async def test_sampled_parts_have_the_models_own_log_probabilities_and_no_repeated_draw(engine: Any) -> None:
    asked = job(max_tokens=60, seed=11, ignore_eos=True)
    parts: list[Part] = [await generate(engine, Generate(1, "b" * 12, 0, "t", asked), until=20)]
    parts.append(await generate(engine, rest_of(asked, *parts, turn_id="b" * 12), until=20))
    parts.append(await generate(engine, rest_of(asked, *parts, turn_id="b" * 12)))
    ids = [token for part in parts for token in part.ids]
    assert [len(part.ids) for part in parts] == [20, 20, 20]
    assert parts[2].finish is not None and (parts[2].finish.reason, parts[2].finish.completion_tokens) == ("length", 20)
    prompt = bytes_to_ids(parts[0].started.new_ids).tolist()
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.inference_mode():
        logprobs_TV = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    true = [float(logprobs_TV[len(prompt) + index - 1, token]) for index, token in enumerate(ids)]
    assert [value for part in parts for value in part.logprobs] == pytest.approx(true, abs=1e-3)
