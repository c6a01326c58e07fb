"""Whether weights are this model's, and how they get into memory. The receiving side's torch code is here and in `adapter.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from steno.contracts.errors import WeightsRefused
from steno.contracts.policy import Manifest, TensorEntry
from steno.models.checkpoint import checkpoint_files
from steno_worker.weights.shard_files import DTYPES
from steno_worker.weights.staged_files import open_regular

PART_ELEMENTS = 1 << 24
"""Of a tensor, looked at in one go."""
_BESIDE = frozenset({"visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector"})
"""Modules of checkpoints that are no part of the text model."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor goes. shared: the same for names that are one tensor (a head tied to its embedding). optional: weights may
    leave it as it is."""

    shape: tuple[int, ...]
    floating: bool
    shared: object
    optional: bool = False


def places_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorPlace]:
    """The places that a model's own state has."""
    return {
        name: TensorPlace(tuple(tensor.shape), tensor.is_floating_point(), (tensor.data_ptr(), tuple(tensor.shape)))
        for name, tensor in tensors.items()
    }


def places_in(folder: Path) -> dict[str, TensorPlace]:
    """The places that a checkpoint has, by the headers of its files. What lies beside those of its index is not of it: some
    publish the same weights once more, by other names (`consolidated.safetensors`). {}: it has no safetensors files."""
    files = [path for path in checkpoint_files(folder) if path.is_file()] or sorted(folder.glob("*.safetensors"))
    places: dict[str, TensorPlace] = {}
    for path in files:
        for name, entry in _header(path).items():
            dtype = DTYPES.get(entry["dtype"], "")
            places[name] = TensorPlace(tuple(entry["shape"]), "float" in dtype, name)
    return places


def text_places(places: Mapping[str, TensorPlace], layers: int | None) -> dict[str, TensorPlace]:
    """The same places; those that a trainer of the text model does not have become optional: multi-token prediction heads (`mtp`,
    or layers beyond the last one), vision and audio modules, tables of rotary embeddings.

    Args: layers: how many the text model has; None: unknown.
    """
    names = {name: name.split(".") for name in places}
    has_inner = any("language_model" in parts for parts in names.values())

    def is_beside(name: str, parts: list[str]) -> bool:
        found = _LAYER.search(name)
        return (
            parts[-1] == "inv_freq"
            or not _BESIDE.isdisjoint(parts)
            or any(part == "mtp" or part.startswith("mtp_") for part in parts)
            or (has_inner and "language_model" not in parts and "lm_head" not in parts)
            or (layers is not None and found is not None and int(found[1]) >= layers)
        )

    return {
        name: replace(place, optional=place.optional or is_beside(name, names[name])) for name, place in places.items()
    }


def check_fits(entries: list[TensorEntry], places: Mapping[str, TensorPlace]) -> None:
    """Every place that is not optional gets one tensor of its shape, and there are no others. Floating-point types are
    converted, others are not.

    Of names that are one tensor, one is enough; if several are given they are equal.
    Raises: WeightsRefused naming the tensor.
    """
    given: dict[object, TensorEntry] = {}
    for entry in entries:
        place = places.get(entry.name)
        if place is None:
            raise _refusal(entry.name, "is not of this model")
        if tuple(entry.shape) != place.shape:
            raise _refusal(entry.name, f"has shape {entry.shape}, the model's is {list(place.shape)}")
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype) or dtype.is_floating_point != place.floating:
            raise _refusal(entry.name, f"has dtype {entry.dtype}, which can't be converted to this model's")
        other = given.setdefault(place.shared, entry)
        if other.digest != entry.digest:
            raise _refusal(entry.name, f"is the same tensor as {other.name!r} in this model, and they are not equal")
    for name, place in places.items():
        if place.shared not in given and not place.optional:
            raise _refusal(name, "is missing")


def read_tensors(folder: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """All of them, in memory. Raises: WeightsRefused: a shard that is gone, or can't be read; a tensor with what is no number."""
    return dict(_tensors(folder, manifest))


def check_tensors(folder: Path, manifest: Manifest) -> None:
    """Read all of them, one at a time. Raises: as `read_tensors`."""
    for _ in _tensors(folder, manifest):
        pass


def _tensors(folder: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    for shard in manifest.shards:
        path = folder / shard.name
        try:
            with open_regular(path), safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # no mapping
                    tensor = opened.get_tensor(name)
                    if not _has_numbers_only(tensor):
                        raise _refusal(name, "has NaN or infinite values")
                    yield name, tensor
        except (OSError, SafetensorError) as error:
            raise WeightsRefused(
                f"shard {shard.name} can't be read: {error}", field=f"manifest.shards.{shard.name}"
            ) from error


def _header(path: Path) -> Mapping[str, Any]:
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def _has_numbers_only(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    for part in torch.split(tensor.flatten(), PART_ELEMENTS):
        # One pass and no copy: NaN comes through minimum and maximum. The narrowest types have neither.
        least, most = (part.float() if part.dtype.itemsize == 1 else part).aminmax()
        if not (least.isfinite() and most.isfinite()):
            return False
    return True


def _refusal(name: str, what: str) -> WeightsRefused:
    return WeightsRefused(f"tensor {name!r} {what}", field=f"manifest.tensors.{name}")
