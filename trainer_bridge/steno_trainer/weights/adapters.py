"""A LoRA adapter on its way out of a model: merged into the model's weights, or alone.

    merged = W + (alpha / rank) B A        in float32, then rounded to the type that is sent

Engines that know nothing of adapters load the merged weights as any others. In bfloat16 a change that is smaller than half of the
distance to the next number is lost there, weight by weight, though not in the trainer, which adds the two products: so their
log-probabilities differ by a bit more than two engines' do. What the tokens were sampled at is on record in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steno.contracts.policy import AdapterEntry
from steno.models.checkpoint import checkpoint_digest
from steno_trainer.errors import WeightsUnavailable
from steno_trainer.weights.files.shards import write_shard
from steno_trainer.weights.source import DEFAULT_BUCKET_BYTES, ModelWeights, named_tensors

NAME = "default"
"""Of the one adapter, as peft names it inside the model; in no file."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Files of an adapter, as peft names them."""
ADAPTER_PREFIX = "adapter-"
"""Of folders: then lineage and step."""
_BASE, _PEFT = ".base_layer.", "base_model.model."
"""What peft puts into the name of an adapted layer's own weight, and before all names in a file."""


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Path in the model -> peft's layer there. Empty: the model has no adapter."""
    return {path: layer for path, layer in module.named_modules() if hasattr(layer, "lora_A")}


@dataclass(frozen=True)
class _Pair:
    """Of a layer: A [rank, in], B [out, rank], which may be partitioned, and alpha / rank."""

    a: Tensor
    b: Tensor
    scale: float

    @classmethod
    def of(cls, layer: Any) -> _Pair:
        return cls(layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, float(layer.scaling[NAME]))

    def merged(self, weight: Tensor) -> Tensor:
        """In float32, or wider."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        return torch.addmm(weight.to(wide), self.b.detach().to(wide), self.a.detach().to(wide), alpha=self.scale)


class MergedWeights(ModelWeights):
    """The `WeightSource` of a model with an adapter: the tensors of the model without one, merged."""

    def __init__(
        self, module: nn.Module, *, dtype: torch.dtype | None = None, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        """As `ModelWeights`."""
        self._pairs = {f"{path}.weight": _Pair.of(layer) for path, layer in adapted_layers(module).items()}
        super().__init__(module, dtype=dtype, bucket_bytes=bucket_bytes)

    def _tensors(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        return [(name.replace(_BASE, "."), tensor) for name, tensor in named_tensors(module) if not _is_adapters(name)]

    def _needed(self, key: str, tensor: Tensor) -> list[Tensor]:
        pair = self._pairs.get(key)
        return [tensor] if pair is None else [tensor, pair.a, pair.b]

    def _whole(self, key: str, tensor: Tensor) -> Tensor:
        pair = self._pairs.get(key)
        return tensor.detach() if pair is None else pair.merged(tensor.detach()).to(self._sent_dtype(tensor.dtype))


def weights_of(module: nn.Module, dtype: torch.dtype | None = None) -> ModelWeights:
    """What workers load: the model's weights, with its adapter merged into them where it has one."""
    return (MergedWeights if adapted_layers(module) else ModelWeights)(module, dtype=dtype)


class AdapterWeights(ModelWeights):
    """The `WeightSource` of the adapter alone, under the names that peft and other engines read it by."""

    def _tensors(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        return [
            (_PEFT + name.replace(f".{NAME}.", "."), tensor)
            for name, tensor in named_tensors(module)
            if _is_adapters(name)
        ]

    def _in_checkpoint(self, key: str, tensor: Tensor) -> dict[str, Tensor]:
        return {key: tensor}

    def places(self) -> dict[str, Tensor]:
        """The parameters themselves, by the same names."""
        return dict(self._tensors(self._module))


def adapter_entry(module: nn.Module, model: Path) -> AdapterEntry:
    """What an update says of the adapter that it has. Reads the whole checkpoint that was adapted.

    Raises: WeightsUnavailable: it is no folder of safetensors files.
    """
    try:
        base = checkpoint_digest(model)
    except ValueError as error:
        raise WeightsUnavailable(f"push: adapter: model: {error}") from error
    config: Any = module.peft_config[NAME]  # type: ignore[index]
    return AdapterEntry(base=base, rank=config.r, alpha=config.lora_alpha)


def write_adapter(module: nn.Module, folder: Path, *, base: str, writes: bool) -> None:
    """The adapter alone, in peft's layout. A collective.

    Args: folder: there already. base: what the adapter was trained on, a folder or a name. writes: whether this rank does.
    Raises: OSError; WeightsUnavailable: values that are no numbers.
    """
    tensors: dict[str, Tensor] = {}
    for bucket in AdapterWeights(module).buckets():
        if writes:
            tensors |= {name: tensor.detach().cpu().clone() for name, tensor in bucket.items()}
    if writes:
        write_shard(folder / WEIGHTS, tensors)
        config: Any = module.peft_config[NAME]  # type: ignore[index]
        config.base_model_name_or_path, config.inference_mode = base, True
        config.save_pretrained(str(folder))


def _is_adapters(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
