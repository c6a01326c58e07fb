"""Helpers: a whole generation collected, and what a float32 forward pass says of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from steno.contracts.chat import Job, Sampling
from steno_worker.engines.vllm.engine import VllmTokens
from steno_worker.interfaces import TokenStep
from tests.integration.vllm.model import CONTEXT_TOKENS

_number = itertools.count()

NOT_THINKING = {"enable_thinking": False}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Get the {name}.",
            "parameters": {
                "type": "object",
                "properties": {"celsius": {"type": "boolean"}},
                "required": ["celsius"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "forecast")
]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
"""TOOLS whose arguments must follow the schema. Without `strict` they are any JSON, and a string in it may hold the model's own
marker of a call's end, at which a parser ends the call."""


@dataclass
class Drawn:
    prompt_ids: list[int]
    steps: list[TokenStep] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [id_ for step in self.steps for id_ in step.ids]

    @property
    def logprobs(self) -> list[float]:
        return [value for step in self.steps for value in step.logprobs or []]


async def draw(tokens: VllmTokens, prompt_ids: list[int], law: Sampling, job: Job | None = None) -> Drawn:
    """Checked first, as each request is."""
    drawn, job = Drawn(prompt_ids), job or Job()
    await tokens.check(prompt_ids, law, job)
    async for step in tokens.sample(f"test-{next(_number)}", prompt_ids, law, job):
        drawn.steps.append(step)
    return drawn


def to_the_end(drawn: Drawn) -> Sampling:
    """As long as the context has room: the engine is not to be ready before the test is, which may come late to its turn."""
    return Sampling(max_tokens=CONTEXT_TOKENS - len(drawn.prompt_ids), ignore_eos=True)


def ask(tokens: VllmTokens, text: str, job: Job | None = None, **options: object) -> list[int]:
    return tokens.format.render([{"role": "user", "content": text}], job.tools if job else [], dict(options))


def logits_of(model: PreTrainedModel, drawn: Drawn) -> torch.Tensor:
    """float32 (completion tokens, vocabulary): what each completion token was drawn from, before any law."""
    ids = torch.tensor([drawn.prompt_ids + drawn.ids])
    with torch.no_grad():
        return model(ids).logits[0, len(drawn.prompt_ids) - 1 : -1].float()


def gathered(logprobs: torch.Tensor, ids: list[int]) -> list[float]:
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
