"""vLLM in this process: its asynchronous engine behind the `TokenEngine` seam.

Owns one `AsyncLLM`, from construction to shutdown. Text, templates and parsers are `chat_format.py`; stop strings and frames are
`chat_engine.py`. It keeps I1 (every id with the log-probability it was sampled at, or an error) and I10 (every id with the
version of the weights that sampled it, also when they changed inside one delta).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import (
    BadRequest,
    ConfigError,
    ContextOverflow,
    EngineFailed,
    TooManyRequests,
    WeightsRefused,
)
from steno.contracts.wire.frames import ModelCard
from steno_worker.chat.chat_engine import ChatEngine, is_plain
from steno_worker.engines.grammars import GRAMMARS
from steno_worker.engines.vllm.adapter import VllmAdapter
from steno_worker.engines.vllm.args import EngineArgs, one_grammar_backend, parse_args
from steno_worker.engines.vllm.chat_format import VllmFormat, VllmGrammar
from steno_worker.engines.vllm.load import VllmLoad
from steno_worker.engines.vllm.params import sampling_params
from steno_worker.engines.vllm.process import dying_with_this
from steno_worker.engines.vllm.ranks import CacheRanks
from steno_worker.engines.vllm.steps import VersionSpans, steps_of
from steno_worker.engines.vllm.weights import HalfLoaded, VllmWeights, checkpoint_folder, score
from steno_worker.interfaces import Engine, StagedUpdate, TokenStep, TokenTally

logger = logging.getLogger(__name__)

FIRST_VERSION = "base/0"
"""Of the weights that were loaded at start: no lineage has trained them yet."""

FULL_S = 0.1
"""How soon a probe is tried again that a full engine has refused (--max-num-queued-reqs, --max-num-queued-tokens)."""

NOT_ENFORCED = (
    "multipleOf, uniqueItems, contains, an unusual format, a pattern or format beside a length, patternProperties or "
    "propertyNames beside properties, an allOf of several"
)
"""Of JSON schemas, by xgrammar: vLLM's error does not say which."""
SHUTDOWN_S = 10.0
"""How long the engine's processes may take to end before they are killed."""


class VllmSettings(Protocol):
    """What `build` reads of the worker's settings."""

    model: str | None
    policy: str
    worker_id: str
    context_tokens: int | None
    engine_args: Sequence[str]


def build(settings: VllmSettings) -> Engine:
    """The vLLM engine of a worker. `engine_args` are vLLM's own command line, and win over the settings beside them.

    Raises: ConfigError; SystemExit with vLLM's own message, for words that its parser refuses.
    """
    words = list(settings.engine_args)
    if settings.context_tokens is not None:
        words = ["--max-model-len", str(settings.context_tokens), *words]
    if settings.model is None and not any(word.split("=")[0] == "--model" for word in words):
        raise ConfigError("model: the vllm engine needs a model directory or a name", field="model")
    tokens = VllmTokens(parse_args(words, settings.model), policy=settings.policy, worker_id=settings.worker_id)
    return ChatEngine(tokens, tokens.format)


class VllmTokens:
    """A `TokenEngine`. One instance lives in one event loop: built anywhere, started and stopped in it.

    Attributes:
        format: the model's `ChatFormat`.
        on_death: called once, in the event loop, when the engine has died by itself; says why.
        version: of the weights now loaded.
    """

    def __init__(self, args: EngineArgs, *, policy: str = "default", worker_id: str = "worker") -> None:
        """Reads the model's configuration and tokenizer, not its weights. Raises: ConfigError."""
        args = args.checked()
        try:
            self._config: VllmConfig = args.engine.create_engine_config()
        except (ValueError, OSError, TypeError, AssertionError, NotImplementedError) as error:
            raise ConfigError(f"vLLM refuses these arguments: {error}", field="engine_args") from error
        self.format = VllmFormat(self._config, args)
        one_grammar_backend(self._config.structured_outputs_config, tekken=self.format.is_tekken)
        self.tally = TokenTally()
        self.version = FIRST_VERSION
        self.on_death: Callable[[str], None] | None = None
        self._args = args
        self._policy = policy
        self._llm: AsyncLLM | None = None
        self._weights = VllmWeights(self._config, worker_id)
        self._adapter = VllmAdapter(self._config) if self._config.lora_config is not None else None
        self._salt: str | None = None  # cache salt of new prompts: they must not use what other weights have cached
        self._loads = itertools.count(1)
        self._keeping: set[str] = set()  # the version that is being loaded, if requests keep their cache over it
        self._kept: dict[str, set[str]] = {}  # of each request that runs, the versions that came like this while it did
        self._load = VllmLoad(self._config)
        parallel = self._config.parallel_config
        # As vLLM counts the ranks that a request may name.
        ranks = parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size
        self._ranks = CacheRanks(ranks, self._config.scheduler_config.max_num_seqs)
        self._death = ""

    @property
    def healthy(self) -> bool:
        """Started, and neither stopped nor dead."""
        return self._llm is not None and not self._death and not self._llm.errored

    @property
    def max_streams(self) -> int:
        """Sequences that the schedulers run at once, over all data-parallel ranks."""
        return int(self._config.scheduler_config.max_num_seqs * self._config.parallel_config.data_parallel_size)

    def card(self) -> ModelCard:
        served = self._args.engine.served_model_name
        name = served if isinstance(served, str) else served[0] if served else Path(self._args.engine.model).name
        able = {"tools": self.format.has_tools, "reasoning": self.format.has_reasoning}
        words = ["cancel", "grammar", "logprobs", *(word for word, has in able.items() if has)]
        context = self._config.model_config.max_model_len
        return ModelCard(
            name, context, self._policy, self.version, tokenizer_digest=self.format.digest, capabilities=words,
            vocabulary_size=self._config.model_config.get_vocab_size(), fields=["allowed_token_ids", "bad_words", *GRAMMARS],
        )  # fmt: skip

    async def start(self) -> None:
        """Load the weights. Blocks the event loop as `vllm serve` does: nothing is served before.

        Raises: ConfigError: the engine could not start; its own log says more.
        """
        try:
            with dying_with_this():
                self._llm = AsyncLLM.from_vllm_config(
                    self._config,
                    stat_loggers=[lambda config, index=0: self._load],
                    enable_log_requests=self._args.engine.enable_log_requests,
                    disable_log_stats=self._args.engine.disable_log_stats,
                )
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(f"vLLM could not start: {error}", field="engine_args") from error
        assert self._llm.output_handler is not None
        self._llm.output_handler.add_done_callback(self._output_ended)
        if self._adapter is not None:
            await self._adapter.start(self._llm)
        await self._llm.update_weight_version(self.version)

    async def stop(self) -> None:
        """Ends the engine's processes. Whoever still waits for a token gets EngineFailed."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        llm.output_processor.propagate_error(EngineDeadError())
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # or vLLM logs our shutdown as a crash
        await asyncio.to_thread(llm.shutdown, SHUTDOWN_S)
        if self._adapter is not None:
            self._adapter.close()

    @property
    def llm(self) -> AsyncLLM:
        """The engine itself. Raises: EngineFailed when there is none."""
        return self._running()

    def checkpoint(self) -> Path | None:
        return self._adapter.checkpoint if self._adapter is not None else checkpoint_folder(self._config)

    async def load_weights(self, update: StagedUpdate) -> float:
        """Raises: WeightsRefused: nothing has changed; EngineFailed: the engine is dead."""
        if update.spec.kv == "keep":
            self._keeping = {update.version}
            for kept in self._kept.values():
                kept.add(update.version)
        try:
            pause_s = await (self._adapter or self._weights).load(self._running(), update)
        except HalfLoaded as error:
            self._died(error.message)
            raise
        except WeightsRefused:
            for kept in self._kept.values():
                kept.discard(update.version)
            raise
        finally:
            self._keeping = set()
        self.version = update.version
        # New for each load: weights that are gone back from may come again, after others have filled the cache.
        self._salt = f"{update.version}#{next(self._loads)}"
        return pause_s

    async def score(self, token_ids: list[int]) -> list[float]:
        """Tried again while the engine is full, for as long as the caller waits: nothing is wrong with its weights then.

        Raises: BadRequest: ids that the model can't take; EngineFailed.
        """
        try:
            while True:
                try:
                    return await score(self._running(), token_ids, self._lora_request)
                except GracefulHTTPError as error:
                    logger.debug("the probe is tried again: %s", error)
                    await asyncio.sleep(FULL_S)
        except VLLMClientError as error:
            raise _refused(error) from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailed(f"the engine could not score the probe: {error}") from error

    def load(self) -> tuple[int, int, float]:
        """Raises: EngineFailed: the engine has died."""
        if self._death:
            raise EngineFailed(self._death)
        if self._llm is None:
            return 0, 0, 0.0
        # Statistics come with an engine step, so after an abort they are old; the number of open requests never is.
        unfinished = self._llm.get_num_unfinished_requests()
        waiting = min(self._load.waiting, unfinished)
        return unfinished - waiting, waiting, self._load.kv_used

    def constrains(self, job: Job) -> bool:
        """Also true where the grammar only begins after the reasoning: nothing is trained that might be bent (I1)."""
        return self.format.grammar(job) is not None

    async def check(self, prompt_ids: list[int], law: Sampling, job: Job) -> None:
        """By vLLM's own look at a request, whose result is thrown away. Raises: BadRequest, ContextOverflow."""
        llm = self._running()
        self._check_room(prompt_ids)
        grammar = self.format.grammar(job)
        params = sampling_params(law, job, grammar, self.format.stop_ids)
        usual = law.is_plain() and not (law.stop_token_ids or job.top_logprobs or is_plain(job))
        if grammar is None and usual:
            return  # nothing that vLLM may refuse, and a look costs as much as the request's own
        tasks = await llm.get_supported_tasks()
        try:
            llm.input_processor.process_inputs("check", tokens_input(prompt_ids), params, tasks)
        except (VLLMClientError, ValueError, TypeError) as error:
            raise _refused(error) from error

    async def sample(
        self, request_id: str, prompt_ids: list[int], law: Sampling, job: Job, *, trial_id: str = ""
    ) -> AsyncIterator[TokenStep]:
        llm = self._running()
        self._check_room(prompt_ids)
        grammar = self.format.grammar(job)
        params = sampling_params(law, job, grammar, self.format.stop_ids)
        reasoning_ended = self._reasoning_ended(grammar, job, prompt_ids)
        rank = self._ranks.take(trial_id)
        outputs = llm.generate(
            tokens_input(prompt_ids, cache_salt=self._salt),
            params,
            request_id,
            lora_request=self._lora_request,
            data_parallel_rank=rank,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=grammar.reasoning_kwargs if grammar else None,
        )
        spans = VersionSpans(llm, request_id)
        kept = self._kept[request_id] = set(self._keeping)
        constrained, taken = grammar is not None, 0
        # Closing vLLM's generator is what aborts the request in the engine and forgets it here.
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    for step in steps_of(output, spans, job.top_logprobs, constrained=constrained, kept=kept):
                        self.tally.sampled += len(step.ids)
                        taken += len(step.ids)
                        yield step
            except EngineDeadError as error:
                self._died("the engine's processes have ended")
                raise EngineFailed("the engine died") from error
            except VLLMClientError as error:
                raise _refused(error) from error
            except GracefulHTTPError as error:
                raise TooManyRequests(str(error)) from error
            except EngineGenerateError as error:
                if isinstance(error.__cause__, ValueError | TypeError):
                    raise BadRequest(str(error.__cause__)) from error
                raise EngineFailed(f"the engine gave up on this request: {error.__cause__ or error}") from error
            finally:
                self._ranks.release(rank)
                del self._kept[request_id]
                left = spans.sampled() - taken
                self.tally.sampled += left
                self.tally.unsent["cancelled"] += left

    def _check_room(self, prompt_ids: Sequence[int]) -> None:
        context = self._config.model_config.max_model_len
        if len(prompt_ids) >= context:
            raise ContextOverflow(
                f"the prompt has {len(prompt_ids)} tokens, the model's context {context}",
                prompt_tokens=len(prompt_ids),
                context_tokens=context,
                field="messages",
            )

    @property
    def _lora_request(self) -> LoRARequest | None:
        return self._adapter.request if self._adapter is not None else None

    def _running(self) -> AsyncLLM:
        if self._llm is None or self._death:
            raise EngineFailed(self._death or "the engine is not running")
        return self._llm

    def _reasoning_ended(self, grammar: VllmGrammar | None, job: Job, prompt_ids: Sequence[int]) -> bool | None:
        """The engine would look for the end of reasoning in the whole prompt, where kept thinking of earlier turns ends."""
        if grammar is None:
            return None
        if grammar.from_start or is_plain(job):  # nobody thinks in a plain completion
            return True
        return self.format.reasoning_ended(job, self.format.generation_prompt(prompt_ids))

    def _output_ended(self, task: asyncio.Task[None]) -> None:
        """vLLM's task that takes in the engine's output: it ends when we stop, or when the engine has died."""
        if self._llm is not None and not task.cancelled():
            self._died("the engine's processes have ended")

    def _died(self, why: str) -> None:
        if self._death or self._llm is None:
            return
        self._death = why
        logger.error("vLLM is dead: %s", why)
        if self.on_death is not None:
            self.on_death(why)


def _refused(error: Exception) -> BadRequest:
    said = str(error)
    if "not supported by xgrammar" in said:
        said += f" Among them: {NOT_ENFORCED}."
    return BadRequest(said, field=getattr(error, "parameter", None))
