"""New weights into a running vLLM, and what it says of tokens by them. The order of calls is vLLM's; the receiving end is
`weight_receiver.py`.

Everything that can be refused is refused before generation is paused. What fails after that has left the engine's processes with
weights of neither version, and vLLM has no way back: the engine counts as dead.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from steno.contracts.errors import EngineFailed, WeightsRefused
from steno.contracts.policy import Manifest, NcclRendezvous
from steno_worker.engines.vllm.weight_receiver import NAME
from steno_worker.interfaces import StagedUpdate
from steno_worker.weights.tensors import TensorPlace, check_fits, check_tensors, places_in, text_places
from steno_worker.weights.threads import in_time

logger = logging.getLogger(__name__)


class HalfLoaded(EngineFailed):
    """The engine's processes hold weights of no version."""


class VllmWeights:
    """Loads weights into one vLLM engine. Args: worker_id: by which a rendezvous (`nccl`) names this worker."""

    def __init__(self, config: VllmConfig, worker_id: str) -> None:
        self._worker_id = worker_id
        transfer = config.weight_transfer_config
        self._backend = transfer.backend if transfer is not None else ""
        self._places = checkpoint_places(config)
        self._joined = ""  # the rendezvous of the group that this engine is in

    async def load(self, llm: AsyncLLM, update: StagedUpdate) -> float:
        """Returns: seconds for which nothing was sampled.

        Raises: WeightsRefused: nothing has changed; HalfLoaded.
        """
        spec = update.spec
        if (adapter := spec.manifest.adapter) is not None:
            raise WeightsRefused(
                f"adapter: got one of rank {adapter.rank}, this engine takes none; start it with --enable-lora "
                f"--max-lora-rank RANK, RANK at least {adapter.rank}",
                field="engine_args",
            )
        if self._backend != NAME:
            raise WeightsRefused(
                f"this engine was started with --weight-transfer-config for {self._backend!r}; leave it out",
                field="engine_args",
            )
        if self._places is not None:
            check_fits(spec.manifest.tensors, self._places)
        if spec.transport == "nccl":
            message = await self._join(llm, spec.location, spec.manifest, spec.deadline_s)
        else:
            await in_time(spec.deadline_s, check_tensors, update.folder, spec.manifest)
            paths = [str(update.folder / shard.name) for shard in spec.manifest.shards]
            try:
                async with asyncio.timeout(spec.deadline_s):
                    await self._init(llm, {"paths": paths}, "a shard can't be opened")
            except TimeoutError as error:
                raise HalfLoaded("the engine still waits for shards that can't be opened") from error
            message = {}
        started = time.monotonic()
        try:
            async with asyncio.timeout(spec.deadline_s):
                await llm.pause_generation(mode="keep", clear_cache=spec.kv == "recompute")
                await llm.start_weight_update()
                await llm.update_weights(WeightTransferUpdateRequest(message))
                await llm.finish_weight_update(update.version)
                await llm.resume_generation()
        except Exception as error:  # vLLM's own are of many kinds; each leaves the same: a model half old and half new
            self._joined = ""
            reason = "it took too long" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            raise HalfLoaded(f"the engine failed while it loaded {update.version}: {reason}") from error
        return time.monotonic() - started

    async def _join(self, llm: AsyncLLM, location: str, manifest: Manifest, deadline_s: float) -> dict[str, Any]:
        """Enter the trainer's group, unless this engine is in it already. Returns: what to receive."""
        try:
            meeting = NcclRendezvous.model_validate_json(location)
        except ValidationError as error:
            raise WeightsRefused(
                f"location: no rendezvous: {error.errors(include_url=False)[0]['msg']}", field="location"
            ) from error
        offset = meeting.rank_offsets.get(self._worker_id)
        if offset is None:
            raise WeightsRefused(f"location: rank_offsets has no worker {self._worker_id!r}", field="location")
        if location != self._joined:
            self._joined = ""
            fields = meeting.model_dump(exclude={"rank_offsets"}) | {"rank_offset": offset}
            try:
                async with asyncio.timeout(deadline_s):
                    await self._init(llm, {"nccl": fields}, "can't join the NCCL group")
            except TimeoutError as error:
                raise HalfLoaded(
                    "the NCCL group was not complete in time, and the engine still waits for it"
                ) from error
            self._joined = location
        return {
            "nccl": {
                "names": [tensor.name for tensor in manifest.tensors],
                "dtype_names": [tensor.dtype for tensor in manifest.tensors],
                "shapes": [tensor.shape for tensor in manifest.tensors],
            }
        }

    async def _init(self, llm: AsyncLLM, info: dict[str, Any], failure: str) -> None:
        try:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(info))
        except TimeoutError:
            raise
        except Exception as error:  # from another process, as text; nothing has been paused or changed yet
            raise WeightsRefused(f"{failure}: {error}", field="location") from error


async def score(llm: AsyncLLM, token_ids: list[int], lora_request: LoRARequest | None = None) -> list[float]:
    """Log-probabilities of token_ids[1:] at temperature 1, from nothing cached. Raises: as AsyncLLM.generate; EngineFailed."""
    params = SamplingParams(
        max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, watermarking=False
    )
    given = None
    name = f"score-{uuid.uuid4().hex}"
    async for output in llm.generate(tokens_input(token_ids), params, name, lora_request=lora_request):
        given = output.prompt_logprobs
    if given is None or len(given) != len(token_ids):
        raise EngineFailed("the engine gave no log-probabilities of a prompt")
    return [float(entry[token].logprob) for token, entry in zip(token_ids[1:], given[1:], strict=True)]


def checkpoint_places(config: VllmConfig) -> dict[str, TensorPlace] | None:
    """The tensors of the checkpoint that the engine was started from, by the headers of its files: what every later one must
    have too, but for what is no part of the text model, which vLLM keeps. None: it has no safetensors files here (dummy
    weights), and vLLM's own loader is all that checks."""
    folder = checkpoint_folder(config)
    if folder is None:
        return None
    text = config.model_config.hf_text_config
    places = text_places(places_in(folder), getattr(text, "num_hidden_layers", None))
    if getattr(text, "tie_word_embeddings", False):
        _tie(places)
    return places or None


def checkpoint_folder(config: VllmConfig) -> Path | None:
    """Where the files of the checkpoint lie here; None: nowhere."""
    model = config.model_config
    folder = Path(model.model)
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        logger.warning("can't find the checkpoint's files, updates are not compared with them: %s", error)
        return None
    return folder


def _tie(places: dict[str, TensorPlace]) -> None:
    """A tied head is its embedding: checkpoints have either, or both."""
    named = (name for name, place in places.items() if name.endswith("embed_tokens.weight") and not place.optional)
    embedding = next(named, None)
    if embedding is not None:
        place = places[embedding]
        places["lm_head.weight"] = TensorPlace(place.shape, place.floating, place.shared)
