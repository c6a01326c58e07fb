"""The files of an update's shards until they are loaded, checked against the manifest.

Blocking throughout, for ever where a mount hangs: `stage.py` calls it from threads that it can leave behind. A `filesystem`
update is read where it lies; a `stream` is written into a folder here, in the manifest's order, checked as it comes, and goes on
where it was after a cut or a restart.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import shutil
import stat
import threading
import zlib
from collections.abc import Callable
from hashlib import blake2b
from io import FileIO
from pathlib import Path

from steno.contracts.errors import WeightsRefused
from steno.contracts.policy import Manifest, ShardEntry
from steno_worker.weights.shard_files import ShardCheck, check_complete

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
    path = Path(folder)
    if not path.is_absolute() or not path.is_dir():
        raise WeightsRefused(
            f"location: got {folder!r}, must be an absolute path of a folder that this worker can read",
            field="location",
        )
    if not manifest.shards:
        raise WeightsRefused("manifest.shards: there are none", field="manifest.shards")
    expected = {tensor.name: tensor for tensor in manifest.tensors}

    left: queue.SimpleQueue[ShardEntry] = queue.SimpleQueue()
    for shard in manifest.shards:
        left.put(shard)
    checks: list[ShardCheck] = []
    problems: list[BaseException] = []

    def read() -> None:
        while not problems:
            try:
                shard = left.get_nowait()
            except queue.Empty:
                return
            check = ShardCheck(shard, expected)
            try:
                _feed(check, path / shard.name, abandoned, on_bytes)
                check.finish()
            except BaseException as error:  # not lost: raised below
                problems.append(error)
            checks.append(check)

    # Daemons, so that one that hangs holds up no end of the process.
    count = min(READERS, os.cpu_count() or 1, len(manifest.shards))
    readers = [threading.Thread(target=read, name=f"shards-{number}", daemon=True) for number in range(count)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if problems:
        raise problems[0]
    check_complete(manifest, checks)
    return path


class StreamStaging:
    """The shards of one update as they arrive, one after the other.

    Args:
        root: of this worker's staged updates; each has a folder of its own, named after its id and its weights.
    """

    def __init__(self, root: Path, update_id: str, manifest: Manifest) -> None:
        name = blake2b(f"{update_id}\0{manifest.digest}".encode(), digest_size=16).hexdigest()
        self.folder = root / f"{PREFIX}{name}"
        self._manifest = manifest
        self._expected = {tensor.name: tensor for tensor in manifest.tensors}
        self._checks: list[ShardCheck] = []

    @property
    def received(self) -> int:
        """Bytes staged and checked, of all shards."""
        return sum(check.fed for check in self._checks)

    @property
    def position(self) -> tuple[ShardEntry, int] | None:
        """The shard whose bytes are wanted next, and from which one on; None: all are there."""
        for check in self._checks[-1:]:
            if check.fed < check.shard.size:
                return check.shard, check.fed
        done = len(self._checks)
        return (self._manifest.shards[done], 0) if done < len(self._manifest.shards) else None

    def open(self, abandoned: threading.Event, kept: Path | None = None) -> None:
        """Make the folder, remove those of other updates, take up what an earlier start of this worker left.

        Args: kept: a folder that stays, unless its room is needed.
        Raises: WeightsRefused: no shards, or not enough room for them.
        """
        if not self._manifest.shards:
            raise WeightsRefused("manifest.shards: there are none", field="manifest.shards")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for other in self.folder.parent.glob(f"{PREFIX}*"):
            if other not in (self.folder, kept):
                shutil.rmtree(other, ignore_errors=True)
        self._take_up(abandoned)
        needed = self._manifest.size - self.received + SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if free < needed and kept is not None and kept != self.folder:
            logger.warning(
                "staging_dir has no space for a second copy: this worker can't roll back after a refused update"
            )
            shutil.rmtree(kept, ignore_errors=True)
            free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise WeightsRefused(f"staging_dir: {free} bytes are free, {needed} are needed", field="staging_dir")

    def write(self, shard: str, offset: int, data: bytes, crc32: int) -> None:
        """The bytes at `position`. Raises: WeightsRefused: they are other than what was sent, or than the manifest says."""
        position = self.position
        assert position is not None and (position[0].name, position[1]) == (shard, offset)
        if zlib.crc32(data) != crc32:
            raise WeightsRefused(
                f"shard {shard}: the bytes from {offset} on were damaged on their way (crc32)", field="crc32"
            )
        if offset == 0:
            self._checks.append(ShardCheck(position[0], self._expected))
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

    def _finish(self, check: ShardCheck) -> None:
        if check.fed == check.shard.size:
            check.finish()
            if len(self._checks) == len(self._manifest.shards):
                check_complete(self._manifest, self._checks)

    def _take_up(self, abandoned: threading.Event) -> None:
        """Whole shards and the beginning of one, as far as they are good; what is not is written over."""
        for shard in self._manifest.shards:
            path = self.folder / shard.name
            size = path.stat().st_size if path.is_file() else 0
            if not 0 < size <= shard.size:
                return
            check = ShardCheck(shard, self._expected)
            self._checks.append(check)
            try:
                _feed(check, path, abandoned, lambda count: None)
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


def _feed(check: ShardCheck, path: Path, abandoned: threading.Event, on_bytes: Callable[[int], None]) -> None:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    try:
        with open_regular(path) as file:
            while count := file.readinto(buffer):
                if abandoned.is_set():
                    raise UpdateAbandoned
                check.feed(buffer[:count])
                on_bytes(count)
    except OSError as error:
        reason = f"shard {path.name} can't be read: {error.strerror or error}"
        raise WeightsRefused(reason, field=f"manifest.shards.{path.name}") from error
