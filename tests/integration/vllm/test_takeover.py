"""vLLM goes on with what another engine began: its own parsers, replayed, say neither less nor more (I9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from steno.contracts.chat import Job, Sampling
from steno.contracts.wire.frames import Generate, ModelCard
from steno_worker.chat.chat_engine import ChatEngine
from steno_worker.engines.vllm.engine import VllmTokens
from steno_worker.interfaces import TokenStep, TokenTally
from tests.support.workers.takeover import generate, rest_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2], "why": "a } and a </tool"}}\n</tool_call>'
SAID = f"<think>\nLet me think.\n</think>\n\nI look.\n{CALL}\n{CALL}"


def job(**law: Any) -> Job:
    return Job(messages=[{"role": "user", "content": "the weather in Paris"}], tools=[TOOL], sampling=Sampling(**law))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tokens: VllmTokens) -> AsyncIterator[ChatEngine]:
    """The session's engine, which is started already."""
    one = ChatEngine(_Started(tokens), tokens.format)  # type: ignore[arg-type]
    await one.start()
    yield one


class _Started:
    """A `TokenEngine` that somebody else starts and stops."""

    def __init__(self, tokens: VllmTokens) -> None:
        self._tokens = tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokens, name)

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class Told:
    """A `TokenEngine` that says what it is told, after what was said before."""

    def __init__(self, ids: list[int], prompt_tokens: int, steps_of: int) -> None:
        self.tally = TokenTally()
        self._ids, self._prompt_tokens, self._steps_of = ids, prompt_tokens, steps_of

    def card(self) -> ModelCard:
        return ModelCard("told", 4096)

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    def load(self) -> tuple[int, int, float]:
        return 0, 0, 0.0

    def constrains(self, job: Job) -> bool:
        return False

    async def check(self, prompt_ids: list[int], law: Sampling, job: Job) -> None: ...

    async def sample(
        self, request_id: str, prompt_ids: list[int], law: Sampling, job: Job, *, trial_id: str = ""
    ) -> AsyncIterator[TokenStep]:
        at = len(prompt_ids) - self._prompt_tokens
        while at < len(self._ids):
            ids = self._ids[at : at + self._steps_of]
            at += len(ids)
            await asyncio.sleep(0)
            yield TokenStep(ids, [-0.5] * len(ids), "base/0", "stop" if at == len(self._ids) else None)


@pytest.mark.parametrize("steps_of", [1, 7])
async def test_vllms_parsers_replayed_say_the_rest_and_nothing_twice(tokens: VllmTokens, steps_of: int) -> None:
    ids = [*tokens.format.encode(SAID), min(tokens.format.stop_ids)]
    asked = job()
    prompt_tokens = len(tokens.format.render(asked.messages, asked.tools, {}))
    one = ChatEngine(Told(ids, prompt_tokens, steps_of), tokens.format)
    await one.start()
    whole = await generate(one, Generate(1, "a" * 12, 0, "t", asked))
    assert len(whole.calls) == 2 and whole.reasoning and whole.content
    for count in range(steps_of, len(ids), steps_of):
        first = await generate(one, Generate(1, f"{count:012x}", 0, "t", asked), until=count)
        second = await generate(one, rest_of(asked, first, turn_id=f"{count:012x}"))
        assert first.ids + second.ids == whole.ids
        assert first.said(second) == whole.said(), count
        assert second.finish is not None and second.finish.reason == "tool_calls"


async def test_a_greedy_completion_goes_on_with_the_same_tokens(engine: ChatEngine) -> None:
    asked = job(temperature=0.0, max_tokens=40, ignore_eos=True)
    whole = await generate(engine, Generate(1, "a" * 12, 0, "t", asked))
    for count in (1, 13, 39):
        first = await generate(engine, Generate(1, f"{count:012x}", 0, "t", asked), until=count)
        second = await generate(engine, rest_of(asked, first, turn_id=f"{count:012x}"))
        assert first.ids + second.ids == whole.ids
        assert first.logprobs + second.logprobs == pytest.approx(whole.logprobs, abs=2e-3)
        assert first.said(second) == whole.said()


async def test_it_says_how_many_it_runs_at_once(engine: ChatEngine) -> None:
    assert engine.max_streams == 16  # max_num_seqs of this engine
