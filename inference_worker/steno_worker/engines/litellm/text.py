"""An upstream reached through LiteLLM: text in, text out. Imports litellm, so it is imported only when it is used.

The whole conversation goes to the upstream each time. Its card says `text_only`: no ids, no log-probabilities, sessions that are
never leased. Requests are not repeated here: the agent is told 429 or 503 and when to come back, and each turn is one request.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from steno.contracts.chat import IMAGES, Job
from steno.contracts.errors import BadRequest, ConfigError, StenoError
from steno.contracts.records import ForkReason
from steno.contracts.wire.frames import Count, Counted, Generate, ModelCard, Started, StreamEvent
from steno_worker.engines.litellm.reader import ChunkReader
from steno_worker.engines.litellm.request import LiteLLMRequest, litellm_request
from steno_worker.engines.upstream_errors import translate
from steno_worker.interfaces import TokenTally
from steno_worker.weights.fixed import FixedWeights

# Or importing it fetches a list of prices from the internet.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
import litellm

logger = logging.getLogger(__name__)
CLAUDES = frozenset({"anthropic", "bedrock", "vertex_ai"})
"""Providers whose Claude is Anthropic's own, as LiteLLM names them."""
UNKNOWN_CONTEXT_TOKENS = 131_072
"""Where LiteLLM's table does not know the model; the upstream refuses what is really too long."""


class TextEngine(FixedWeights):
    """An `Engine` over an upstream that gives text and no token ids.

    Args: model: as LiteLLM names it, `provider/name`. key: None: LiteLLM looks in the provider's environment variable.
        timeout_s: silence of the upstream after which a request fails. max_streams: requests at once; more wait here.
        images: whether the model takes images; None: as LiteLLM's table says.
    Raises: ConfigError: LiteLLM knows no such provider.
    """

    def __init__(
        self, model: str, *, api_base: str | None = None, key: str | None = None, policy: str = "default",
        context_tokens: int | None = None, timeout_s: float = 600.0, max_streams: int = 64, images: bool | None = None,
    ) -> None:  # fmt: skip
        _quieten()
        try:
            self._name, self._provider, _, _ = litellm.get_llm_provider(model, api_base=api_base)
        except litellm.exceptions.BadRequestError as error:
            raise ConfigError(
                f"model: got {model!r}, must be PROVIDER/MODEL with a provider that LiteLLM knows", field="model"
            ) from error
        self._supported = frozenset(litellm.get_supported_openai_params(self._name, self._provider) or ())
        self._signs_thinking = _signs_thinking(self._name, self._provider)
        self._fixed: dict[str, Any] = {
            "model": model, "api_base": api_base, "api_key": key, "timeout": timeout_s, "stream": True,
            "stream_options": {"include_usage": True}, "num_retries": 0, "max_retries": 0, "drop_params": True,
        }  # fmt: skip
        self._key = key or ""
        self.tally = TokenTally()
        self._slots = asyncio.Semaphore(max_streams)
        self._running = self._waiting = 0
        context = context_tokens or _context_tokens(self._name, self._provider) or UNKNOWN_CONTEXT_TOKENS
        words = ["cancel", *(["tools"] if "tools" in self._supported else [])]
        if litellm.supports_vision(self._name, self._provider) if images is None else images:
            words.append(IMAGES)
        self._card = ModelCard(model, context, policy, text_only=True, capabilities=words)

    def cards(self) -> list[ModelCard]:
        return [self._card]

    async def start(self) -> None:
        """Nothing is asked of the upstream before an agent asks."""

    async def stop(self) -> None:
        await litellm.close_litellm_async_clients()

    def load(self) -> tuple[int, int, float]:
        return self._running, self._waiting, 0.0

    async def count(self, job: Job) -> int:
        """As LiteLLM's tokenizers count; for models that it does not know, an estimate."""
        arguments = self._asked(job).arguments
        given: dict[str, Any] = (
            {"text": arguments["prompt"]}
            if "prompt" in arguments
            else {"messages": arguments["messages"], "tools": arguments.get("tools")}
        )
        # With its default, LiteLLM would fetch images to measure them.
        counter = partial(litellm.token_counter, use_default_image_token_count=True)
        return int(await asyncio.to_thread(counter, model=self._name, **given))

    async def tokenize(self, asked: Count) -> Counted:
        """Raises: BadRequest."""
        raise BadRequest("this upstream gives text, and no token ids")

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        """Started comes once the upstream has accepted the request: until then, a failure is an answer with a status."""
        asked = self._asked(request.job)
        reader = ChunkReader(request.stream, wants_logprobs=request.job.top_logprobs is not None)
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            chunks = await self._open(asked)
            try:
                yield self._started(request, asked)
                async for chunk in self._read(chunks):
                    delta = reader.read(chunk)
                    if delta is not None:
                        yield delta
            finally:
                await _close(chunks)
            yield reader.finish()
        finally:
            self._running -= 1
            self._slots.release()

    def _asked(self, job: Job) -> LiteLLMRequest:
        return litellm_request(job, self._provider, self._supported, signs_thinking=self._signs_thinking)

    def _started(self, request: Generate, asked: LiteLLMRequest) -> Started:
        return Started(
            request.stream, kept_tokens=0, new_ids=b"", prompt_tokens=0, prompt_digest=b"", law=asked.law, resumable=False,
            refused=ForkReason.RENDER_REFUSED if request.prefix_ids else "", dropped=asked.dropped,
        )  # fmt: skip

    async def _open(self, asked: LiteLLMRequest) -> Any:
        call = litellm.atext_completion if "prompt" in asked.arguments else litellm.acompletion
        try:
            return await call(**self._fixed, **asked.arguments)
        except Exception as error:
            raise self._translated(error) from error

    async def _read(self, chunks: Any) -> AsyncIterator[Any]:
        try:
            async for chunk in chunks:
                yield chunk
        except Exception as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> StenoError:
        return translate(error, context_tokens=self._card.context_tokens, key=self._key)


async def _close(chunks: Any) -> None:
    """End the upstream's request. The wrapper around plain completions has no aclose of its own, the SDK's streams have close."""
    for stream in (chunks, getattr(chunks, "completion_stream", None)):
        close = getattr(stream, "aclose", None) or getattr(stream, "close", None)
        if close is not None:
            await close()
            return


def _known(name: str, provider: str, field: str) -> Any:
    """What LiteLLM's table says of the model; None where it does not know it."""
    try:
        return litellm.get_model_info(name, custom_llm_provider=provider).get(field)
    except litellm.exceptions.ModelNotMappedError:
        return None


def _signs_thinking(name: str, provider: str) -> bool:
    """Claude does, but for models that choose by themselves when to think (from 4.6 on)."""
    return provider in CLAUDES and "claude" in name.lower() and not _known(name, provider, "supports_adaptive_thinking")


def _context_tokens(name: str, provider: str) -> int | None:
    known = _known(name, provider, "max_input_tokens")
    return known if isinstance(known, int) and known > 0 else None


def _quieten() -> None:
    """LiteLLM prints help and asks for feedback at every error, and logs requests."""
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logging.getLogger(name).setLevel(logging.ERROR)
