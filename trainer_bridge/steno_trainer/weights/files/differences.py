"""Copies by difference: a full one now and then, and between them what changed since the push before.

    <root>/weights-<lineage>-<step>/   a full copy (`copies.py`)
    <root>/changes-<lineage>-<step>/   links to the shards of the newest full copy, as `base-…`, and all patches since: no model
                                       that could be loaded, and complete for whoever has nothing

Each rank keeps, on the CPU, the tensors of the shards that it wrote for the last push, and compares with them: beside the model
that is its share of one copy. Without that (at the start, after a write that failed), a push is a full copy. Files are links, so
a folder that is removed takes nothing from a newer one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from steno.client.client import Client
from steno.contracts.errors import StenoError
from steno.contracts.policy import PATCHES, Manifest, PatchEntry, ShardEntry
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.errors import CopyFailed
from steno_trainer.weights.files.copies import (
    CHANGES,
    DEFAULT_KEEP,
    WeightsCopies,
    WeightsCopy,
    Written,
    all_written,
    copy_of,
    write_one,
)
from steno_trainer.weights.files.patches import patch_name, write_patch
from steno_trainer.weights.source import TensorMeta, WeightSource

log = logging.getLogger(__name__)
DEFAULT_FULL_EVERY = 20
"""Pushes from one full copy to the next. A worker that comes late reads up to 19 patches beside it: at a fiftieth of a copy each,
a third more."""
MAX_FULL_EVERY = 64
"""A worker has all patches of four shards open at a time."""
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
"""Errors of a file system that can't have links, or no more of them. Other errors (no room, a server that hangs) may pass."""


@dataclass(frozen=True)
class _Last:
    """The last push, the same on all ranks. plan: of its tensors."""

    copy: WeightsCopy
    plan: list[list[TensorMeta]]


class WeightsDifferences(WeightsCopies):
    """As `WeightsCopies`, with patches between full copies. Memory on the CPU: this rank's shards of the last push.

    A full copy is written where there is no last push to compare with, or one of another shape; after `full_every` pushes; once
    the patches since the last one are as large as it is; where this version's patch alone would be; and where `root` can't have
    links.
    """

    def __init__(
        self,
        root: Path,
        *,
        full_every: int = DEFAULT_FULL_EVERY,
        ranks: Ranks | None = None,
        writers: Sequence[int] | None = None,
        keep: int = DEFAULT_KEEP,
    ) -> None:
        """Args: full_every: pushes from one full copy to the next, that one included."""
        super().__init__(root, ranks=ranks, writers=writers, keep=keep)
        if not 1 <= full_every <= MAX_FULL_EVERY:
            raise ValueError(f"full_every: got {full_every}, must be from 1 to {MAX_FULL_EVERY}")
        self._full_every = full_every
        self._can_link = True
        self._last: _Last | None = None
        self._tensors: dict[int, dict[str, Tensor]] = {}  # of the last push, by number of the bucket

    def write(self, version: PolicyVersion, source: WeightSource, *, full: bool = False) -> WeightsCopy:
        """As `WeightsCopies.write`. Args: full: write a full copy in any case; the first rank's counts."""
        plan = source.plan()
        last, self._last = self._last, None  # until this one is whole on all ranks
        full = self._exchange.first(lambda: full or not self._can_link, failure=CopyFailed)
        if last is None or full or last.plan != plan or self._is_over(last.copy, version):
            self._tensors = {}
            copy = self._write_whole(version, source, self._keeping)
        else:
            copy = self._write_changes(version, source, last.copy)
        self._last = _Last(copy, plan)
        return copy

    def _is_over(self, last: WeightsCopy, version: PolicyVersion) -> bool:
        """Whether the chain of patches has come to its end, or begins with this very version."""
        manifest = last.manifest
        if not manifest.patches and last.version == str(version):
            return True
        patches = sum(patch.size for patch in manifest.patches)
        return len(manifest.patches) + 1 >= self._full_every or patches >= manifest.size - patches

    # -- on all ranks

    def _write_changes(self, version: PolicyVersion, source: WeightSource, last: WeightsCopy) -> WeightsCopy:
        number = len(last.manifest.patches) + 1

        def write(folder: Path, index: int, count: int, tensors: dict[str, Tensor]) -> Written:
            before, self._tensors[index] = self._tensors[index], tensors
            file, entries = write_patch(folder / patch_name(number, index, count), before, tensors)
            return index, file, entries

        with contextlib.ExitStack() as cleanup:
            folder = Path(self._exchange.first(lambda: str(self._begin(version, cleanup)), failure=CopyFailed))
            outcomes = self._exchange.gather(self._write_mine(folder, source, write))
            done = self._exchange.first(
                lambda: self._finish_changes(folder, version, last, outcomes or []), failure=CopyFailed
            )
            if done is None:  # all of it then, from what was kept
                outcomes = self._exchange.gather(self._write_kept(folder, len(source.plan())))
                done = self._exchange.first(lambda: self._finish(folder, version, outcomes or []), failure=CopyFailed)
        return copy_of(done)

    def _keeping(self, folder: Path, index: int, count: int, tensors: dict[str, Tensor]) -> Written:
        self._tensors[index] = tensors
        return write_one(folder, index, count, tensors)

    def _write_kept(self, folder: Path, count: int) -> list[Written] | str:
        try:
            return [write_one(folder, index, count, tensors) for index, tensors in sorted(self._tensors.items())]
        except OSError as error:
            return f"rank {self._rank}: {error}"

    # -- the first rank's part

    def _finish_changes(
        self, folder: Path, version: PolicyVersion, last: WeightsCopy, outcomes: list[list[Written] | str]
    ) -> dict[str, Any] | None:
        """Returns: None: there is nothing in the folder any more, and a full copy is to be written instead."""
        written = all_written(outcomes)
        files = [file for _, file, _ in written]
        patch_bytes, full_bytes = sum(file.size for file in files), sum(shard.size for shard in last.manifest.shards)
        if patch_bytes < full_bytes:
            shards = self._linked(last, folder)
        else:
            shards = None
            log.info(
                "%s: the patches have %d bytes, a full copy %d: the full copy is sent", version, patch_bytes, full_bytes
            )
        if shards is None:
            for path in folder.iterdir():
                path.unlink()
            return None
        tensors = [tensor for _, _, entries in written for tensor in entries]
        manifest = Manifest(tensors=tensors, shards=shards)
        patch = PatchEntry(before=last.manifest.digest, after=manifest.digest, files=files)
        manifest.patches = [*last.manifest.patches, patch]
        log.info("%s: %d bytes changed, %.1f %% of a full copy", version, patch_bytes, 100 * patch_bytes / full_bytes)
        return self._complete(
            folder, version, manifest, self.root / f"{CHANGES}{version.lineage}-{version.step}"
        )  # fmt: skip

    def _linked(self, last: WeightsCopy, folder: Path) -> list[ShardEntry] | None:
        """Links to everything that a worker needs who has nothing: the full copy's shards and the patches since.

        Returns: the shards under the names that they have here; None: they are gone, or the folder can't have links.
        """
        shards = [
            shard.model_copy(update={"name": "base-" + shard.name.removeprefix("model-").removeprefix("base-")})
            for shard in last.manifest.shards
        ]
        names = [(old.name, new.name) for old, new in zip(last.manifest.shards, shards, strict=True)]
        names += [(file.name, file.name) for patch in last.manifest.patches for file in patch.files]
        try:
            for old, new in names:
                os.link(last.folder / old, folder / new)
        except OSError as error:
            self._can_link = error.errno not in NO_LINKS
            log.warning("%s can't have links to %s, so a full copy is written: %s", self.root, last.folder.name, error)
            return None
        return shards


def patch_takers(steno: Client, policy: str) -> Callable[[], bool]:
    """Asks the proxy whether all workers of a policy that are there know patches. Where it can't be asked, they do not."""

    def ask() -> bool:
        try:
            workers = steno.workers()
        except StenoError as error:
            log.warning("can't ask the proxy now which workers know patches, so a full copy is written: %s", error)
            return False
        without = [
            worker.id
            for worker in workers
            for card in worker.models
            if card.policy == policy and not card.text_only
            if PATCHES not in card.capabilities
        ]
        if without:
            log.warning("worker %s is of a release without push: delta, so a full copy is written", without[0])
        return not without

    return ask
