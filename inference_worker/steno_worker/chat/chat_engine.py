"""A `TokenEngine` and a `ChatFormat` made into an `Engine`: one job from its messages to its last event.

Owns what every engine needs alike: the prompt and the part of it that is new, the context's bound, the sampling law in effect,
stop strings, parsing, and the marks of I1. Knows no socket and no model; an engine samples ids and does nothing else.

    job -> prompt ids -> engine -> steps of ids -> text -> stop strings -> parser -> Started, Delta …, Finish
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from array import array
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import msgspec

from steno.contracts.chat import CONTINUES, OPEN_END, Job, Sampling, TokenLogprob, ToolCallPiece
from steno.contracts.errors import BadRequest, ContextOverflow, EngineFailed, NoWorker, UnsoundOutput
from steno.contracts.json_limits import whole_text
from steno.contracts.records import bytes_to_ids, floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import (
    TAKEOVER,
    TEXTS,
    TOKENIZES,
    Count,
    Counted,
    Delta,
    Finish,
    Generate,
    ModelCard,
    Shown,
    StreamEvent,
)
from steno_worker.chat.check import FormatReport, check_format
from steno_worker.chat.interfaces import ChatFormat, Parser
from steno_worker.chat.prompt import Prompt, PromptRenderer, started_of
from steno_worker.chat.reader import CompletionReader, PlainText, StepText
from steno_worker.chat.replay import UnshownPart, law_of_the_rest, replay
from steno_worker.chat.tokens import tokenized
from steno_worker.interfaces import StagedUpdate, TokenEngine, TokenStep

logger = logging.getLogger(__name__)
_FIELDS = ["include_stop_str_in_output", "skip_special_tokens", OPEN_END, CONTINUES]
"""`skip_special_tokens: false` is how decoders here read everything but stop ids."""


class ChatEngine:
    """An `Engine`. `engine` is started before `format` is first used, so that a format may come to be with its engine."""

    def __init__(self, engine: TokenEngine, format: ChatFormat) -> None:
        self.tally = engine.tally
        self._engine = engine
        self._format = format
        self._report: FormatReport | None = None
        self._prompter: PromptRenderer | None = None
        # A long prompt must not hold up the streams; one thread, since formats need not be safe for two.
        self._renderer = ThreadPoolExecutor(1, "render")
        self._counting = asyncio.Semaphore(1)  # so that a turn waits there behind one count at most

    async def start(self) -> None:
        """Start the engine and check the format; what is wrong with it is logged, and missing from the card."""
        await self._engine.start()
        report = await asyncio.get_running_loop().run_in_executor(self._renderer, check_format, self._format)
        for problem in report.problems:
            logger.warning("model %s: %s", self._engine.card().name, problem)
        if not report.extends:
            logger.error(
                "model %s: the chat template can't render new messages alone: every turn with a history will be a new branch",
                self._engine.card().name,
            )
        self._report, self._prompter = report, PromptRenderer(self._format, report)

    async def stop(self) -> None:
        await self._engine.stop()
        self._renderer.shutdown(wait=False, cancel_futures=True)

    def cards(self) -> list[ModelCard]:
        """The engine's card, with the capabilities `takeover`, `tokenize` and `texts`, and `continuation` if the format can be
        extended (I2), and with the fields that are honoured here, whatever the engine."""
        card = self._engine.card()
        words = [TAKEOVER, TOKENIZES, TEXTS]
        if self._report and self._report.extends:
            words.append("continuation")
        more = [word for word in words if word not in card.capabilities]
        fields = [*card.fields, *_FIELDS]
        return [msgspec.structs.replace(card, capabilities=[*card.capabilities, *more], fields=fields)]

    @property
    def max_streams(self) -> int | None:
        """How many completions the engine runs at once, where that is its own to say."""
        return getattr(self._engine, "max_streams", None)

    def load(self) -> tuple[int, int, float]:
        return self._engine.load()

    def checkpoint(self) -> Path | None:
        return self._engine.checkpoint()

    async def load_weights(self, update: StagedUpdate) -> float:
        return await self._engine.load_weights(update)

    async def score(self, token_ids: list[int]) -> list[float]:
        return await self._engine.score(token_ids)

    async def count(self, job: Job) -> int:
        """Raises: BadRequest: the template refuses. ContextOverflow: the format knows without counting."""
        whole = Generate(stream=0, turn_id="", attempt=0, trial_id="", job=job)
        async with self._counting:
            prompt = await asyncio.get_running_loop().run_in_executor(self._renderer, self._prompt, whole)
        return len(prompt.ids)

    async def tokenize(self, asked: Count) -> Counted:
        """Raises: as `count`; BodyTooLarge: the answer would be."""
        if self._prompter is None:
            raise EngineFailed("the engine is not started")
        run = asyncio.get_running_loop().run_in_executor
        async with self._counting:
            return await run(self._renderer, tokenized, asked, self._format, self._prompter)

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        """One Started, Deltas, one Finish.

        Raises: BadRequest, ContextOverflow, NoWorker (another model is meant): before Started. EngineFailed: at any time.
        """
        job, card = request.job, self._engine.card()
        if request.model not in ("", card.name):
            raise NoWorker(f"this worker serves {card.name!r}, not {request.model!r}")
        prompt = await asyncio.get_running_loop().run_in_executor(self._renderer, self._prompt, request)
        law = law_in_effect(job.sampling, len(prompt.ids), card.context_tokens, field_of(job))
        grammar = self._engine.constrains(job)
        await self._engine.check(prompt.ids, law, job)
        yield started_of(request.stream, prompt, law, grammar=grammar)
        parser = PlainText() if is_plain(job) else self._parser(job, prompt)
        one_call = not job.parallel_tool_calls and bool(job.tools) and job.tool_choice != "none" and not grammar
        reader = CompletionReader(self._format, parser, law, one_call, shows_stop=job.shows_stop)
        ids, rest, before, unshown, last = prompt.ids, law, 0, None, None
        if request.sampled_ids:
            sampled = bytes_to_ids(request.sampled_ids)
            before, unshown = len(sampled), UnshownPart(request.shown or Shown())
            last = replay(reader, sampled, law, self._stops(law))
            last.parsed = unshown.of(last.parsed)
            if not last.is_empty():
                yield self._delta(request.stream, job, law, TokenStep([], None, card.policy_version), last)
            ids, rest = [*ids, *sampled], law_of_the_rest(law, before, request.attempt)
        if last is None or last.reason is None:
            name = f"{request.turn_id}-{request.attempt}"
            steps = self._engine.sample(name, ids, rest, job, trial_id=request.trial_id)
            async with _closing(steps):
                async for step in steps:
                    last = self._read(reader, step, law, card.synthetic)
                    if unshown is not None:
                        last.parsed = unshown.of(last.parsed)
                    if last.ids or not last.is_empty():
                        yield self._delta(request.stream, job, law, step, last)
                    if last.reason:
                        break
        if last is None or last.reason is None:
            raise EngineFailed("the engine ended a completion without a finish reason")
        yield Finish(
            stream=request.stream,
            reason=last.reason,
            completion_tokens=reader.sampled - before,
            stop=last.stop,
            cached_tokens=reader.cached_tokens,
            timings=reader.timings,
        )

    def _read(self, reader: CompletionReader, step: TokenStep, law: Sampling, synthetic: bool) -> StepText:
        """Raises: EngineFailed, and whatever a parser raises."""
        count, why = len(step.ids), "failed"
        try:
            _check(step, law, synthetic)
            read = reader.read(step)
            count, why = count - len(read.ids), "after_end"
        finally:
            self.tally.unsent[why] += count
        return read

    def _prompt(self, request: Generate) -> Prompt:
        job, prefix = request.job, bytes_to_ids(request.prefix_ids)
        if request.sampled_ids and is_plain(job):
            return Prompt(prefix.tolist(), kept_tokens=len(prefix))
        if request.sampled_ids and self._prompter is not None:
            return self._prompter.again(job, prefix.tolist())
        if job.prompt_text is not None:
            return given_prompt(self._format.encode(job.prompt_text), prefix)
        if job.prompt_ids is not None:
            return given_prompt(_valid_ids(bytes_to_ids(job.prompt_ids), self._format.vocab_size), prefix)
        if self._prompter is None:
            raise EngineFailed("the engine is not started")
        return self._prompter.chat(job, prefix, request.prefix_messages)

    def _stops(self, law: Sampling) -> frozenset[int]:
        return frozenset(law.stop_token_ids) | (frozenset() if law.ignore_eos else self._format.stop_ids)

    def _parser(self, job: Job, prompt: Prompt) -> Parser:
        # With tool_choice "none" a call is plain content: to the parser there are no tools.
        known = job if job.tool_choice != "none" else msgspec.structs.replace(job, tools=[])
        return self._format.parser(known, prompt.generation_prompt)

    def _delta(self, stream: int, job: Job, law: Sampling, step: TokenStep, read: StepText) -> Delta:
        parsed = read.parsed
        return Delta(
            stream=stream,
            ids=ids_to_bytes(read.ids),
            logprobs=floats_to_bytes(step.logprobs[: len(read.ids)]) if step.logprobs is not None else b"",
            version=step.version,
            content=whole_text(parsed.content),
            reasoning=whole_text(parsed.reasoning),
            tool_calls=[_whole_piece(piece) for piece in parsed.tool_calls],
            tokens=[] if job.top_logprobs is None else self._tokens(step, read.ids, job.top_logprobs),
            constrained=step.constrained or not law.is_plain(),
            mixed_kv=step.mixed_kv,
        )

    def _tokens(self, step: TokenStep, ids: Sequence[int], top: int) -> list[TokenLogprob]:
        """What a client that asked for log-probabilities sees: tokens it has the text of, so no stop ids."""
        if step.logprobs is None:
            return []
        seen = []
        for index, (token_id, logprob) in enumerate(zip(ids, step.logprobs, strict=False)):
            if token_id in self._format.stop_ids:
                continue
            others = step.top[index][:top] if step.top else []
            alternatives = [(*self._format.token_text(other), value) for other, value in others]
            seen.append(TokenLogprob(*self._format.token_text(token_id), logprob, alternatives))
        return seen


def _whole_piece(piece: ToolCallPiece) -> ToolCallPiece:
    """Parsers read a call as JSON, where the model may have written half a surrogate pair as an escape."""
    return ToolCallPiece(piece.index, whole_text(piece.arguments), whole_text(piece.id), whole_text(piece.name))


def law_in_effect(asked: Sampling, prompt_tokens: int, context_tokens: int, field: str) -> Sampling:
    """The law with max_tokens set, clamped to what the context leaves (agents ask for 64,000 whatever the context)."""
    room = context_tokens - prompt_tokens
    if room < 1:
        raise ContextOverflow(
            f"the prompt has {prompt_tokens} tokens; the model's context is {context_tokens}, one of them for the answer",
            prompt_tokens=prompt_tokens,
            context_tokens=context_tokens,
            field=field,
        )
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise BadRequest(f"max_tokens: got {asked.max_tokens}, must be at least 1", field="max_tokens")
    return msgspec.structs.replace(asked, max_tokens=min(asked.max_tokens or room, room))


def is_plain(job: Job) -> bool:
    """Whether the input is a prompt and no conversation."""
    return job.prompt_text is not None or job.prompt_ids is not None


def field_of(job: Job) -> str:
    """Which field of the request the prompt comes from."""
    return "prompt" if is_plain(job) else "messages"


def given_prompt(ids: list[int], prefix: array[int]) -> Prompt:
    """A plain prompt, which goes on from the prefix if it begins with it. Raises: BadRequest: it is empty."""
    if not ids:
        raise BadRequest("the prompt is empty", field="prompt")
    if not prefix:
        return Prompt(ids)
    if ids[: len(prefix)] == prefix.tolist():
        return Prompt(ids, kept_tokens=len(prefix))
    return Prompt(ids, refused="render_differs")


def _valid_ids(ids: array[int], vocab_size: int) -> list[int]:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(id_ for id_ in ids if not 0 <= id_ < vocab_size)
        raise BadRequest(f"token id {wrong} is not in the vocabulary of {vocab_size}", field="prompt")
    return ids.tolist()


def _check(step: TokenStep, law: Sampling, synthetic: bool) -> None:
    """I1: a missing log-probability is an error. One that is no number, under a plain law, is the model's doing."""
    if step.logprobs is None:
        if not synthetic:
            raise EngineFailed("the engine gave tokens without log-probabilities")
    elif len(step.logprobs) != len(step.ids):
        raise EngineFailed("the engine gave some tokens without a log-probability")
    elif not math.isfinite(sum(step.logprobs)):
        kind = UnsoundOutput if law.is_plain() else EngineFailed
        raise kind("the engine gave a log-probability that is not a finite number")


def _closing(steps: AsyncIterator[TokenStep]) -> contextlib.AbstractAsyncContextManager[object]:
    """Closing the engine's iterator cancels; one that is no generator has nothing to close."""
    return aclosing(steps) if hasattr(steps, "aclose") else contextlib.nullcontext()  # type: ignore[type-var]
