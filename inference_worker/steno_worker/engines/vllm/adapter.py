"""New weights into a vLLM that was started with --enable-lora: the trainer's adapter, which takes the place of the one before.

Every request names the engine's one adapter, from its start on: a request that names none would go on with the model alone when
the first adapter comes. Until then its adapter adds 0 in one layer (vLLM takes none without layers). vLLM knows prompts in its
cache by an adapter's name and folder, so each version has a folder of its own. While generation is paused the cache is cleared,
unless requests are to keep theirs.

Source: `vllm.lora`, vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from steno.contracts.errors import ConfigError, EngineFailed, WeightsRefused
from steno.contracts.policy import AdapterEntry
from steno_worker.engines.vllm.weights import HalfLoaded, checkpoint_folder, checkpoint_places
from steno_worker.interfaces import StagedUpdate
from steno_worker.temporary import TemporaryFolder, sweep_dead
from steno_worker.weights.adapter import AdaptedLayer, Adapter, AdapterBase, read_adapter
from steno_worker.weights.threads import in_time

NAME, NUMBER = "policy", 1
"""Of the one adapter, as the engine knows it."""


class VllmAdapter:
    """Loads adapters into one engine.

    Attributes: request: what every request to the engine is to name. checkpoint: the folder that the engine was started from.
    """

    request: LoRARequest

    def __init__(self, config: VllmConfig) -> None:
        """Raises: ConfigError: the model has no layer that can be adapted; an engine that forgets adapters."""
        if config.parallel_config.data_parallel_size > 1:
            raise ConfigError(
                f"enable_lora: got data_parallel_size {config.parallel_config.data_parallel_size}, must be 1: vLLM's "
                "data-parallel engines drop adapters when idle; start one worker for each engine",
                field="engine_args",
            )
        self.checkpoint = checkpoint_folder(config)
        self._base = AdapterBase(self.checkpoint)
        self._max_rank: int = config.lora_config.max_lora_rank
        self._targets: list[str] = config.lora_config.target_modules
        self._places = checkpoint_places(config) or {}
        self._processes: int = config.parallel_config.world_size_across_dp
        self._nothing = self._of_zeros()
        self._temporary = TemporaryFolder("adapter")
        self._root = self._temporary.path
        sweep_dead()

    async def start(self, llm: AsyncLLM) -> None:
        """Before the first request. Raises: ConfigError."""
        try:
            await self._put(llm, self._write(self._nothing))
        except Exception as error:  # vLLM's own are of many kinds
            raise ConfigError(
                f"enable_lora: the engine can't load an adapter from {self._root}, which all of its processes must see: {error}",
                field="engine_args",
            ) from error

    def close(self) -> None:
        """The engine is gone. Idempotent."""
        self._temporary.remove()

    async def load(self, llm: AsyncLLM, update: StagedUpdate) -> float:
        """As `VllmWeights.load`."""
        deadline_s = update.spec.deadline_s
        adapter = await in_time(deadline_s, self._checked, update)
        if adapter is not self._nothing:  # which adds nothing, wherever it lands
            await self._check_wrapped(llm, adapter)
        folder = await in_time(deadline_s, self._write, adapter)
        started = time.monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                await llm.pause_generation(mode="keep", clear_cache=update.spec.kv == "recompute")
                try:
                    await self._put(llm, folder)
                except WeightsRefused:
                    await llm.resume_generation()
                    raise
                await llm.update_weight_version(update.version)
                await llm.resume_generation()
        except WeightsRefused:
            shutil.rmtree(folder)
            raise
        except Exception as error:  # vLLM's own are of many kinds; after each it is not known what it samples by
            reason = "it took too long" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            raise HalfLoaded(f"the engine failed while it loaded {update.version}: {reason}") from error
        return time.monotonic() - started

    async def _check_wrapped(self, llm: AsyncLLM, adapter: Adapter) -> None:
        """vLLM passes over layers that it has not wrapped. Raises: WeightsRefused naming one."""
        names = list(adapter.tensors())
        found: list[list[str]] = await llm.collective_rpc("not_adapted", args=(names,))
        # With pipeline parallelism each process has layers of its own.
        if missing := set(names).intersection(*found):
            raise WeightsRefused(
                f"tensor {min(missing)!r} is of a layer that vLLM can't adapt in this model", field="manifest.tensors"
            )

    def _checked(self, update: StagedUpdate) -> Adapter:
        """Raises: WeightsRefused."""
        entry = update.spec.manifest.adapter
        if update.spec.transport == "nccl":
            raise WeightsRefused(
                "transport: got nccl, must be filesystem or stream: vLLM takes adapters from files", field="transport"
            )
        if entry is None:
            if update.folder == self.checkpoint:  # what the engine was started from, gone back to
                return self._nothing
            raise WeightsRefused(
                "manifest: got weights of a whole model; this engine was started with --enable-lora and takes only adapters: "
                "set push: adapter at the trainer",
                field="engine_args",
            )
        if entry.rank > self._max_rank:
            raise WeightsRefused(
                f"adapter.rank: got {entry.rank}, this engine was started for {self._max_rank} at most (--max-lora-rank)",
                field="engine_args",
            )
        self._base.check(entry)
        adapter = read_adapter(update, entry)
        adapter.check_fits(self._places)
        strange = [word for word in adapter.words if word not in self._targets]
        if strange:
            raise WeightsRefused(
                f"adapter: layers {', '.join(strange)} are adapted; this engine was started for {', '.join(self._targets)} "
                "(--lora-target-modules)",
                field="engine_args",
            )
        return adapter

    def _of_zeros(self) -> Adapter:
        for name, place in self._places.items():
            path = name.removesuffix(".weight")
            if path.rpartition(".")[2] in self._targets and len(place.shape) == 2:
                layer = AdaptedLayer(a=torch.zeros(1, place.shape[1]), b=torch.zeros(place.shape[0], 1))
                return Adapter(AdapterEntry(base="0" * 32, rank=1, alpha=1), {path: layer})
        raise ConfigError(
            f"enable_lora: no layer in the checkpoint's safetensors files, which must be on this machine, is named "
            f"{', '.join(self._targets)}; --lora-target-modules gives other names",
            field="engine_args",
        )

    def _write(self, adapter: Adapter) -> Path:
        """In peft's layout, in a folder of its own."""
        folder = self._root / uuid.uuid4().hex
        tensors = {name: tensor.contiguous() for name, tensor in adapter.tensors().items()}
        config: dict[str, Any] = {
            "peft_type": "LORA", "bias": "none", "target_modules": adapter.words,
            "r": adapter.entry.rank, "lora_alpha": adapter.entry.alpha,
        }  # fmt: skip
        try:
            folder.mkdir(parents=True, mode=0o700)  # with the root, where somebody has tidied the temporary folder
            save_file(tensors, folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps(config))
        except (OSError, SafetensorError) as error:  # nothing has changed in the engine
            shutil.rmtree(folder, ignore_errors=True)
            raise WeightsRefused(f"adapter: can't be written to {self._root}: {error}", field="adapter") from error
        return folder

    async def _put(self, llm: AsyncLLM, folder: Path) -> None:
        """Load the adapter in `folder` in place of the present one. Raises: WeightsRefused: the engine still has the old adapter.
        After any other error it may not."""
        try:
            taken = await llm.add_lora(LoRARequest(NAME, NUMBER, str(folder), load_inplace=True))
        except Exception as error:  # from another process, as text
            before = getattr(self, "request", None)
            if llm.errored or self._processes > 1 or before is None:
                raise  # of several processes some may have the new one by now
            # It may have failed after the old one was let go, or with half of the new one in place: the old one is read again.
            await llm.add_lora(LoRARequest(NAME, NUMBER, before.lora_path, load_inplace=True))
            raise WeightsRefused(f"adapter: vLLM refuses it: {error}", field="adapter") from error
        if not taken:
            raise EngineFailed("adapter: not every process of the engine has taken it")
        before = getattr(self, "request", None)
        self.request = LoRARequest(NAME, NUMBER, str(folder))
        if before is not None:
            shutil.rmtree(before.lora_path, ignore_errors=True)
