"""Every start of this run's trainers, in a folder beside their checkpoints: what lost versions were, and who writes there now.

    <checkpoint_dir>/lineages/<lineage>.json

A start whose steps no checkpoint holds is in no checkpoint's history either. Its versions were pushed all the same, and trials
were sampled with them. From these files a later start knows how many steps such a version is from its own weights
(`VersionHistory`). Only the first rank writes a file, under another name and renamed, before the event that it records.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from steno.contracts.errors import Superseded
from steno_trainer.data.staleness import FIRST, PolicyVersion

FOLDER = "lineages"


class TrainerStart(msgspec.Struct, kw_only=True, frozen=True):
    """parent: the version that it went on from. pushed: the last step of its weights that may have been served. epoch: of its
    tenure; 0: the proxy knows of none. digest: of its first weights, once they were handed over."""

    run: str
    lineage: str
    parent: str
    epoch: int = 0
    pushed: int = 0
    digest: str = ""


class Lineages:
    """The starts of one run. Ignores files that can't be read and, but for `runs`, files of other runs."""

    def __init__(self, checkpoint_dir: Path, run: str) -> None:
        self._folder, self._run = checkpoint_dir / FOLDER, run
        self._mine: TrainerStart | None = None

    def begin(self, lineage: str, parent: PolicyVersion, epoch: int | None) -> None:
        """Record a new start. From here on a start with a lower epoch writes no checkpoint."""
        self._write(
            TrainerStart(run=self._run, lineage=lineage, parent=str(parent), epoch=epoch or 0, pushed=parent.step)
        )

    def pushing(self, version: PolicyVersion) -> None:
        """Record that workers may serve the weights of this version from now on."""
        if self._mine is not None:
            self._write(msgspec.structs.replace(self._mine, pushed=version.step))

    def handed_over(self, digest: str) -> None:
        """Record the digest of the first weights that were handed over; later calls change nothing."""
        if self._mine is not None and not self._mine.digest:
            self._write(msgspec.structs.replace(self._mine, digest=digest))

    def check(self) -> None:
        """Raises: Superseded: a later trainer has begun to write here."""
        if self._mine is None or not self._mine.epoch:
            return
        for start in self._starts():
            if start.epoch > self._mine.epoch:
                raise Superseded(f"run {self._run}: trainer {start.lineage} (epoch {start.epoch}) has taken over")

    def newest_epoch(self) -> int:
        """The highest epoch of this run's starts so far; 0: none had one."""
        return max((start.epoch for start in self._starts()), default=0)

    def others(self) -> Mapping[str, tuple[PolicyVersion, int]]:
        """Lineage -> (its parent, the last step that it pushed), for all other starts. Left out are starts whose first weights
        had the same version and another digest: the run was begun again with another model."""
        return {
            start.lineage: (PolicyVersion.parse(start.parent), start.pushed)
            for start in self._starts()
            if not self._is_mine(start) and not self._began_elsewhere(start)
        }

    def _is_mine(self, start: TrainerStart) -> bool:
        return self._mine is not None and start.lineage == self._mine.lineage

    def _began_elsewhere(self, start: TrainerStart) -> bool:
        """Whether that start and this one both began without a checkpoint, from weights with different digests."""
        mine = self._mine
        if mine is None or start.parent != mine.parent or PolicyVersion.parse(start.parent).lineage != FIRST:
            return False
        return bool(start.digest and mine.digest) and start.digest != mine.digest

    def runs(self) -> set[str]:
        """The names of all runs that have begun in this folder."""
        return {start.run for start in self._of_any_run()}

    def _starts(self) -> list[TrainerStart]:
        return [start for start in self._of_any_run() if start.run == self._run]

    def _of_any_run(self) -> list[TrainerStart]:
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                start = msgspec.json.decode(path.read_bytes(), type=TrainerStart)
                PolicyVersion.parse(start.parent)
            except (OSError, msgspec.DecodeError, ValueError):
                continue
            found.append(start)
        return found

    def _write(self, start: TrainerStart) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        beside = self._folder / f".writing-{start.lineage}"
        with beside.open("wb") as file:
            file.write(msgspec.json.encode(start))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._folder / f"{start.lineage}.json")
        self._mine = start
