"""Gets the shards that an update's spec names to where this machine can read them, while generation goes on.

Patches are applied to the full copy that was kept of the version served, or else to the full copy that they came with.
Owns the threads that touch disks, the temporary folder, and the reports on the way; the checks are in `staged_files.py`.
A folder that others own may hang for ever: each update that reads one has a thread of its own, which can be left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from steno.config.object_store import ObjectStore
from steno.contracts.errors import WeightsRefused
from steno.contracts.policy import PatchEntry
from steno_worker.metrics import WorkerMetrics
from steno_worker.temporary import TemporaryFolder, sweep_dead
from steno_worker.weights.object_files import fetch, is_url, readable_store
from steno_worker.weights.patching import PatchBase, PatchedStaging, PatchJob
from steno_worker.weights.staged_files import StreamStaging, check_folder, readable_folder
from steno_worker.weights.threads import DiskThread
from steno_worker.weights.update_state import WeightUpdate

logger = logging.getLogger(__name__)
T = TypeVar("T")
REPORT_EVERY_S = 1.0
"""How often a long reading of shards is reported."""
STUCK_S = 120.0
"""If nothing could be read from a folder for this long, the update fails; the proxy asks again, at growing intervals."""
MOST_LEFT = 8
"""If this many threads still wait for folders, which may never answer, further updates that read a folder are refused."""
CLOSE_S = 10.0
"""What removing the last files may take."""


class Stager:
    """Gets the files of an update to a folder, and checks them.

    Args:
        staging_dir: of what comes here; None: a temporary folder, removed by `close`.
        objects: the object store that is read; None: none is.
    """

    def __init__(
        self, metrics: WorkerMetrics, staging_dir: Path | None, objects: ObjectStore | None = None
    ) -> None:  # fmt: skip
        self._objects = objects
        self._metrics = metrics
        self._staging_dir = staging_dir
        self._temporary: TemporaryFolder | None = None
        self._streams = DiskThread(
            "staging"
        )  # what is asked of our own folder happens in the order in which it was asked
        self._reading: list[DiskThread] = []  # of others' folders; also those that were left behind
        self._kept: StreamStaging | PatchedStaging | None = None
        self._base: PatchBase | None = None  # what was kept, for patches to go onto
        self._closed = False
        self._here: set[WeightUpdate] = set()  # those whose files are needed: being staged, ready, or being loaded

    async def stage(self, update: WeightUpdate) -> Path:
        """The folder of its shards, complete and verified (`nccl`: of no meaning). Raises: WeightsRefused;
        UpdateAbandoned."""
        self._here.add(update)
        if update.spec.manifest.patches:
            return await self._patched(update)
        if _comes_here(update):
            return await self._receive(update)
        if update.spec.transport == "filesystem":
            return await self._check(update)
        return Path()

    def keep(self, update: WeightUpdate) -> None:
        """Keep the files that were written for `update`, and remove those that were kept before. Returns at once."""
        before, self._kept = self._kept, update.staging
        shards = tuple(shard.name for shard in update.spec.manifest.shards)
        self._base = PatchBase(update.staging.folder, shards, update.digest) if update.staging is not None else None
        if isinstance(update.staging, PatchedStaging) and update.staging.incoming is not None:
            self._streams.tell(update.staging.incoming.remove)
        if before is not None and before.folder != self._kept_folder:
            self._streams.tell(before.remove)

    def remove(self, update: WeightUpdate) -> None:
        """What was written for it, unless it is kept. Returns at once."""
        self._here.discard(update)
        if update.staging is not None and update.staging.folder != self._kept_folder:
            self._streams.tell(update.staging.remove)

    async def close(self) -> None:
        """Once; again, it does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._kept_folder is not None:
            self._streams.tell(partial(shutil.rmtree, self._kept_folder, ignore_errors=True))
        if self._temporary is not None:
            self._streams.tell(self._temporary.remove)
        with contextlib.suppress(TimeoutError):  # a disk that hangs: the thread ends with the process
            async with asyncio.timeout(CLOSE_S):
                await self._streams.do(lambda: None)
        self._streams.close()

    @property
    def _kept_folder(self) -> Path | None:
        return self._kept.folder if self._kept is not None else None

    @property
    def _needed_folders(self) -> list[Path]:
        """All but these may go: one update may be loaded while the next is staged."""
        stagings = [self._kept, *(update.staging for update in self._here)]
        return [folder for staging in stagings if staging is not None for folder in staging.folders]

    async def _check(self, update: WeightUpdate) -> Path:
        spec = update.spec
        path = await self._watched(
            update, repr(spec.location), partial(check_folder, spec.location, spec.manifest, update.abandoned)
        )
        self._metrics.staged_bytes.labels("filesystem").inc(spec.manifest.size)
        update.received = spec.manifest.size
        return path

    async def _watched(
        self, update: WeightUpdate, where: str, work: Callable[[Callable[[int], None]], T]
    ) -> T:  # fmt: skip
        """Run `work`, whose reads may hang, in a thread of its own; `work` gets a function to report the bytes that it read.

        Returns: its result. Raises: what it raised; WeightsRefused: nothing has been read for STUCK_S.
        """
        self._reading = [thread for thread in self._reading if thread.runs]
        if len(self._reading) >= MOST_LEFT:
            raise WeightsRefused(
                f"location: {len(self._reading)} earlier readings have not returned; does the mount hang?",
                field="location",
            )
        loop = asyncio.get_running_loop()
        counted = 0

        def count(read: int) -> None:
            nonlocal counted
            counted += read
            loop.call_soon_threadsafe(update.progressed, read)

        update.report()
        thread = DiskThread(f"check {update.version}")
        self._reading.append(thread)
        checking = thread.do(work, count)
        thread.close()
        seen, moved_at = 0, time.monotonic()
        try:
            while not (await asyncio.wait({checking}, timeout=REPORT_EVERY_S))[0]:
                update.report()
                if counted != seen:
                    seen, moved_at = counted, time.monotonic()
                elif time.monotonic() - moved_at >= STUCK_S:
                    raise WeightsRefused(
                        f"location: nothing could be read of {where} for {STUCK_S:g} s; does the mount hang?",
                        field="location",
                    )
        except BaseException:
            checking.cancel()
            update.abandoned.set()  # its thread, if it ever goes on, is to end
            raise
        return await checking

    async def _receive(self, update: WeightUpdate) -> Path:
        await self._answering()
        staging = update.staging = StreamStaging(self._root(), update.id, update.spec.manifest)
        await self._streams.do(staging.open, update.abandoned, self._kept_folder, self._needed_folders)
        await self._take_all(update, staging)
        return staging.folder

    async def _take_all(self, update: WeightUpdate, staging: StreamStaging) -> None:
        """Take all bytes that `staging` lacks: from the object store, or from the chunks that proxies send."""
        disk = self._streams
        update.received = staging.received
        if update.spec.transport == "filesystem":
            store, here = readable_store(self._objects, update.spec), staging.received
            work = partial(fetch, store, update.spec, staging, update.abandoned)
            await self._watched(update, repr(update.spec.location), work)
            self._metrics.staged_bytes.labels("filesystem").inc(staging.received - here)
            update.received = staging.received
            return
        while (position := staging.position) is not None:
            update.want(*position)
            chunk = await update.chunks.get()
            await disk.do(staging.write, chunk.shard, chunk.offset, chunk.data, chunk.crc32)
            self._metrics.staged_bytes.labels("stream").inc(len(chunk.data))
            update.received = staging.received
        update.want_nothing()

    # -- by difference

    async def _patched(self, update: WeightUpdate) -> Path:
        """Make a full copy by patches: of the copy kept here, or else of the full copy that the patches came with."""
        base, manifest = self._base, update.spec.manifest
        patches = base.patches_to(manifest) if base is not None else None
        if base is not None and patches is not None:
            try:
                return await self._patch(update, base, patches)
            except WeightsRefused as error:
                if update.abandoned.is_set() or _is_of_patches(error, patches):
                    raise
                if self._base is base:  # else another update was served meanwhile
                    self._base = None
                update.forget_bytes()
                logger.warning(
                    "update %s can't be patched onto this worker's copy; it will be patched onto the full copy: %s",
                    update.version, error.message,
                )  # fmt: skip
        return await self._patch(update, None, manifest.patches)

    async def _patch(self, update: WeightUpdate, base: PatchBase | None, patches: Sequence[PatchEntry]) -> Path:
        """Args: base: None: the shards of the update itself."""
        await self._answering()
        manifest, disk = update.spec.manifest, self._streams
        size = sum(shard.size for shard in manifest.shards)
        files = [file for patch in patches for file in patch.files]
        wanted = files if base is not None else [*manifest.shards, *files]
        made = update.staging = PatchedStaging(self._root(), update.id, manifest)
        comes = _comes_here(update)
        if comes:
            made.incoming = StreamStaging(self._root(), update.id, manifest, wanted)
            kept, needed = self._kept_folder, self._needed_folders
            await disk.do(
                partial(
                    made.incoming.open, update.abandoned, kept, needed, needs_kept=base is not None, more_bytes=size
                )
            )  # fmt: skip
            await self._take_all(update, made.incoming)
        here = made.incoming.folder if made.incoming is not None else None
        await disk.do(made.open, self._needed_folders, size)

        def patch(on_bytes: Callable[[int], None]) -> Path:
            arrived = here or readable_folder(update.spec.location)
            return PatchJob(
                manifest, base.folder if base is not None else arrived,
                base.shards if base is not None else [shard.name for shard in manifest.shards],
                patches, arrived, comes, made.folder, update.abandoned, on_bytes,
            ).run()  # fmt: skip

        path = await self._watched(update, repr(str(here or update.spec.location)), patch)
        taken = sum(file.size for file in wanted)
        if not comes:
            self._metrics.staged_bytes.labels("filesystem").inc(taken)
        update.received = taken
        return path

    async def _answering(self) -> None:
        """Leave the thread of our own folder behind if its disk hangs: the next update may be luckier."""
        try:
            async with asyncio.timeout(STUCK_S):
                await self._streams.do(lambda: None)
        except TimeoutError:
            self._streams.close()
            self._streams = DiskThread("staging")

    def _root(self) -> Path:
        if self._staging_dir is not None:
            return self._staging_dir
        if self._temporary is None:
            self._temporary = TemporaryFolder("staging")
            self._streams.tell(sweep_dead)  # before the room is measured
        return self._temporary.path


def _comes_here(update: WeightUpdate) -> bool:
    """Whether its files are written to our own folder first."""
    spec = update.spec
    return spec.transport == "stream" or (spec.transport == "filesystem" and is_url(spec.location))


def _is_of_patches(error: WeightsRefused, patches: Sequence[PatchEntry]) -> bool:
    """Whether a patch itself is to blame, or its way here (`crc32`): onto another copy it would be refused as well."""
    names = [file.name for patch in patches for file in patch.files]
    return error.field == "crc32" or error.field in [f"manifest.shards.{name}" for name in names]
