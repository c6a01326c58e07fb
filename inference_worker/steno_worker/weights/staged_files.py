"""The files of an update until they are loaded, checked against the manifest.

Blocking throughout, for ever where a mount hangs: `stage.py` calls it from threads that it can leave behind. A `filesystem`
update is read where it lies; a `stream` is written into a folder here, in the manifest's order, checked as it comes, and goes on
where it was after a cut or a restart.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import threading
import zlib
from collections.abc import Callable, Sequence
from hashlib import blake2b
from io import FileIO
from pathlib import Path

from steno.contracts.errors import WeightsRefused
from steno.contracts.policy import Manifest, ShardEntry
from steno_worker.weights.shard_files import FileCheck, ShardCheck, check_complete, file_refusal
from steno_worker.weights.threads import in_readers

logger = logging.getLogger(__name__)
PREFIX = "steno-update-"
"""Of the folders here: nothing else is ever removed, whatever folder it was that the settings named."""
BLOCK_BYTES = 4 * 2**20
READERS = 4
"""Shards read at a time: hashing lets go of the interpreter, and one core does about a GB per second."""
SPARE_BYTES = 64 * 2**20
"""What a disk must keep free beside the shards."""


class UpdateAbandoned(Exception):
    """The update whose bytes are read or written is abandoned."""


def check_folder(folder: str, manifest: Manifest, abandoned: threading.Event, on_bytes: Callable[[int], None]) -> Path:
    """Read every shard in `folder` once. `on_bytes` is called with how many more have been read, from several threads.

    Raises: WeightsRefused naming the field; UpdateAbandoned.
    """
    path = readable_folder(folder)
    if not manifest.shards:
        raise WeightsRefused("manifest.shards: there are none", field="manifest.shards")
    expected = {tensor.name: tensor for tensor in manifest.tensors}

    checks: list[ShardCheck] = []

    def read(shard: ShardEntry) -> None:
        check = ShardCheck(shard, expected)
        feed_file(check, path / shard.name, abandoned, on_bytes)
        checks.append(check)

    in_readers(read, manifest.shards, READERS)
    check_complete(manifest, checks)
    return path


def readable_folder(folder: str) -> Path:
    """Raises: WeightsRefused: `location` is none."""
    path = Path(folder)
    if not path.is_absolute() or not path.is_dir():
        raise WeightsRefused(
            f"location: got {folder!r}, must be an absolute path of a folder that this worker can read",
            field="location",
        )
    return path


def folder_of(root: Path, update_id: str, manifest: Manifest) -> Path:
    """Of one update at this worker, named after its id and its weights."""
    name = blake2b(f"{update_id}\0{manifest.digest}".encode(), digest_size=16).hexdigest()
    return root / f"{PREFIX}{name}"


def sweep(root: Path, needed: Sequence[Path]) -> None:
    """Remove the folders of all other updates."""
    for other in root.glob(f"{PREFIX}*"):
        if other not in needed:
            shutil.rmtree(other, ignore_errors=True)


def check_room(folder: Path, needed: int, spare: Path | None = None) -> None:
    """Check that the disk has room. Args: needed: bytes to be written. spare: a folder that is removed if this alone makes room.

    Raises: WeightsRefused: there is no room.
    """
    needed += SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed and spare is not None and spare.exists() and free + _size(spare) >= needed:
        logger.warning("staging_dir has no space for a second copy: this worker can't roll back after a refused update")
        shutil.rmtree(spare, ignore_errors=True)
        free = shutil.disk_usage(folder).free
    if free < needed:
        raise WeightsRefused(f"staging_dir: {free} bytes are free, {needed} are needed", field="staging_dir")


def _size(folder: Path) -> int:
    """Bytes that would be free without it: of its files that have no other name."""
    files = [path.lstat() for path in folder.rglob("*")]
    return sum(about.st_size for about in files if stat.S_ISREG(about.st_mode) and about.st_nlink == 1)


class StreamStaging:
    """The files of one update as they arrive, one after the other.

    Args:
        root: of this worker's staged updates; each has a folder of its own.
        files: the files to receive for patching, each checked by its own digest only; None: the manifest's shards, whose
            tensors are checked too.
    """

    def __init__(
        self, root: Path, update_id: str, manifest: Manifest, files: Sequence[ShardEntry] | None = None
    ) -> None:
        self.folder = folder_of(root, update_id, manifest)
        self._manifest = manifest
        self._files = list(manifest.shards if files is None else files)
        self._is_result = files is None
        self._expected = {tensor.name: tensor for tensor in manifest.tensors}
        self._checks: list[FileCheck] = []

    @property
    def folders(self) -> list[Path]:
        """All that there is of it on the disk."""
        return [self.folder]

    @property
    def received(self) -> int:
        """Bytes staged and checked, of all files."""
        return sum(check.fed for check in self._checks)

    @property
    def position(self) -> tuple[ShardEntry, int] | None:
        """The file whose bytes are wanted next, and from which one on; None: all are there."""
        for check in self._checks[-1:]:
            if check.fed < check.shard.size:
                return check.shard, check.fed
        done = len(self._checks)
        return (self._files[done], 0) if done < len(self._files) else None

    def open(
        self, abandoned: threading.Event, kept: Path | None = None, needed: Sequence[Path] = (), *,
        needs_kept: bool = False, more_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Make the folder, remove those of other updates, take up what an earlier start of this worker left.

        Args:
            kept: a folder that stays, unless its room is needed. needs_kept: it stays in any case. needed: others that stay.
            more_bytes: of what will be made of the files.
        Raises: WeightsRefused: no shards, or not enough room for them.
        """
        if not self._manifest.shards:
            raise WeightsRefused("manifest.shards: there are none", field="manifest.shards")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep(self.folder.parent, [self.folder, *([kept] if kept is not None else []), *needed])
        self._take_up(abandoned)
        room = sum(file.size for file in self._files) - self.received + more_bytes
        check_room(self.folder, room, None if needs_kept or kept == self.folder else kept)

    def write(self, shard: str, offset: int, data: bytes, crc32: int) -> None:
        """The bytes at `position`. Raises: WeightsRefused: they are other than what was sent, or than the manifest says."""
        if zlib.crc32(data) != crc32:
            raise WeightsRefused(
                f"shard {shard}: the bytes from {offset} on were damaged on their way (crc32)", field="crc32"
            )
        self.take(shard, offset, data)

    def take(self, shard: str, offset: int, data: bytes) -> None:
        """As `write`, for bytes that came without a CRC. Raises: WeightsRefused: they are other than the manifest says."""
        position = self.position
        assert position is not None and (position[0].name, position[1]) == (shard, offset)
        if offset == 0:
            self._checks.append(self._check_of(position[0]))
        check = self._checks[-1]
        check.feed(data)
        with (self.folder / shard).open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(data)
        self._finish(check)

    def remove(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._checks.clear()

    def _check_of(self, file: ShardEntry) -> FileCheck:
        return ShardCheck(file, self._expected) if self._is_result else FileCheck(file)

    def _finish(self, check: FileCheck) -> None:
        if check.fed == check.shard.size:
            check.finish()
            if self._is_result and len(self._checks) == len(self._files):
                check_complete(self._manifest, [one for one in self._checks if isinstance(one, ShardCheck)])

    def _take_up(self, abandoned: threading.Event) -> None:
        """Keep what an earlier start left: whole files, then the beginning of one. From the first bad or missing file on,
        all come anew."""
        for shard in self._files:
            path = self.folder / shard.name
            size = path.stat().st_size if path.is_file() else 0
            if not 0 < size <= shard.size:
                return
            check = self._check_of(shard)
            self._checks.append(check)
            try:
                feed_partly(check, path, abandoned, lambda count: None)
                self._finish(check)
            except WeightsRefused:
                self._checks.pop()
                return
            if size < shard.size:
                return


def open_regular(path: Path) -> FileIO:
    """To read, unbuffered. Never waits for a writer. Raises: OSError: it can't be opened, or is no regular file (a pipe, a
    socket, a device, a folder)."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
    except BaseException:
        os.close(number)
        raise
    return FileIO(number)


def feed_file(
    check: FileCheck, path: Path, abandoned: threading.Event, on_bytes: Callable[[int], None]
) -> None:  # fmt: skip
    """Read a whole file through its check. Raises: WeightsRefused; UpdateAbandoned."""
    feed_partly(check, path, abandoned, on_bytes)
    check.finish()


def feed_partly(
    check: FileCheck, path: Path, abandoned: threading.Event, on_bytes: Callable[[int], None]
) -> None:  # fmt: skip
    """As `feed_file`, for a file that may be cut off: the check is not finished. Raises: as `feed_file`."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    try:
        with open_regular(path) as file:
            while count := file.readinto(buffer):
                if abandoned.is_set():
                    raise UpdateAbandoned
                check.feed(buffer[:count])
                on_bytes(count)
    except OSError as error:
        raise file_refusal(path.name, f"can't be read: {error.strerror or error}") from error
