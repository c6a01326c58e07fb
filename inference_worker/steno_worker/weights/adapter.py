"""Reads a LoRA adapter that came instead of a model's weights, and checks that it was trained on the checkpoint that is here.

Its `rank` and `alpha` are those of the manifest, and part of the manifest's digest; files beside the tensors are not read (I10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from steno.contracts.errors import WeightsRefused
from steno.contracts.policy import AdapterEntry
from steno.models.checkpoint import checkpoint_digest, checkpoint_files
from steno_worker.interfaces import StagedUpdate
from steno_worker.weights.tensors import TensorPlace, read_tensors

PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""What peft puts before the name of a layer, and after it."""


@dataclass(frozen=True)
class AdaptedLayer:
    """a: [rank, in]. b: [out, rank]."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Adapter:
    """layers: by their path in the model."""

    entry: AdapterEntry
    layers: dict[str, AdaptedLayer]

    @property
    def words(self) -> list[str]:
        """The last words of the layers' paths."""
        return sorted({path.rpartition(".")[2] for path in self.layers})

    @property
    def scale(self) -> float:
        return self.entry.alpha / self.entry.rank

    def check_fits(self, places: Mapping[str, TensorPlace]) -> None:
        """Each layer is one of the model's. Raises: WeightsRefused naming the tensor."""
        for path, layer in self.layers.items():
            place, shape = places.get(f"{path}.weight"), (layer.b.shape[0], layer.a.shape[1])
            if place is None:
                raise _refusal(f"{PREFIX}{path}{A}", "is of a layer that this model does not have")
            if place.shape != shape:
                raise _refusal(
                    f"{PREFIX}{path}{A}", f"is of a layer of shape {list(shape)}, the model's is {list(place.shape)}"
                )

    def tensors(self) -> dict[str, Tensor]:
        """By the names that peft and other engines read them by."""
        named = ((PREFIX + path, layer) for path, layer in self.layers.items())
        return {name + end: tensor for name, one in named for end, tensor in ((A, one.a), (B, one.b))}


def read_adapter(update: StagedUpdate, entry: AdapterEntry) -> Adapter:
    """In memory. Raises: WeightsRefused: a tensor that is none of an adapter's, of another rank, or alone in its layer."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_tensors(update.folder, update.spec.manifest).items():
        end = next((end for end in (A, B) if name.endswith(end)), None)
        if end is None or not name.startswith(PREFIX):
            raise _refusal(name, f"has a name that no adapter uses: must be {PREFIX}LAYER{A} or {PREFIX}LAYER{B}")
        rank = tensor.shape[0 if end == A else 1] if tensor.dim() == 2 else None
        if rank != entry.rank or not tensor.is_floating_point():
            raise _refusal(name, f"is {list(tensor.shape)} of {tensor.dtype}, for an adapter of rank {entry.rank}")
        found.setdefault(name[len(PREFIX) : -len(end)], {})[end] = tensor
    if not found:
        raise WeightsRefused("manifest.shards: no layer is adapted", field="manifest.shards")
    for path, pair in found.items():
        if len(pair) == 1:
            raise _refusal(f"{PREFIX}{path}{A if B in pair else B}", "is missing")
    return Adapter(entry, {path: AdaptedLayer(pair[A], pair[B]) for path, pair in found.items()})


class AdapterBase:
    """The checkpoint that an engine was started from, which adapters are added to. Its digest is computed once, and holds as long
    as the files have not changed since this object was made, before the engine read them."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._digest: str | None = None
        self._files = _files(folder) if folder is not None else None

    def check(self, entry: AdapterEntry) -> None:
        """Reads the whole checkpoint, the first time. Raises: WeightsRefused: it is not the one that was adapted."""
        if self._folder is None:
            raise WeightsRefused(
                "adapter.base: this engine has no files of the model that the adapter was trained on",
                field="adapter.base",
            )
        if _files(self._folder) != self._files:
            raise WeightsRefused(
                f"adapter.base: the files in {self._folder} have changed since this engine was started: start it again",
                field="adapter.base",
            )
        if self._digest is None:
            try:
                self._digest = checkpoint_digest(self._folder)
            except ValueError as error:
                raise WeightsRefused(f"adapter.base: {error}", field="adapter.base") from error
        if self._digest != entry.base:
            raise WeightsRefused(
                f"adapter.base: the adapter was trained on weights of digest {entry.base}; this engine was started from "
                f"{self._folder}, of digest {self._digest}: start it from the trainer's `model`",
                field="adapter.base",
            )


def _files(folder: Path) -> list[tuple[str, int, int, int]] | None:
    """What tells that a file is still the same. None: it can't be told."""
    try:
        found = [(path.name, path.stat()) for path in checkpoint_files(folder)]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return [(name, about.st_ino, about.st_size, about.st_mtime_ns) for name, about in found]


def _refusal(name: str, what: str) -> WeightsRefused:
    return WeightsRefused(f"tensor {name!r} {what}", field=f"manifest.tensors.{name}")
