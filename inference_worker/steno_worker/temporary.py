"""Temporary folders of a worker's, which the next worker removes if this one is killed.

    <tmp>/steno-<kind>-<...>/               of full copies of the weights, or of adapters
    <tmp>/steno-<kind>-<...>-<boot>.lock    held by its worker, which is dead if nobody holds it

A folder without a lock file stays: its file system has no locks, or its worker is of an earlier release. A folder from another
machine, or from before this machine's last boot (`boot`), stays too: on a mount, each machine may see only its own locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)
PREFIX = "steno-"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Of the kernel: the same in all containers of a machine."""


class TemporaryFolder:
    """A new folder. Its lock is held until `remove` or the process's end; by processes forked meanwhile, until theirs."""

    def __init__(self, kind: str) -> None:
        """Raises: OSError: it can't be made."""
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        self._lock: Path | None = None
        self._held: IO[bytes] | None = None
        begun = self.path / "lock"
        try:
            lock = self.path.with_name(f"{self.path.name}{_suffix()}")
            self._held = _opened(begun, os.O_CREAT | os.O_EXCL)
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            begun.rename(lock)  # held before it has the name by which others find it
            self._lock = lock
        except OSError as error:
            logger.warning("%s can't be locked: if this worker is killed, remove it yourself: %s", self.path, error)
            with contextlib.suppress(OSError):
                begun.unlink(missing_ok=True)

    def remove(self) -> None:
        """Idempotent. What can't be removed is left to the next worker."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None and not self.path.exists():
            with contextlib.suppress(OSError):
                self._lock.unlink()
        if self._held is not None:
            self._held.close()


def sweep_dead() -> None:
    """Remove the folders of this user's killed workers on this machine. What can't be removed stays."""
    try:
        suffix = _suffix()
    except OSError:  # none was locked here
        return
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*{suffix}"):
        folder = lock.with_name(lock.name.removesuffix(suffix))
        try:
            if lock.lstat().st_uid != os.geteuid():  # anybody may put files there
                continue
            with _opened(lock, os.O_NOFOLLOW | os.O_NONBLOCK) as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by its worker: not dead
                # Another worker may have just removed it, or somebody tidied up.
                with contextlib.suppress(FileNotFoundError):
                    if folder.lstat().st_uid != os.geteuid():
                        continue
                    logger.info("removing %s, whose worker was killed", folder)
                    shutil.rmtree(folder)  # follows no links
                lock.unlink()
        except (FileNotFoundError, BlockingIOError):
            continue
        except OSError as error:
            logger.warning("%s, whose worker was killed, is left where it is: %s", folder, error)


def _opened(path: Path, flags: int) -> IO[bytes]:
    """Open a lock file for reading and writing: NFS refuses the lock on a file that is opened for reading only."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600), "r+b", buffering=0)


def _suffix() -> str:
    """How the names of lock files end that were made on this machine since its last boot. Raises: OSError: no boot id."""
    return f"-{BOOT_ID.read_text().strip()}.lock"
