"""Full copies of the weights on disk: read by workers, uploaded to them, kept for those that come late.

    <root>/weights-<lineage>-<step>/   shards, `model.safetensors.index.json`, `steno-weights.json`: complete, or not there
    <root>/.writing-<...>              a copy being written; its writer holds `.writing-<...>.lock`, and is dead if nobody does

A copy is written beside and renamed, so a crash between leaves the older ones whole. The newest are kept, and an older one goes
only once a newer one is there. transformers loads a copy as it is, given a configuration beside it (`extra`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from steno.contracts.errors import StenoError
from steno.contracts.policy import AdapterEntry, Manifest, ShardEntry, TensorEntry
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.errors import CopyFailed
from steno_trainer.weights.exchange import GlooExchange
from steno_trainer.weights.files.shards import shard_name, write_shard
from steno_trainer.weights.source import WeightSource

log = logging.getLogger(__name__)

DESCRIPTION = "steno-weights.json"
INDEX = "model.safetensors.index.json"
PREFIX, CHANGES, WRITING, REMOVING = "weights-", "changes-", ".writing-", ".removing-"
KINDS = (PREFIX, CHANGES)
"""Of complete folders: a full copy, and one by difference (`differences.py`)."""
DEFAULT_KEEP = 2
"""The newest, and the one that workers may still be reading when it is posted."""
SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class WeightsCopy:
    """A complete copy. version: `<lineage>/<step>`."""

    folder: Path
    version: str
    manifest: Manifest

    @classmethod
    def read(cls, folder: Path) -> WeightsCopy:
        """Raises: CopyFailed: not a copy, or one that can't be read."""
        try:
            body = json.loads((folder / DESCRIPTION).read_text())
            return cls(folder, body["version"], Manifest.model_validate(body["manifest"]))
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            raise CopyFailed(f"{folder}: not a copy of weights: {error}") from error


Written = tuple[int, ShardEntry, list[TensorEntry]]
"""(number of the bucket, its file, its tensors)"""
WriteOne = Callable[[Path, int, int, dict[str, Tensor]], Written]
"""Writes one bucket's file. Args: the folder, its number, how many there are, its tensors. Raises: OSError; StenoError."""


class WeightsCopies:
    """The copies under one folder.

    `write` is a collective; all ranks of `writers` must see the folder under this path. Several trainers may write to one folder.
    """

    def __init__(
        self,
        root: Path,
        *,
        ranks: Ranks | None = None,
        writers: Sequence[int] | None = None,
        keep: int = DEFAULT_KEEP,
        extra: Sequence[Path] = (),
        adapter: AdapterEntry | None = None,
    ) -> None:
        """
        Args:
            adapter: what is written is this adapter, and not a whole model; the first rank's counts.
            ranks: None: this process alone.
            writers: ranks that write, each its share of the shards; None: all.
            keep: how many versions stay, the newest.
            extra: files to put into each copy: the model's configuration, its tokenizer.
        """
        if keep < 1:
            raise ValueError(f"keep: {keep} would remove the newest copy")
        self.root = root
        self._exchange = GlooExchange(ranks)
        self._rank = self._exchange.rank
        self._writers = list(writers) if writers is not None else list(range(self._exchange.size))
        self._keep = keep
        self._extra = list(extra)
        self._adapter = adapter

    def write(self, version: PolicyVersion, source: WeightSource, *, full: bool = False) -> WeightsCopy:
        """A full copy of `source` as `version`. A collective; it returns on all ranks, or raises on all.

        Idempotent: a version that is there with the same weights stays. Peak memory beside the source's bucket: two of a
        writer's own buckets.

        Args: full: it always is, here. Raises: CopyFailed: a rank could not write, or the version is there with other weights.
        """
        return self._write_whole(version, source, write_one)

    def _write_whole(self, version: PolicyVersion, source: WeightSource, write: WriteOne) -> WeightsCopy:
        with contextlib.ExitStack() as cleanup:
            folder = Path(self._exchange.first(lambda: str(self._begin(version, cleanup)), failure=CopyFailed))
            outcomes = self._exchange.gather(self._write_mine(folder, source, write))
            done = self._exchange.first(lambda: self._finish(folder, version, outcomes or []), failure=CopyFailed)
        return copy_of(done)

    def complete(self) -> list[WeightsCopy]:
        """Oldest first, by when they were completed. One that can't be read (its description was not on the disk yet when the
        machine stopped, or another release wrote it) is passed over, and stays."""
        found = []
        for _, path in sorted(times_of(self._described())):
            try:
                found.append(WeightsCopy.read(path.parent))
            except CopyFailed as error:
                log.warning("%s; it is left where it is", error)
        return found

    def _described(self) -> list[Path]:
        return [path for kind in KINDS for path in self.root.glob(f"{kind}*/{DESCRIPTION}")]

    # -- one rank's part ------------------------------------------------------------------------------------------------------

    def _write_mine(self, folder: Path, source: WeightSource, write: WriteOne) -> list[Written] | str:
        """What this rank has written, or why it could not. It takes all buckets in any case: the others gather them too."""
        problem = ""
        done: list[Written] = []
        pending: Future[Written] | None = None
        count = len(source.plan())
        with ThreadPoolExecutor(1, thread_name_prefix="steno-shards") as thread:
            for index, bucket in enumerate(source.buckets()):
                if problem or self._writers[index % len(self._writers)] != self._rank:
                    continue
                mine = {name: _own(tensor) for name, tensor in bucket.items()}
                if pending is not None:
                    problem = _collect(pending, done)
                pending = thread.submit(write, folder, index, count, mine)
                del mine
            if pending is not None:
                problem = _collect(pending, done) or problem
        return (problem and f"rank {self._rank}: {problem}") or done

    # -- the first rank's part ------------------------------------------------------------------------------------------------

    def _begin(self, version: PolicyVersion, cleanup: contextlib.ExitStack) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        folder, lock = self._locked(version, cleanup)
        cleanup.callback(remove_or_leave, Path.unlink, lock)
        folder.mkdir()
        cleanup.callback(remove_or_leave, _remove, folder)  # renamed by then, unless something failed
        return folder

    def _locked(self, version: PolicyVersion, cleanup: contextlib.ExitStack) -> tuple[Path, Path]:
        """A name for a folder to be, and its lock, held."""
        while True:
            folder = self.root / f"{WRITING}{_name(version)}-{uuid.uuid4().hex[:8]}"
            lock = _lock_of(folder)
            held = cleanup.enter_context(lock.open("w"))
            fcntl.flock(held, fcntl.LOCK_EX)
            # Between the two lines above, another trainer may have taken it for a dead writer's and removed it.
            with contextlib.suppress(FileNotFoundError):
                if lock.stat().st_ino == os.fstat(held.fileno()).st_ino:
                    return folder, lock

    def _finish(self, folder: Path, version: PolicyVersion, outcomes: list[list[Written] | str]) -> dict[str, Any]:
        written = all_written(outcomes)
        manifest = Manifest(
            tensors=[tensor for _, _, tensors in written for tensor in tensors],
            shards=[shard for _, shard, _ in written],
            adapter=self._adapter,
        )
        for _, shard, _ in written:
            if not (folder / shard.name).is_file():
                raise CopyFailed(
                    f"{shard.name}: another rank wrote this file, but this rank can't see it: is the folder shared?"
                )
        for path in self._extra:
            shutil.copyfile(path, folder / path.name)
        if self._adapter is None:  # else nothing loads it as a model
            weight_map = {tensor.name: shard.name for _, shard, tensors in written for tensor in tensors}
            index = {"metadata": {"total_size": manifest.size}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index))
        return self._complete(folder, version, manifest, self.root / _name(version))

    def _complete(self, folder: Path, version: PolicyVersion, manifest: Manifest, final: Path) -> dict[str, Any]:
        """Give it its name, which makes it complete. Returns: what `copy_of` takes, as JSON carries it."""
        body = {"version": str(version), "manifest": manifest.model_dump()}
        with (folder / DESCRIPTION).open("w") as file:
            file.write(json.dumps(body))
            file.flush()
            os.fsync(file.fileno())
        make_newest(folder / DESCRIPTION, self._described())
        try:
            folder.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if WeightsCopy.read(final).manifest.digest != manifest.digest:
                raise CopyFailed(f"{final} holds other weights of version {version}") from None
            return body | {"folder": str(final)} | {"manifest": WeightsCopy.read(final).manifest.model_dump()}
        self._prune(final)
        return body | {"folder": str(final)}

    def _outdated(self) -> list[WeightsCopy]:
        """The copies to remove. Of each of the newest versions, the newest copy stays; of the very newest version, all copies:
        workers may be reading it by difference while it is sent whole."""
        copies = self.complete()
        versions = list(dict.fromkeys(copy.version for copy in reversed(copies)))[: self._keep]
        newest = {copy.version: copy for copy in copies}
        stay = [newest[version] for version in versions]
        return [copy for copy in copies if copy.version != versions[0] and copy not in stay]

    def _prune(self, written: Path) -> None:
        """What can't be removed ends no run: the new copy is complete. The next push tries again.

        Args: written: just now, so it stays whatever its time says.
        """
        try:
            outdated = self._outdated()
        except OSError as error:
            log.warning("older copies in %s are left where they are: %s", self.root, error)
            return
        for copy in outdated:
            if copy.folder == written:
                continue
            doomed = self.root / f"{REMOVING}{uuid.uuid4().hex}"
            try:
                copy.folder.rename(doomed)  # at once, so that nobody takes half a copy for a whole one
            except FileNotFoundError:
                continue  # another trainer was faster
            except OSError as error:
                _log_left(copy.folder, error)
                continue
            remove_or_leave(_remove, doomed)

    def _sweep(self) -> None:
        """Remove what crashed writers and removers left. What can't be removed holds up no push."""
        for doomed in self.root.glob(f"{REMOVING}*"):
            remove_or_leave(_remove, doomed)
        for lock in self.root.glob(f"{WRITING}*.lock"):
            try:
                with lock.open("r+") as held:  # for writing: NFS refuses the lock otherwise
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by its writer: not dead
                    log.info("removing %s, whose writer has died", lock.with_suffix(""))
                    _remove(lock.with_suffix(""))
                    lock.unlink()
            except (FileNotFoundError, BlockingIOError):
                continue
            except OSError as error:
                _log_left(lock, error)


def times_of(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    """When each was written, in nanoseconds; without those that another trainer has removed since they were listed."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime_ns, path))
    return found


def make_newest(path: Path, others: Iterable[Path]) -> None:
    """Give `path` a later time than `others` have, since the oldest are removed, and the clock may have gone back. Some file
    systems keep whole seconds, and some take no time at all."""
    newest = max((written for written, _ in times_of(others)), default=0)
    if path.stat().st_mtime_ns <= newest:
        with contextlib.suppress(OSError):
            os.utime(path, ns=(newest + SECOND_NS, newest + SECOND_NS))


def all_written(outcomes: list[list[Written] | str]) -> list[Written]:
    """Of all ranks, in the buckets' order. Raises: CopyFailed: a rank could not write."""
    problems = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if problems:
        raise CopyFailed("; ".join(problems))
    return sorted((one for outcome in outcomes if not isinstance(outcome, str) for one in outcome), key=_number)


def copy_of(done: dict[str, Any]) -> WeightsCopy:
    return WeightsCopy(Path(done["folder"]), done["version"], Manifest.model_validate(done["manifest"]))


def _name(version: PolicyVersion) -> str:
    return f"{PREFIX}{version.lineage}-{version.step}"


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def _number(written: Written) -> int:
    return written[0]


def _own(tensor: Tensor) -> Tensor:
    """A copy on the CPU: the original is gone once the next bucket is gathered."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def write_one(folder: Path, index: int, count: int, tensors: dict[str, Tensor]) -> Written:
    """One bucket as a shard."""
    shard, entries = write_shard(folder / shard_name(index, count), tensors)
    return index, shard, entries


def _collect(pending: Future[Written], done: list[Written]) -> str:
    try:
        done.append(pending.result())
    except (OSError, StenoError) as error:
        return str(error)
    return ""


def remove_or_leave(remove: Callable[[Path], None], path: Path) -> None:
    """Remove it, or leave it to the next time: NFS keeps files that somebody reads (ENOTEMPTY), and disks have errors."""
    try:
        remove(path)
    except OSError as error:
        _log_left(path, error)


def _log_left(path: Path, error: OSError) -> None:
    log.warning("%s is left where it is: %s", path, error)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        if folder.exists():
            raise
        # another trainer swept at the same time
