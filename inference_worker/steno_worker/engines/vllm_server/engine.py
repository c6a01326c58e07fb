"""A vLLM server as an exact engine: token ids go in, ids and log-probabilities come out, over HTTP.

A chat request carries the ids of its prompt beside its messages: the recorded prompt and completion, then what is new, rendered
by the server itself (I2). The server samples from those ids, and says back which they were: a turn whose prompt is not what was
given fails (I1). Decoding, tool calls and reasoning are the server's own parsers'. What can't be had from outside is in
docs/upstreams.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import EngineFailed
from steno.contracts.records import bytes_to_ids
from steno.contracts.wire.frames import TOKENIZES, Count, Counted, Delta, Generate, ModelCard, StreamEvent
from steno_worker.chat.chat_engine import field_of, given_prompt, law_in_effect
from steno_worker.chat.check import check_format
from steno_worker.chat.prompt import Prompt, PromptRenderer, started_of
from steno_worker.chat.tokens import tokenized
from steno_worker.engines.vllm_server.format import ServerFormat
from steno_worker.engines.vllm_server.http import VllmServer
from steno_worker.engines.vllm_server.limits import UNSEEN_STOP_IDS, check_law
from steno_worker.engines.vllm_server.probe import ServerFacts, probe
from steno_worker.engines.vllm_server.wire import CHAT, FIELDS, PROMPT, AnswerReader, body_of, constrains
from steno_worker.interfaces import TokenTally
from steno_worker.weights.fixed import FixedWeights

logger = logging.getLogger(__name__)
VERSION = "base/0"
"""Of the weights that the server has: nobody tells when they change there."""


class VllmServerEngine(FixedWeights):
    """An `Engine` over a vLLM server, exact by its token ids.

    Args: model: as the server names it. max_streams: requests at once; more wait here.
    """

    def __init__(
        self, server: VllmServer, model: str, *, policy: str, context_tokens: int | None, max_streams: int
    ) -> None:
        self.tally = TokenTally()
        self._server = server
        self._model = model
        self._policy = policy
        self._context_tokens = context_tokens
        self._slots = asyncio.Semaphore(max_streams)
        self._running = self._waiting = 0
        # Prompts are rendered by the server, but what is new is worked out here, by code that waits for it.
        self._renderer = ThreadPoolExecutor(1, "render")
        self._counting = asyncio.Semaphore(1)  # so that a turn waits there behind one count at most
        self._format: ServerFormat | None = None
        self._prompter: PromptRenderer | None = None
        self._facts: ServerFacts | None = None
        self._tools_constrain = False
        self._card = ModelCard(model, 1, policy, VERSION)

    async def start(self) -> None:
        """Connect, and find out what the server can do.

        Raises: ConfigError: it serves no such model. InexactServer: it does not give what an exact record needs. EngineFailed: it
            can't be reached.
        """
        loop = asyncio.get_running_loop()
        await self._server.open()
        self._format = ServerFormat(self._server, self._model, loop)
        self._facts = await probe(self._server, self._model, self._format)
        context = min(self._context_tokens or self._facts.context_tokens, self._facts.context_tokens)
        self._server.context_tokens = context
        await loop.run_in_executor(self._renderer, self._format.find_stop_ids)
        report = await loop.run_in_executor(self._renderer, check_format, self._format)
        for problem in report.problems:
            logger.warning("model %s: %s", self._model, problem)
        self._prompter = PromptRenderer(self._format, report)
        found = await loop.run_in_executor(self._renderer, self._format.find_grammar)
        self._tools_constrain = bool(found)
        if found:
            logger.warning("the server puts a grammar on every request with tools: their tokens will not be trained")
        able = {"tools": found is not None, "continuation": bool(report.extends)}
        words = ["cancel", "grammar", "logprobs", TOKENIZES, *(word for word, has in able.items() if has)]
        digest = await loop.run_in_executor(self._renderer, self._format.digest)
        self._card = ModelCard(
            self._model, context, self._policy, VERSION, tokenizer_digest=digest, capabilities=words,
            fields=FIELDS,
        )  # fmt: skip

    async def stop(self) -> None:
        await self._server.close()
        self._renderer.shutdown(wait=False, cancel_futures=True)

    def cards(self) -> list[ModelCard]:
        return [self._card]

    def load(self) -> tuple[int, int, float]:
        return self._running, self._waiting, 0.0

    async def count(self, job: Job) -> int:
        async with self._counting:
            prompt, _ = await self._prompt(Generate(stream=0, turn_id="", attempt=0, trial_id="", job=job))
        return len(prompt.ids)

    async def tokenize(self, asked: Count) -> Counted:
        if self._format is None or self._prompter is None:
            raise EngineFailed("the engine is not started")
        async with self._counting:
            return await self._format.waits.run(self._renderer, tokenized, asked, self._format, self._prompter)

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        """Started comes once the server has said which prompt it uses."""
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            async for event in self._generate(request):
                yield event
        finally:
            self._running -= 1
            self._slots.release()

    async def _generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        job = request.job
        prompt, format = await self._prompt(request)
        law = law_in_effect(job.sampling, len(prompt.ids), self._card.context_tokens, field_of(job))
        check_law(law, format.stop_ids, unseen=UNSEEN_STOP_IDS)
        await format.check_bad_words(law.bad_words)
        grammar = constrains(job) or (self._tools_constrain and bool(job.tools) and job.tool_choice != "none")
        bent = grammar or not law.is_plain() or self._is_off_scale(law)
        is_chat = bool(job.messages)
        reader = AnswerReader(
            request.stream, prompt.ids, VERSION, is_chat=is_chat, constrained=bent, job=job, grammar=grammar
        )
        body = body_of(job, self._model, prompt.ids, law, format.stop_ids)
        async with aclosing(self._server.stream(CHAT if is_chat else PROMPT, body, request.trial_id)) as events:
            begun = False
            async for event in events:
                delta = reader.read(event)
                if reader.has_begun and not begun:
                    begun = True
                    yield started_of(request.stream, prompt, law, grammar=grammar)
                if delta is not None:
                    yield self._tallied(delta)
        if not begun:
            raise EngineFailed("the vLLM server answered nothing")
        last = reader.rest()
        if last is not None:
            yield self._tallied(last)
        yield reader.finish()

    def _tallied(self, delta: Delta) -> Delta:
        self.tally.sampled += len(delta.ids) >> 2
        return delta

    async def _prompt(self, request: Generate) -> tuple[Prompt, ServerFormat]:
        format, prompter = self._format, self._prompter
        if format is None or prompter is None:
            raise EngineFailed("the engine is not started")
        job, prefix, run = request.job, bytes_to_ids(request.prefix_ids), format.waits.run
        if job.prompt_ids is not None:
            return given_prompt(bytes_to_ids(job.prompt_ids).tolist(), prefix), format
        if job.prompt_text is not None:
            return given_prompt(await run(self._renderer, format.encode, job.prompt_text), prefix), format
        return await run(self._renderer, prompter.chat, job, prefix, request.prefix_messages), format

    def _is_off_scale(self, law: Sampling) -> bool:
        """Whether the log-probabilities that the server gives are of another distribution than it draws from: before temperature
        (its `--logprobs-mode` is not processed_logprobs)."""
        return self._facts is not None and not self._facts.processed_logprobs and law.temperature != 1.0
