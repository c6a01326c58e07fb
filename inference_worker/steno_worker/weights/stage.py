"""From what an update's spec says to shards that lie where this machine can read them, beside generation.

Owns the threads that touch disks, the temporary folder, and the reports on the way; what is right is `staged_files.py`'s to say.
A folder of somebody else's may hang for ever: each update that reads one has a thread of its own, which is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

from steno.contracts.errors import WeightsRefused
from steno_worker.metrics import WorkerMetrics
from steno_worker.weights.staged_files import StreamStaging, check_folder
from steno_worker.weights.threads import DiskThread
from steno_worker.weights.update_state import WeightUpdate

REPORT_EVERY_S = 1.0
"""How often a long reading of shards is reported."""
STUCK_S = 120.0
"""A folder of which nothing has been read for so long is given up: the proxy asks again, later and later."""
MOST_LEFT = 8
"""Threads that wait for a folder which may never answer, before no more are begun."""
CLOSE_S = 10.0
"""What removing the last files may take."""


class Stager:
    """Gets the files of an update to a folder, and checks them.

    Args: staging_dir: of streams; None: a temporary folder, removed by `close`.
    """

    def __init__(self, metrics: WorkerMetrics, staging_dir: Path | None) -> None:
        self._metrics = metrics
        self._staging_dir = staging_dir
        self._temporary: Path | None = None
        self._streams = DiskThread(
            "staging"
        )  # what is asked of our own folder happens in the order in which it was asked
        self._reading: list[DiskThread] = []  # of others' folders; also those that were left behind
        self._kept: StreamStaging | None = None

    async def stage(self, update: WeightUpdate) -> Path:
        """The folder of its shards, complete and verified (`nccl`: of no meaning). Raises: WeightsRefused;
        UpdateAbandoned."""
        if update.spec.transport == "stream":
            return await self._receive(update)
        if update.spec.transport == "filesystem":
            return await self._check(update)
        return Path()

    def keep(self, update: WeightUpdate) -> None:
        """What was written for it stays, and what stayed before it goes. Returns at once."""
        before, self._kept = self._kept, update.staging
        if before is not None and before.folder != self._kept_folder:
            self._streams.tell(before.remove)

    def remove(self, update: WeightUpdate) -> None:
        """What was written for it, unless it is kept. Returns at once."""
        if update.staging is not None and update.staging.folder != self._kept_folder:
            self._streams.tell(update.staging.remove)

    async def close(self) -> None:
        for root in (self._kept_folder, self._temporary):
            if root is not None:
                self._streams.tell(partial(shutil.rmtree, root, ignore_errors=True))
        with contextlib.suppress(TimeoutError):  # a disk that hangs: the thread ends with the process
            async with asyncio.timeout(CLOSE_S):
                await self._streams.do(lambda: None)
        self._streams.close()

    @property
    def _kept_folder(self) -> Path | None:
        return self._kept.folder if self._kept is not None else None

    async def _check(self, update: WeightUpdate) -> Path:
        self._reading = [thread for thread in self._reading if thread.runs]
        if len(self._reading) >= MOST_LEFT:
            raise WeightsRefused(
                f"location: {len(self._reading)} earlier readings have not returned; does the mount hang?",
                field="location",
            )
        loop = asyncio.get_running_loop()

        def read(count: int) -> None:
            loop.call_soon_threadsafe(update.progressed, count)

        update.report()
        thread = DiskThread(f"check {update.version}")
        self._reading.append(thread)
        checking = thread.do(check_folder, update.spec.location, update.spec.manifest, update.abandoned, read)
        thread.close()
        received, moved_at = 0, time.monotonic()
        try:
            while not (await asyncio.wait({checking}, timeout=REPORT_EVERY_S))[0]:
                update.report()
                if update.received != received:
                    received, moved_at = update.received, time.monotonic()
                elif time.monotonic() - moved_at >= STUCK_S:
                    raise WeightsRefused(
                        f"location: nothing could be read of {update.spec.location!r} for {STUCK_S:g} s; does the mount hang?",
                        field="location",
                    )
            path = await checking
        except BaseException:
            checking.cancel()
            update.abandoned.set()  # its thread, if it ever goes on, is to end
            raise
        self._metrics.staged_bytes.labels("filesystem").inc(update.spec.manifest.size)
        update.received = update.spec.manifest.size
        return path

    async def _receive(self, update: WeightUpdate) -> Path:
        await self._answering()
        disk = self._streams
        staging = update.staging = StreamStaging(self._root(), update.id, update.spec.manifest)
        await disk.do(staging.open, update.abandoned, self._kept_folder)
        update.received = staging.received
        while (position := staging.position) is not None:
            update.want(*position)
            chunk = await update.chunks.get()
            await disk.do(staging.write, chunk.shard, chunk.offset, chunk.data, chunk.crc32)
            self._metrics.staged_bytes.labels("stream").inc(len(chunk.data))
            update.received = staging.received
        update.want_nothing()
        return staging.folder

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
            self._temporary = Path(tempfile.mkdtemp(prefix="steno-staging-"))
        return self._temporary
