"""What a checkpoint says of weights that it does not hold: which model it was begun from, which adapter this is, and of which
frozen weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from steno_trainer.checkpoints.partitions import share_of
from steno_trainer.model.sizes import full_numel
from steno_trainer.model.zero_engine import PolicyEngine
from steno_trainer.weights.adapters import NAME, adapted_layers

NO_ADAPTER = "none"
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_A_TIME = 1 << 18
"""Words that are added up in one call: torch first copies them to eight bytes each."""


def adapter_of(engine: PolicyEngine) -> str:
    """Describes the adapter and its frozen weights; `NO_ADAPTER`: there is none. A collective. The text is equal for the same
    adapter of the same frozen weights, on any number of ranks."""
    layers = adapted_layers(engine.lm)
    if not layers:
        return NO_ADAPTER
    layer = next(iter(layers.values()))
    targets = sorted({path.rsplit(".", 1)[-1] for path in layers})
    return (
        f"rank {layer.r[NAME]}, alpha {layer.lora_alpha[NAME]}, targets {' '.join(targets)}, on weights "
        f"{_fingerprint(engine, ((name, one) for name, one in engine.lm.named_parameters() if not one.requires_grad))}"
    )


def begun_from(engine: PolicyEngine) -> str:
    """The fingerprint of all weights. Called before a checkpoint is loaded, it identifies the model that `model` names, wherever
    its files lie. A collective. "": an adapter is trained, and `adapter_of` has the model's fingerprint."""
    return "" if adapted_layers(engine.lm) else _fingerprint(engine, engine.lm.named_parameters())


def _fingerprint(engine: PolicyEngine, parameters: Iterable[tuple[str, Tensor]]) -> str:
    """For each weight, the sum of its words as integers, times a number made of its name. The sum over ranks is the same however
    weights are partitioned. It tells models apart, unless someone built a collision on purpose. Each rank reads what it holds,
    once."""
    total = torch.zeros((), dtype=torch.int64)
    for name, parameter in parameters:
        words = _mine(parameter, engine).view(_WORDS[parameter.dtype.itemsize])
        held = torch.stack([part.sum(dtype=torch.int64) for part in torch.split(words, _AT_A_TIME)]).sum()
        total += held.cpu() * (zlib.crc32(name.encode()) | 1)  # wraps
    return f"{int(engine.ranks.add(total)) % 2**64:016x}"


def _mine(parameter: Tensor, engine: PolicyEngine) -> Tensor:
    """This rank's part of a parameter, without the padding that ZeRO-3 appends to the last part."""
    held: Tensor = parameter.ds_tensor.detach().flatten()  # type: ignore[attr-defined]
    return held[: len(share_of(full_numel(parameter), engine.ranks.size, engine.ranks.rank))]
