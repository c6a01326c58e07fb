"""An adapter merged into the model that it was trained on: a model as any other, in Hugging Face's layout (`steno merge`)."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from steno.contracts.errors import ConfigError
from steno_trainer.checkpoints.checkpoint import configuration, fetch_configuration
from steno_trainer.model.adapter import add_adapter
from steno_trainer.model.model import load_model
from steno_trainer.weights.adapters import CONFIG, WEIGHTS, AdapterWeights, MergedWeights
from steno_trainer.weights.files.copies import INDEX
from steno_trainer.weights.files.shards import shard_name, write_shard
from steno_trainer.weights.source import WeightSource

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False, None), "use_rslora": (False, None),
    "fan_in_fan_out": (False, None), "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "modules_to_save": (None, []),
    "layers_to_transform": (None, []), "target_parameters": (None, []), "lora_bias": (False, None),
    "trainable_token_indices": (None, []),
}  # fmt: skip
"""The values that `steno train` writes in an adapter's configuration. Others mean another formula, or other tensors."""


def merge_adapter(adapter: Path, into: Path, *, model: str | None = None, trust_remote_code: bool = False) -> None:
    """Write the merged model, in the adapter's own precision; it takes the memory of the whole model, without a GPU.

    Args: adapter: `adapter_config.json` and `adapter_model.safetensors`, as a checkpoint has them. into: a folder that is not
        there yet; it appears once it is whole. model: None: the one that the adapter names.
    Raises: ConfigError: names the field: `adapter`: no adapter of this kind, or not one of this model; `model`: can't be loaded;
        `into`: is there. OSError.
    """
    if into.exists():
        raise ConfigError(f"{into}: is there already; name a folder that is not", field="into")
    config, tensors = _read(adapter)
    model = model or config["base_model_name_or_path"]
    precision = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    # longest=1, since no forward pass runs here: the model's limits were checked when the adapter was trained.
    lm = load_model(model, precision=precision, zero=None, longest=1, trust_remote_code=trust_remote_code).lm
    try:
        add_adapter(lm, rank=config["r"], alpha=config["lora_alpha"], targets=config["target_modules"], seed=0)
    except ConfigError as error:
        raise ConfigError(f"{adapter}: not an adapter of the model {model}: {error.message}", field="adapter") from None
    _fill(lm, tensors, f"{adapter}: not an adapter of the model {model}")
    fetch_configuration(model)
    writing = into.with_name(f".writing-{into.name}-{uuid.uuid4().hex[:8]}")
    writing.mkdir(parents=True)
    try:
        _write(MergedWeights(lm), writing, configuration(model))
        writing.rename(into)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def _read(adapter: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        config = json.loads((adapter / CONFIG).read_text())
        tensors = load_file(adapter / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{adapter}: not an adapter: {error}", field="adapter") from error
    if not isinstance(config, dict) or not tensors:
        raise ConfigError(
            f"{adapter}: not an adapter: {CONFIG} must hold an object, and {WEIGHTS} tensors", field="adapter"
        )
    for field, allowed in _PLAIN.items():
        if config.get(field, allowed[0]) not in allowed:
            raise ConfigError(f"{adapter}: {field}: got {config[field]}, must be {allowed[0]}", field="adapter")
    kinds = (
        ("r", int, "a whole number"),
        ("lora_alpha", int, "a whole number"),
        ("target_modules", list, "a list of names"),
    )
    for field, kind, words in kinds:
        if not isinstance(config.get(field), kind):
            raise ConfigError(f"{adapter}: {field}: got {config.get(field)}, must be {words}", field="adapter")
    return config, tensors


def _fill(lm: Any, tensors: dict[str, Tensor], what: str) -> None:
    """The adapter's tensors to their places. Raises: ConfigError."""
    places = AdapterWeights(lm).places()
    if missing := sorted(set(places) ^ set(tensors)):
        raise ConfigError(f"{what}: {missing[0]} is in one of them alone", field="adapter")
    for name, place in places.items():
        if place.shape != tensors[name].shape:
            raise ConfigError(
                f"{what}: {name}: got shape {list(tensors[name].shape)}, must be {list(place.shape)}", field="adapter"
            )
        place.data.copy_(tensors[name])


def _write(source: WeightSource, folder: Path, extra: list[Path]) -> None:
    weight_map: dict[str, str] = {}
    size, count = 0, len(source.plan())
    with torch.no_grad():
        for index, bucket in enumerate(source.buckets()):
            shard, entries = write_shard(folder / shard_name(index, count), bucket)
            weight_map |= {entry.name: shard.name for entry in entries}
            size += sum(tensor.nbytes for tensor in bucket.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    for path in extra:
        shutil.copyfile(path, folder / path.name)
