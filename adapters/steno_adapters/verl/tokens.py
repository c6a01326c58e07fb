"""verl's model servers as a `TokenEngine` of an inference worker: ids in, whole answers out.

verl's client gives an answer when it is whole, so agents that stream get keepalives until then. An answer that verl aborts, for
new weights, is asked for again here, so that each part has the step that sampled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from steno.contracts.chat import Job, Message, Sampling, Tool
from steno.contracts.errors import EngineFailed, WeightsRefused
from steno.contracts.wire.frames import ModelCard
from steno_adapters.verl.checks import check_request
from steno_adapters.verl.seam import ABORTED, LLMServerClient, attempt
from steno_worker.chat.hf import HfChatFormat
from steno_worker.interfaces import StagedUpdate, TokenStep, TokenTally

RESUME_S = 1.0
"""Between an abort and the next attempt: weights are on their way."""


class VerlFormat(HfChatFormat):
    """defaults: template options, where an agent's request has none of that name: verl's `apply_chat_template_kwargs`."""

    def __init__(self, tokenizer: Any, defaults: Mapping[str, Any], **given: Any) -> None:
        self._defaults = dict(defaults)
        super().__init__(tokenizer, **given)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: dict[str, Any]) -> list[int]:
        return super().render(messages, tools, {**self._defaults, **options})


class VerlTokens:
    """A `TokenEngine` over `LLMServerClient.generate`. Weights are verl's own business: none are loaded through Steno.

    Args:
        lineage: of this start of the trainer; versions are `lineage/step`.
        stop_ids: those that end an answer; verl's servers are told them.
        seed_name: what the servers call a seed.
        distinct: each request is named by itself, and not by its trial (verl's `full_determinism` gives vLLM that name).
        changed: called when the servers turn out to have other weights.
    """

    def __init__(
        self,
        servers: LLMServerClient,
        *,
        name: str,
        lineage: str,
        context_tokens: int,
        vocabulary_size: int,
        tokenizer_digest: str,
        stop_ids: Collection[int],
        seed_name: str = "seed",
        distinct: bool = False,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.tally = TokenTally()
        self.changed = changed
        self._servers = servers
        self._lineage = lineage
        self._stop_ids = frozenset(stop_ids)
        self._seed_name = seed_name
        self._distinct = distinct
        self._running = 0
        self._step = 0
        self._card = ModelCard(
            name=name,
            context_tokens=context_tokens,
            policy_version=f"{lineage}/0",
            tokenizer_digest=tokenizer_digest,
            capabilities=["tools", "reasoning", "logprobs", "cancel"],
            vocabulary_size=vocabulary_size,
        )

    def card(self) -> ModelCard:
        return self._card

    async def start(self) -> None:
        """verl has started its servers."""

    async def stop(self) -> None:
        """verl stops its servers."""

    def load(self) -> tuple[int, int, float]:
        return self._running, 0, 0.0

    def checkpoint(self) -> Path | None:
        return None

    def constrains(self, job: Job) -> bool:
        return False

    async def check(self, prompt_ids: list[int], law: Sampling, job: Job) -> None:
        """Raises: as `check_request`."""
        check_request(job, law)

    async def load_weights(self, update: StagedUpdate) -> float:
        """Raises: WeightsRefused."""
        raise WeightsRefused("policy: verl gives its servers their weights: push none through Steno", field="policy")

    async def score(self, token_ids: list[int]) -> list[float]:
        """Raises: WeightsRefused."""
        raise WeightsRefused("probe: verl's servers score no prompts", field="probe")

    async def sample(
        self, request_id: str, prompt_ids: list[int], law: Sampling, job: Job, *, trial_id: str = ""
    ) -> AsyncIterator[TokenStep]:
        """One step per attempt that sampled something. verl keeps the requests of one name, here the trial's, on one server.

        Raises: as `check_request`; EngineFailed.
        """
        check_request(job, law)
        assert law.max_tokens is not None  # the seam's promise
        name = request_id if self._distinct else trial_id or request_id
        said: list[int] = []
        self._running += 1
        try:
            while True:
                step = await self._attempt(name, [*prompt_ids, *said], law, law.max_tokens - len(said))
                said += step.ids
                if step.ids or step.finish is not None:
                    yield step
                if step.finish is not None:
                    return
                await asyncio.sleep(RESUME_S)
        finally:
            self._running -= 1

    async def _attempt(self, name: str, ids: list[int], law: Sampling, most: int) -> TokenStep:
        stops = frozenset(law.stop_token_ids) | (frozenset() if law.ignore_eos else self._stop_ids)
        try:
            answer = await attempt(self._servers, name, ids, _parameters(law, most, stops, self._seed_name))
        except Exception as error:
            raise EngineFailed(f"verl's server: {type(error).__name__}: {error}") from error
        sampled = [int(token) for token in answer.token_ids]
        self.tally.sampled += len(sampled)
        return TokenStep(
            ids=sampled,
            # verl's vLLM server has none for an answer that it broke off before the first token
            logprobs=None
            if sampled and answer.log_probs is None
            else [float(value) for value in answer.log_probs or ()],
            version=self._version(answer.extra_fields.get("global_steps")),
            finish=_finish(sampled, stops, most, answer.stop_reason),
            cached_tokens=int(answer.extra_fields.get("num_cached_tokens") or 0),
        )

    def _version(self, step: Any) -> str:
        """step: None: of the weights that the server was started with."""
        number = max(0, int(step or 0))
        version = f"{self._lineage}/{number}"
        if number > self._step:
            self._step = number
            self._card = msgspec.structs.replace(self._card, policy_version=version)
            self.changed()
        return version


def _finish(
    sampled: list[int], stops: frozenset[int], most: int, reason: str | None
) -> Literal["stop", "length"] | None:
    if sampled and sampled[-1] in stops:
        return "stop"
    return None if reason in ABORTED and len(sampled) < most else "length"


def _parameters(law: Sampling, most: int, stops: frozenset[int], seed_name: str) -> dict[str, Any]:
    """For vLLM and SGLang, in the words that verl's agent loops use."""
    given: dict[str, Any] = {
        "temperature": law.temperature,
        "top_p": law.top_p,
        "top_k": law.top_k if law.top_k > 0 else -1,
        "repetition_penalty": law.repetition_penalty,
        "logprobs": True,
        "max_tokens": most,
        "stop_token_ids": sorted(stops),
    }
    for name in ("min_p", "presence_penalty", "frequency_penalty"):
        if value := getattr(law, name):
            given[name] = value
    if law.ignore_eos:
        given["ignore_eos"] = True
    if law.seed is not None:
        given[seed_name] = law.seed
    return given
