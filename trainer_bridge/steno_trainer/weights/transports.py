"""Workers read a copy from a folder that they share with the trainer; or get it uploaded from there (`stream`).

It is full, or by difference (`files/differences.py`), as the copies are that the transport is given. The training loop stands
still only while it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from steno.contracts.policy import Manifest
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.weights.files.copies import WeightsCopies
from steno_trainer.weights.publication import Publication
from steno_trainer.weights.source import WeightSource


@dataclass(frozen=True)
class StagedWeights:
    """Weights that can be told to workers. folder: where this machine has them; None: nowhere on disk. bring: called
    before each post of the update; idempotent; returns the bytes that it moved. None: there is nothing to call."""

    location: str
    manifest: Manifest
    folder: Path | None
    bring: Callable[[], int] | None = None


class Transport(Protocol):
    """How weights get from the trainer to where workers can load them."""

    @property
    def name(self) -> Literal["filesystem", "stream", "nccl"]: ...

    def stage(self, version: PolicyVersion, source: WeightSource, *, full: bool = False) -> StagedWeights:
        """Make `version` of what the source holds now. A collective; idempotent.

        Args: full: not by difference, if this transport knows any; the first rank's counts.
        """
        ...

    def carry(self, publication: Publication, source: WeightSource) -> bool:
        """Do what is left to do once the update was posted. When it returns, the source's weights may change. A collective.

        Returns: False: the weights must be staged and posted again.
        """
        ...

    def close(self) -> None: ...


class FilesystemTransport:
    """Workers see the copies' folder too, under `seen_as` if it is mounted elsewhere on their machines."""

    name: Literal["filesystem"] = "filesystem"

    def __init__(self, copies: WeightsCopies, *, seen_as: PurePosixPath | None = None) -> None:
        self._copies = copies
        self._seen_as = seen_as

    def stage(self, version: PolicyVersion, source: WeightSource, *, full: bool = False) -> StagedWeights:
        copy = self._copies.write(version, source, full=full)
        root = self._seen_as or self._copies.root.absolute()
        return StagedWeights(str(root / copy.folder.name), copy.manifest, copy.folder)

    def carry(self, publication: Publication, source: WeightSource) -> bool:
        return True

    def close(self) -> None:
        """The copies stay: workers may be reading, and late ones will."""


class StreamTransport:
    """The proxy is all that both sides reach. The first rank uploads, so its machine must have the whole copy: without a shared
    folder, let the ranks beside it write (`WeightsCopies(writers=beside_first(ranks))`)."""

    name: Literal["stream"] = "stream"

    def __init__(self, copies: WeightsCopies) -> None:
        self._copies = copies

    def stage(self, version: PolicyVersion, source: WeightSource, *, full: bool = False) -> StagedWeights:
        copy = self._copies.write(version, source, full=full)
        return StagedWeights("", copy.manifest, copy.folder)

    def carry(self, publication: Publication, source: WeightSource) -> bool:
        return True

    def close(self) -> None:
        """The copies stay, for the next publisher of the same version."""
