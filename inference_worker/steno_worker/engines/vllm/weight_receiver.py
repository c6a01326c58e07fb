"""What receives weights in each of vLLM's own worker processes: shards from a folder, or vLLM's NCCL engine.

Registered with vLLM under the name `steno` wherever vLLM loads its general plugins (an entry point of this distribution), or
imports the worker extension named below: the second also where the distribution is not installed, only on the path.
Every process reads the shards itself, mapped, and gives them to the model's own `load_weights` by their checkpoint names.

Source: `vllm.distributed.weight_transfer.base.WeightTransferEngine`, vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

NAME = "steno"
EXTENSION = "steno_worker.engines.vllm.weight_receiver.WorkerExtension"


def register() -> None:
    """Idempotent: vLLM loads plugins in every process, and some of them more than once."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, Receiver)


class WorkerExtension:
    """What is added to vLLM's worker. Naming it is also what makes a worker process import this module."""

    model_runner: Any

    def not_adapted(self, names: list[str]) -> list[str]:
        """Of an adapter's tensors, those of no layer that vLLM has wrapped in this process, and would pass over.

        Source: `vllm.lora.model_manager.LoRAModelManager.modules`, vLLM 0.32; what holds of MLA is in
        `vllm.model_executor.layers.attention.mla_attention`, whose `kv_b_proj` is read past its wrapper.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        mapper = mapper.get_rename_mapper() if mapper is not None else None
        wrapped: set[str] = set()
        for path in manager.modules:
            parent, _, last = path.rpartition(".")
            wrapped |= {f"{parent}.{part}" for part in (last, *manager.packed_modules_mapping.get(last, ()))}
        if self.model_runner.model_config.use_mla:
            wrapped = {path for path in wrapped if not path.endswith(".kv_b_proj")}
        return [name for name in names if parse_fine_tuned_lora_name(name, mapper)[0] not in wrapped]


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Where the next update comes from: files, or (`nccl`) the fields of vLLM's `NCCLWeightTransferInitInfo`."""

    paths: list[str] = field(default_factory=list)
    nccl: dict[str, Any] | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`nccl`: the fields of vLLM's `NCCLWeightTransferUpdateInfo`."""

    nccl: dict[str, Any] | None = None


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """One per worker process and model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._shards: list[Any] = []
        self._nccl: NCCLWeightTransferEngine | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open the shards, while the engine still generates: what is open can be read whatever becomes of its name.

        `nccl`: joins the group, for which it waits. Raises: OSError, SafetensorError: a shard that can't be opened.
        """
        if init_info.nccl is not None:
            self.shutdown()
            self._nccl = NCCLWeightTransferEngine(self.config, self.vllm_config, self.device, self.model)
            self._nccl.init_transfer_engine(self._nccl.parse_init_info(init_info.nccl))
        else:
            # A pipe would hold up the engine for ever.
            strange = [path for path in init_info.paths if not Path(path).is_file()]
            if strange:
                raise FileNotFoundError(f"{strange[0]} is no regular file, or is gone")
            self._shards = [safe_open(path, framework="pt") for path in init_info.paths]

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's, which waits for an accelerator whether there is one or not."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.nccl is not None:
            if self._nccl is None:
                raise RuntimeError("nccl: the group has not been joined")
            self._nccl.receive_weights(self._nccl.parse_update_info(update_info.nccl))
            return
        with disable_mtp_completeness_check():
            self.model.load_weights(self._tensors())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._shards = []
        if current_platform.is_cpu():
            # A head tied to its embedding gets no weights of its own, so nothing rebuilds what was packed of the old ones.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self._shards = []
        if self._nccl is not None:
            self._nccl.shutdown()
            self._nccl = None

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for shard in self._shards:
            for name in shard.keys():  # noqa: SIM118  # no mapping
                yield name, shard.get_tensor(name)


register()
