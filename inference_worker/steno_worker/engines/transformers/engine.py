"""The embedded engine: a transformers model in a thread of its own, on the CPU or one GPU, for demos, tests and small models.

Owns what is asked of it and who waits for which tokens. The thread is `batch_thread.py`, batching `batch.py`, sampling
`sampler.py`, grammars `grammar.py`. Float32 throughout, so that log-probabilities agree with any other forward pass to 1e-3 (I1).
A failure in the thread fails every request, and the engine stays unhealthy.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import BadRequest, ConfigError, ContextOverflow, EngineFailed, StenoError, WeightsRefused
from steno.contracts.wire.frames import ModelCard
from steno_worker.engines.grammars import GRAMMARS
from steno_worker.engines.options import engine_options, model_directory
from steno_worker.engines.transformers import grammar
from steno_worker.engines.transformers.batch import RunningBatch, Sequence
from steno_worker.engines.transformers.batch_thread import BatchThread, Steps
from steno_worker.engines.transformers.sampler import SamplerRow
from steno_worker.interfaces import MAX_STREAMS, Engine, StagedUpdate, TokenStep, TokenTally
from steno_worker.weights.adapter import AdapterBase, read_adapter
from steno_worker.weights.tensors import TensorPlace, check_fits, places_in, places_of, read_tensors
from steno_worker.weights.threads import in_time

MIN_TEMPERATURE = 0.01
"""vLLM's bound, kept here too: logits divided by much less overflow float32."""
OPTIONS = {
    "threads": (1, "CPU threads of torch; one is best for a tiny model, and for whatever shares the machine"),
    "device": ("cpu", "where the model is: cpu, cuda, cuda:1, …"),
    "prefill_tokens": (512, "prompt tokens computed between two steps of the running streams"),
}
"""Engine arguments: name -> (default, meaning)."""
_LOADING = threading.Lock()
"""Held while transformers loads a model: meanwhile it changes its classes, and restores them at the end. Two loads at a time (one
may have been left behind) would leave them changed, and no model's head would be tied from then on."""


class TransformersSettings(Protocol):
    """What `build` reads of the worker's settings."""

    model: Any
    policy: str
    max_streams: int | None
    context_tokens: int | None
    engine_args: Any


def build(settings: TransformersSettings) -> Engine:
    """The embedded engine for a model directory in Hugging Face layout.

    Raises: ConfigError naming the setting: no such directory, not a causal model, no chat template, unknown argument.
    """
    from steno_worker.chat.chat_engine import ChatEngine
    from steno_worker.chat.hf import HfChatFormat

    options = engine_options(settings.engine_args, {name: default for name, (default, _) in OPTIONS.items()})
    directory = model_directory(settings.model, weights=True)
    context = _context_tokens(_checked_config(directory), settings.context_tokens)
    chat = HfChatFormat.load(directory, context_tokens=context)
    tokens = TransformersEngine(
        directory,
        stop_ids=chat.stop_ids,
        max_streams=settings.max_streams or MAX_STREAMS,
        context_tokens=context,
        policy=settings.policy,
        tokenizer_digest=chat.digest,
        **options,
    )
    return ChatEngine(tokens, chat)


class TransformersEngine:
    """A `TokenEngine`. The model is loaded by `start`, in its thread."""

    def __init__(
        self,
        model_dir: Path,
        *,
        stop_ids: frozenset[int],
        max_streams: int = 16,
        context_tokens: int | None = None,
        name: str | None = None,
        policy: str = "default",
        version: str = "base/0",
        tokenizer_digest: str = "",
        threads: int = 1,
        prefill_tokens: int = 512,
        device: str = "cpu",
    ) -> None:
        """Raises: ConfigError: torch has no such device, or a number is too small."""
        for argument, number in (("threads", threads), ("prefill_tokens", prefill_tokens)):
            if number < 1:
                raise ConfigError(f"engine_args.{argument}: got {number}, must be at least 1", field="engine_args")
        self._model_dir = model_dir
        self._config = _checked_config(model_dir)
        self._context_tokens = _context_tokens(self._config, context_tokens)
        self._name = name or model_dir.name
        self._policy = policy
        self._version = version
        self._tokenizer_digest = tokenizer_digest
        self._stop_ids = stop_ids
        self._max_streams = max_streams
        self._prefill_tokens = prefill_tokens
        self._grammars = grammar.Grammars(model_dir, self._config.vocab_size, stop_ids)
        self.tally = TokenTally()
        self._inboxes: dict[Sequence, asyncio.Queue[TokenStep | StenoError]] = {}
        self._layers: dict[str, TensorPlace] = {}  # by the names of the model's own
        self._places: dict[str, TensorPlace] = {}  # by those of its checkpoint
        self._unused: frozenset[str] = frozenset()  # of the checkpoint, what the model has no place for
        self._built_from: type[PreTrainedModel] | None = None  # where its own names are others
        self._base = AdapterBase(model_dir)
        self._failure: str | None = None
        self._device = _checked_device(device)
        self._thread = BatchThread(self._batch, threads=threads, deliver=self._deliver, failed=self._fail)

    # -- what the worker asks -----------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """False once the model thread has failed; it does not come back."""
        return self._failure is None

    def card(self) -> ModelCard:
        return ModelCard(
            name=self._name,
            context_tokens=self._context_tokens,
            policy=self._policy,
            policy_version=self._version,
            tokenizer_digest=self._tokenizer_digest,
            capabilities=["tools", "reasoning", "logprobs", "grammar", "cancel"],
            vocabulary_size=self._config.vocab_size,
            fields=["allowed_token_ids", *GRAMMARS],
        )

    def load(self) -> tuple[int, int, float]:
        if self._failure is not None:
            self._check_alive()
        running, waiting, cached_tokens = self._thread.occupancy
        return running, waiting, min(1.0, cached_tokens / (self._max_streams * self._context_tokens))

    def constrains(self, job: Job) -> bool:
        return grammar.constrains(job)

    def checkpoint(self) -> Path | None:
        return self._model_dir

    async def start(self) -> None:
        """Load the model. Raises: ConfigError if its weights can't be loaded."""
        await self._thread.start()

    async def stop(self) -> None:
        """Fail what runs, end the thread. Idempotent."""
        await self._thread.stop()
        self._fail_requests("the engine was stopped")

    async def load_weights(self, update: StagedUpdate) -> float:
        """Read beside the running streams, swapped between two steps. Raises: WeightsRefused: nothing changed; EngineFailed."""
        self._check_alive()
        if update.spec.transport == "nccl":
            raise WeightsRefused(
                "transport: got nccl, the embedded engine supports filesystem and stream", field="transport"
            )
        tensors = await in_time(update.spec.deadline_s, self._read, update)
        return await self.load_state_dict(update.version, tensors, keep=update.spec.kv == "keep")

    def _read(self, update: StagedUpdate) -> dict[str, torch.Tensor]:
        """The whole model's. An adapter is merged into the checkpoint, read anew: what runs may be of another update."""
        if (entry := update.spec.manifest.adapter) is None:
            check_fits([one for one in update.spec.manifest.tensors if one.name not in self._unused], self._places)
            read = read_tensors(update.folder, update.spec.manifest)
            return self._converted({name: tensor for name, tensor in read.items() if name not in self._unused})
        self._base.check(entry)
        adapter = read_adapter(update, entry)
        adapter.check_fits(self._layers)
        try:
            tensors = dict(_load_model(self._model_dir, self._config).state_dict())
        except Exception as error:  # transformers' own are of many kinds; what runs is as it was
            raise WeightsRefused(
                f"adapter.base: {self._model_dir} can't be loaded: {error}", field="adapter.base"
            ) from error
        for path, layer in adapter.layers.items():
            tensors[f"{path}.weight"].addmm_(layer.b.float(), layer.a.float(), alpha=adapter.scale)
        return tensors

    def _converted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of a checkpoint as the model has them: transformers fuses experts when it loads them."""
        if self._built_from is None:
            return tensors
        try:
            with _LOADING:
                model = self._built_from.from_pretrained(
                    None, config=self._config, state_dict=tensors, dtype=torch.float32
                )
        except Exception as error:  # transformers' own are of many kinds; what runs is as it was
            raise WeightsRefused(f"the weights can't be converted: {error}", field="manifest.tensors") from error
        return dict(model.state_dict())

    async def load_state_dict(self, version: str, tensors: Mapping[str, torch.Tensor], *, keep: bool = False) -> float:
        """Swap weights between two steps; tokens after that carry `version`. What is in flight prefills again, unless `keep`.

        Returns: seconds that the swap took. Raises: ValueError naming the tensor that does not fit (nothing has changed);
        EngineFailed.
        """

        def swap(batch: RunningBatch) -> float:
            started = time.monotonic()
            batch.swap_weights(version, tensors, keep=keep)
            return time.monotonic() - started

        self._check_alive()
        seconds = await self._thread.ask(swap)
        self._version = version
        return seconds

    async def score(self, token_ids: list[int]) -> list[float]:
        """Between two steps. Raises: BadRequest, ContextOverflow: ids that the model can't take; EngineFailed."""
        self._check_request(token_ids, Sampling(), beside=0)
        self._check_alive()
        return await self._thread.ask(lambda batch: batch.score(token_ids))

    async def check(self, prompt_ids: list[int], law: Sampling, job: Job) -> None:
        """Raises: BadRequest, ContextOverflow."""
        self._check_request(prompt_ids, law)
        if grammar.constrains(job):
            await asyncio.to_thread(self._grammars.matcher, job)

    def sample(
        self, request_id: str, prompt_ids: list[int], law: Sampling, job: Job, *, trial_id: str = ""
    ) -> AsyncIterator[TokenStep]:
        return self._sample(request_id, prompt_ids, law, job)

    async def _sample(
        self, request_id: str, prompt_ids: list[int], law: Sampling, job: Job
    ) -> AsyncIterator[TokenStep]:
        self._check_alive()
        self._check_request(prompt_ids, law)
        matcher = None
        if grammar.constrains(job):
            matcher = await asyncio.to_thread(self._grammars.matcher, job)
            self._check_alive()
        stops = frozenset(law.stop_token_ids) if law.ignore_eos else self._stop_ids | frozenset(law.stop_token_ids)
        room = self._context_tokens - len(prompt_ids)
        sequence = Sequence(
            request_id,
            SamplerRow(law, prompt_ids, stops, top=job.top_logprobs or 0, matcher=matcher),
            max_tokens=min(law.max_tokens or room, room),
        )
        inbox: asyncio.Queue[TokenStep | StenoError] = asyncio.Queue()
        self._inboxes[sequence] = inbox
        self._thread.tell(lambda batch: batch.add(sequence))
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, StenoError):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            if self._inboxes.pop(sequence, None) is not None:
                self._thread.tell(lambda batch: batch.drop(sequence))
            while not inbox.empty():
                left = inbox.get_nowait()
                self.tally.unsent["cancelled"] += len(left.ids) if isinstance(left, TokenStep) else 0

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(f"the engine has failed: {self._failure}")
        if not self._thread.runs:
            raise EngineFailed("the engine is not running")

    def _check_request(self, prompt_ids: list[int], law: Sampling, beside: int = 1) -> None:
        """beside: tokens that must have room in the context beside these."""
        vocabulary = self._config.vocab_size
        if not prompt_ids:
            raise BadRequest("the prompt is empty", field="prompt")
        if len(prompt_ids) + beside > self._context_tokens:
            raise ContextOverflow(
                f"the prompt has {len(prompt_ids)} tokens, the context {self._context_tokens}",
                prompt_tokens=len(prompt_ids),
                context_tokens=self._context_tokens,
                field="messages",
            )
        # An id without an embedding would end the model thread, and every other stream with it.
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
            raise BadRequest(f"the prompt has token ids outside 0..{vocabulary - 1}", field="prompt")
        if any(not 0 <= token < vocabulary for token in law.logit_bias):
            raise BadRequest(f"logit_bias has token ids outside 0..{vocabulary - 1}", field="logit_bias")
        if any(not 0 <= token < vocabulary for token in law.stop_token_ids):
            raise BadRequest(f"stop_token_ids has ids outside 0..{vocabulary - 1}", field="stop_token_ids")
        if any(not 0 <= token < vocabulary for token in law.allowed_token_ids):
            raise BadRequest(f"allowed_token_ids has ids outside 0..{vocabulary - 1}", field="allowed_token_ids")
        if law.temperature < 0:
            raise BadRequest(f"temperature: got {law.temperature}, must be at least 0", field="temperature")
        if 0 < law.temperature < MIN_TEMPERATURE:
            raise BadRequest(
                f"temperature: got {law.temperature}, must be 0 or at least {MIN_TEMPERATURE}", field="temperature"
            )

    # -- the model's thread, and what comes from it ------------------------------------------------------------------------

    def _batch(self) -> RunningBatch:
        """In the thread. Raises: ConfigError."""
        if self._device.type != "cpu":
            torch.set_default_device(self._device)  # of this thread: whatever a step makes is beside the model
        try:
            model = _load_model(self._model_dir, self._config)
            torch.nn.Module.to(model, self._device)
            self._layers = places_of(model.state_dict())
            self._places = _checkpoint_places(model, self._layers)
            self._unused = frozenset(places_in(self._model_dir).keys() - self._places.keys())
        except Exception as error:
            raise ConfigError(f"model: {self._model_dir} can't be loaded: {error}") from error
        self._built_from = None if self._places is self._layers else type(model)
        return RunningBatch(
            model, version=self._version, max_running=self._max_streams, prefill_tokens=self._prefill_tokens
        )

    def _deliver(self, steps: Steps) -> None:
        for sequence, step in steps:
            inbox = self._inboxes.get(sequence)
            count = len(step.ids) if isinstance(step, TokenStep) else 0
            self.tally.sampled += count
            if inbox is None:
                self.tally.unsent["cancelled"] += count  # while this step was computed
                continue
            if isinstance(step, StenoError) or step.finish is not None:
                del self._inboxes[sequence]
            inbox.put_nowait(step)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._fail_requests(f"the engine failed: {reason}")

    def _fail_requests(self, message: str) -> None:
        for inbox in self._inboxes.values():
            inbox.put_nowait(EngineFailed(message))
        self._inboxes.clear()
        self._thread.fail_waiting(message)


def _checked_config(model_dir: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: transformers can't read the configuration in {model_dir}: {error}") from error
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or not hasattr(config, "max_position_embeddings"):
        raise ConfigError(
            f"model: the embedded engine runs causal models with full attention only; {model_dir} has {sorted(kinds)}"
        )
    return config


def _checked_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    have = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0)
    if (device.index or 0) >= have:
        raise ConfigError(
            f"engine_args.device: got {name}, must be cpu or one of this machine's {torch.cuda.device_count()} CUDA devices",
            field="engine_args",
        )
    return device


def _context_tokens(config: Any, asked: int | None) -> int:
    longest = int(config.max_position_embeddings)
    if asked is not None and asked > longest:
        raise ConfigError(f"context_tokens: {asked} is more than the model's {longest} positions")
    context = asked or longest
    window = getattr(config, "sliding_window", None)
    if window and window < context and getattr(config, "use_sliding_window", True) is not False:
        # Attention would be to all that comes before: other log-probabilities than the model's, and nothing would say so (I1).
        raise ConfigError(
            f"context_tokens: {context} is more than the model's sliding_window, and the embedded engine runs full attention "
            f"only; allowed: at most {window} (--context-tokens {window})",
            field="context_tokens",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    bound = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and bound and bound < context:
        # transformers takes the frequencies of a whole call from its longest sequence: log-probabilities would depend on who
        # else runs, and the keys of one that grows over the bound would be of both kinds (I1).
        raise ConfigError(
            f"context_tokens: {context} is more than the {bound} positions up to which the model's rotary embedding (longrope) "
            f"is the same for all sequences, as the embedded engine needs; allowed: at most {bound} (--context-tokens {bound})",
            field="context_tokens",
        )
    return context


def _load_model(model_dir: Path, config: Any) -> PreTrainedModel:
    with _LOADING:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_dir, config=config, dtype=torch.float32, attn_implementation="sdpa"
        )
    model.train(False)
    return model


def _checkpoint_places(model: PreTrainedModel, layers: dict[str, TensorPlace]) -> dict[str, TensorPlace]:
    """The model's places by the names that its checkpoint has for them, as trainers send them: experts one by one."""
    if not getattr(model, "_weight_conversions", None):  # what transformers' loader leaves
        return layers
    places = {}
    for key, place in layers.items():
        whole = torch.empty(place.shape, dtype=torch.float32 if place.floating else torch.int64, device="meta")
        made = revert_weight_conversion(model, {key: whole})
        for name, tensor in made.items():
            places[name] = TensorPlace(tuple(tensor.shape), place.floating, place.shared if len(made) == 1 else name)
    return places
