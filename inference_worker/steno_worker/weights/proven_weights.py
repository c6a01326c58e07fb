"""The last weights that passed the probe, kept so that they can be loaded again."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steno.contracts.policy import Manifest, Probe, ShardEntry, TensorEntry, UpdateSpec
from steno.contracts.wire.frames import ModelCard
from steno.models.checkpoint import checkpoint_files
from steno_worker.interfaces import StagedUpdate
from steno_worker.weights.shard_files import DTYPES
from steno_worker.weights.staged_files import open_regular

logger = logging.getLogger(__name__)
UNKNOWN = "0" * 32
"""Stands for a digest that is not known: of the files that an engine was started from (loaded again unchecked, then probed), and
of shards that were made of patches (whose tensors were checked)."""


@dataclass(frozen=True, slots=True)
class ProvenWeights:
    """Weights that have passed the probe, or that the engine was started from. scored: a probe, with the log-probabilities that
    this engine gave with these weights; None: no probe was scored."""

    staged: StagedUpdate
    scored: Probe | None

    @property
    def digest(self) -> str | None:
        """Of the weights; None: not known, since an engine was started from them."""
        manifest = self.staged.spec.manifest
        return None if any(tensor.digest == UNKNOWN for tensor in manifest.tensors) else manifest.digest


def base_update(folder: Path, card: ModelCard) -> StagedUpdate | None:
    """The checkpoint in `folder` as an update to the version that the card names. None: it is not one of safetensors."""
    lineage, _, step = card.policy_version.rpartition("/")
    try:
        shards = [(path, _header(path)) for path in checkpoint_files(folder)]
        spec = UpdateSpec(
            policy=card.policy,
            lineage=lineage,
            step=int(step),
            transport="filesystem",
            location=str(folder),
            manifest=Manifest(
                tensors=[_entry(name, about) for _, header in shards for name, about in header.items()],
                shards=[ShardEntry(name=path.name, size=path.stat().st_size, digest=UNKNOWN) for path, _ in shards],
            ),
        )
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        logger.warning("if an update is refused, this worker can't roll back: can't load %s again: %s", folder, error)
        return None
    return StagedUpdate(f"base-{lineage}-{step}", spec, folder)


def _header(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def _entry(name: str, about: dict[str, Any]) -> TensorEntry:
    return TensorEntry(name=name, dtype=DTYPES[about["dtype"]], shape=about["shape"], digest=UNKNOWN)
