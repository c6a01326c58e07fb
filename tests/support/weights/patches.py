"""Weights by difference as a trainer pushes them, with the tensors that each shard is to hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from steno.contracts.policy import Manifest
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.weights.files.differences import WeightsDifferences
from steno_trainer.weights.source import TensorMeta


class Chain:
    """Pushes of one model. shards: names of the tensors of each. folder: the newest push."""

    def __init__(self, root: Path, shards: list[list[str]], **options: int) -> None:
        self._copies = WeightsDifferences(root, **options)
        self._shards = shards
        self.folder = root
        self._count = 0

    def push(self, lineage: str, tensors: Mapping[str, Tensor], *, full: bool = False) -> Manifest:
        source = TensorSource(tensors, self._shards)
        copy = self._copies.write(PolicyVersion(lineage, self._count), source, full=full)
        self.folder, self._count = copy.folder, self._count + 1
        return copy.manifest


class TensorSource:
    """A model of these tensors; shards: their names, bucket by bucket."""

    def __init__(self, tensors: Mapping[str, Tensor], shards: list[list[str]]) -> None:
        self._tensors, self._shards = tensors, shards

    def plan(self) -> list[list[TensorMeta]]:
        return [
            [TensorMeta(name, self._tensors[name].dtype, tuple(self._tensors[name].shape)) for name in names]
            for names in self._shards
        ]

    def buckets(self) -> Iterator[dict[str, Tensor]]:
        for names in self._shards:
            yield {name: self._tensors[name] for name in names}
