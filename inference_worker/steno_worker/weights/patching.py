"""A full copy of a version, made of a full copy of an earlier one and the patches that came since.

What comes out has the layout of the shards that it was made of, and is checked as any copy is: every tensor of the manifest is in
one shard, with its dtype, its shape and its digest (I10). So nothing is believed of the copy that the patches go onto, and
patches are believed only in what they say of themselves. Blocking; one block of a tensor is in memory at a time, for each reader.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from steno.contracts import weight_patch
from steno.contracts.errors import WeightsRefused
from steno.contracts.policy import Manifest, PatchEntry, ShardEntry, TensorEntry, UpdateSpec
from steno.contracts.weight_patch import WIDTHS, PackedBlock, PatchBlock, PatchDamaged
from steno_worker.weights.proven_weights import UNKNOWN
from steno_worker.weights.shard_files import MAX_HEADER_BYTES, FileCheck, ShardCheck, check_complete, file_refusal
from steno_worker.weights.staged_files import (
    READERS,
    StreamStaging,
    UpdateAbandoned,
    check_room,
    feed_file,
    folder_of,
    open_regular,
    sweep,
)
from steno_worker.weights.threads import in_readers


@dataclass(frozen=True, slots=True)
class PatchBase:
    """A full copy that this worker has written. shards: its files, in the manifest's order. digest: of its weights."""

    folder: Path
    shards: tuple[str, ...]
    digest: str

    def patches_to(self, manifest: Manifest) -> list[PatchEntry] | None:
        """The patches that lead from this copy to the manifest's weights. None: no patches do."""
        if len(self.shards) != len(manifest.shards):
            return None
        for place in reversed(range(len(manifest.patches))):
            if manifest.patches[place].before == self.digest:
                return manifest.patches[place:]
        return None


class PatchedStaging:
    """The copy that is made of an update by difference, and what arrived of it. `folder` is the copy."""

    def __init__(self, root: Path, update_id: str, manifest: Manifest) -> None:
        one = folder_of(root, update_id, manifest)
        # Of each attempt its own: a thread that was left behind by an earlier one removes what it has made.
        self.folder = one.with_name(f"{one.name}-whole-{uuid.uuid4().hex[:8]}")
        self.incoming: StreamStaging | None = None

    @property
    def folders(self) -> list[Path]:
        """All that there is of it on the disk."""
        return [self.folder, *(self.incoming.folders if self.incoming is not None else [])]

    def open(self, needed: Sequence[Path], size: int) -> None:
        """Make room for `size` bytes, beside the folders `needed`, which stay. Raises: WeightsRefused: there is none."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep(self.folder.parent, [*self.folders, *needed])
        check_room(self.folder, size)

    def remove(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.incoming is not None:
            self.incoming.remove()


@dataclass(frozen=True)
class PatchJob:
    """What is to be made. base: folder of the shards that the patches go onto, named `shards`. arrived: folder of the patches;
    checked: whether their digests were compared as they came. into: the folder to write to."""

    manifest: Manifest
    base: Path
    shards: Sequence[str]
    patches: Sequence[PatchEntry]
    arrived: Path
    checked: bool
    into: Path
    abandoned: threading.Event
    on_bytes: Callable[[int], None]

    def run(self) -> Path:
        """Returns: `into`. Raises: WeightsRefused naming the file or the tensor; UpdateAbandoned. Nothing is left then."""
        expected = {tensor.name: tensor for tensor in self.manifest.tensors}
        checks: list[ShardCheck] = []
        try:
            in_readers(lambda place: checks.append(self._shard(place, expected)), range(len(self.shards)), READERS)
            check_complete(self.manifest, checks)
        except BaseException:
            shutil.rmtree(self.into, ignore_errors=True)
            raise
        return self.into

    def _shard(self, place: int, expected: dict[str, TensorEntry]) -> ShardCheck:
        named = self.manifest.shards[place]
        try:
            with ExitStack() as opened:
                source = opened.enter_context(open_regular(self.base / self.shards[place]))
                patches = [self._open(patch.files[place], opened) for patch in self.patches]
                sink = opened.enter_context((self.into / named.name).open("wb", buffering=0))
                return _PatchedShard(self, named, source, patches, sink).write(expected)
        except OSError as error:
            raise file_refusal(named.name, f"can't be patched: {error.strerror or error}") from error

    def _open(self, file: ShardEntry, opened: ExitStack) -> _PatchFile:
        path = self.arrived / file.name
        if not self.checked:
            feed_file(FileCheck(file), path, self.abandoned, self.on_bytes)
        return _PatchFile(file, opened.enter_context(open_regular(path)))


def whole_spec(spec: UpdateSpec) -> UpdateSpec:
    """Of the update as it lies in the copy that was made: shards, no patches."""
    if not spec.manifest.patches:
        return spec
    shards = [shard.model_copy(update={"digest": UNKNOWN}) for shard in spec.manifest.shards]
    manifest = spec.manifest.model_copy(update={"shards": shards, "patches": []})
    return spec.model_copy(update={"manifest": manifest})


class _PatchFile:
    """One patch of one shard. Raises: WeightsRefused: it is none."""

    def __init__(self, file: ShardEntry, opened: FileIO) -> None:
        self._name = file.name
        self._opened = opened
        try:
            length = weight_patch.header_size(opened.read(8), file.size)
            header = weight_patch.read_header(opened.read(length), file.size - 8 - length)
        except PatchDamaged as error:
            raise file_refusal(file.name, str(error)) from error
        self.tensors = {tensor.name: tensor for tensor in header.tensors}
        self._blocks: dict[tuple[str, int], tuple[int, PatchBlock]] = {}
        at = 8 + length
        for tensor in header.tensors:
            for block in tensor.blocks:
                self._blocks[tensor.name, block.index] = at, block
                at += block.places + block.differences

    def check_fits(self, layout: dict[str, tuple[int, int]]) -> None:
        """Args: layout: name -> (width, elements) of the shard's tensors.

        Raises: WeightsRefused, with a field that does not name this file: the patch may be good, and the copy that it goes onto
            cut into shards in another way."""
        for name, tensor in self.tensors.items():
            if layout.get(name) != (tensor.width, tensor.elements):
                raise WeightsRefused(
                    f"shard {self._name} is not of this shard: tensor {name!r}", field="manifest.patches"
                )

    def apply(self, name: str, index: int, onto: weight_patch.Bits) -> None:
        """Raises: WeightsRefused."""
        if (name, index) not in self._blocks:
            return
        at, about = self._blocks[name, index]
        self._opened.seek(at)
        try:
            packed = PackedBlock(about, self._opened.read(about.places), self._opened.read(about.differences))
            weight_patch.apply_block(onto, packed)
        except PatchDamaged as error:
            raise file_refusal(self._name, f"{error} (tensor {name!r}, block {index})") from error


class _PatchedShard:
    """One shard on its way from one version to another."""

    def __init__(
        self, job: PatchJob, named: ShardEntry, source: FileIO, patches: Sequence[_PatchFile], sink: FileIO
    ) -> None:
        self._job, self._named, self._source, self._patches, self._sink = job, named, source, patches, sink

    def write(self, expected: dict[str, TensorEntry]) -> ShardCheck:
        """Returns: its check, finished. Raises: WeightsRefused; UpdateAbandoned; OSError."""
        check = ShardCheck(self._named, expected, digest=False)
        header = self._header()
        self._pass_on(header, check)  # which has looked at the layout now
        order = sorted(json.loads(header[8:]).items(), key=lambda item: item[1].get("data_offsets", [0, 0]))
        tensors = [expected[name] for name, _ in order if name != "__metadata__"]
        layout = {tensor.name: (WIDTHS.get(tensor.dtype, 0), math.prod(tensor.shape)) for tensor in tensors}
        for patch in self._patches:
            patch.check_fits(layout)
        for tensor in tensors:
            self._tensor(tensor.name, *layout[tensor.name], check)
        check.finish()
        return check

    def _tensor(self, name: str, width: int, elements: int, check: ShardCheck) -> None:
        if not width:
            raise file_refusal(self._named.name, f"has a tensor of a dtype that can't be patched: {name!r}")
        for index, start, stop in weight_patch.blocks_of(elements):
            if self._job.abandoned.is_set():
                raise UpdateAbandoned
            data = self._read((stop - start) * width)
            for patch in self._patches:
                patch.apply(name, index, weight_patch.bits_of(data, width))
            self._pass_on(data, check)
            self._job.on_bytes(len(data))

    def _header(self) -> bytearray:
        first = self._read(8)
        length = int.from_bytes(first, "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, self._named.size - 8):
            raise file_refusal(self._named.name, f"is no safetensors file: its header would have {length} bytes")
        return first + self._read(length)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self._source.readinto(view[got:])
            if not count:
                raise WeightsRefused(
                    f"shard {self._named.name}: the copy that the patches go onto ends too early",
                    field=f"manifest.shards.{self._named.name}",
                )
            got += count
        return data

    def _pass_on(self, data: bytearray, check: ShardCheck) -> None:
        check.feed(data)
        view = memoryview(data)
        while len(view):
            view = view[self._sink.write(view) :]
