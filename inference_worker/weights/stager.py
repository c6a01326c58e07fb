"""From what an update's spec says to shards that lie where this machine can read them, beside generation.

Owns the thread that touches the disk, the temporary folder, and the reports on the way; what is right is `staging.py`'s to say.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from inference_worker.metrics import WorkerMetrics
from inference_worker.weights.staging import StreamStaging, check_folder
from inference_worker.weights.update import Update

T = TypeVar("T")
REPORT_EVERY_S = 1.0
"""How often a long reading of shards is reported."""


class Stager:
    """Args: staging_dir: of streams; None: a temporary folder, removed by `close`."""

    def __init__(self, metrics: WorkerMetrics, staging_dir: Path | None) -> None:
        self._metrics = metrics
        self._staging_dir = staging_dir
        self._temporary: Path | None = None
        # One thread: what is asked of a folder happens in the order in which it was asked.
        self._disk = ThreadPoolExecutor(1, "staging")

    async def stage(self, update: Update) -> Path:
        """The folder of its shards, complete and verified (`nccl`: of no meaning). Raises: WeightsRefused; Abandoned."""
        if update.spec.transport == "stream":
            return await self._receive(update)
        if update.spec.transport == "filesystem":
            return await self._check(update)
        return Path()

    def remove(self, update: Update) -> None:
        """What was written for it. Returns at once."""
        if update.staging is not None:
            self._disk.submit(update.staging.remove)

    async def close(self) -> None:
        if self._temporary is not None:
            await self._on_disk(shutil.rmtree, self._temporary, True)
        await asyncio.to_thread(self._disk.shutdown)

    async def _check(self, update: Update) -> Path:
        loop = asyncio.get_running_loop()

        def read(count: int) -> None:
            loop.call_soon_threadsafe(update.progressed, count)

        update.report()
        checking = asyncio.ensure_future(
            self._on_disk(check_folder, update.spec.location, update.spec.manifest, update.abandoned, read)
        )
        try:
            while not (await asyncio.wait({checking}, timeout=REPORT_EVERY_S))[0]:
                update.report()
            path = await checking
        finally:
            checking.cancel()
        self._metrics.staged_bytes.labels("filesystem").inc(update.spec.manifest.size)
        update.received = update.spec.manifest.size
        return path

    async def _receive(self, update: Update) -> Path:
        staging = update.staging = StreamStaging(self._root(), update.id, update.spec.manifest)
        await self._on_disk(staging.open, update.abandoned)
        update.received = staging.received
        while (position := staging.position) is not None:
            update.want(*position)
            chunk = await update.chunks.get()
            await self._on_disk(staging.write, chunk.shard, chunk.offset, chunk.data, chunk.crc32)
            self._metrics.staged_bytes.labels("stream").inc(len(chunk.data))
            update.received = staging.received
        update.want_nothing()
        return staging.folder

    def _root(self) -> Path:
        if self._staging_dir is not None:
            return self._staging_dir
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="steno-staging-"))
        return self._temporary

    async def _on_disk(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *args)
