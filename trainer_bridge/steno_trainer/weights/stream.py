"""Uploads shards through the proxy: whatever bytes some worker lacks, from a full copy on disk, resumed wherever it was cut.

The proxy says what is wanted (`Update.wants`) and takes as much as workers have room for. So nothing is remembered here: after a
cut, a restart of the proxy or a worker that comes late, what is wanted says where to go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import IO, Protocol

from steno.contracts.errors import Conflict
from steno.contracts.policy import Manifest, Update, Want
from steno_trainer.errors import WeightsUnavailable

log = logging.getLogger(__name__)

READ_BYTES = 1 << 20
"""At a time, of which the HTTP client holds one."""
UPLOAD_BYTES = 32 << 20
"""In one request. What nobody wants any more is sent to its end all the same, and it takes as long as the slowest worker."""


class UploadClient(Protocol):
    """The call of `steno.client.client.AsyncClient` that is used here."""

    def upload_shard(self, update_id: str, name: str, offset: int, data: AsyncIterator[bytes]) -> Awaitable[int]:
        """Returns: how many bytes of the shard, from its start, have gone on to workers."""
        ...


class Uploader:
    """Of one copy. bytes_sent: in all, also what was sent again after a cut."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._sizes = {file.name: file.size for file in manifest.files}
        self.bytes_sent = 0

    async def serve(self, client: UploadClient, update: Update) -> bool:
        """Send what `update` wants, the earliest first: where a worker further on waits, one upload reaches both.

        Cancel-safe. Returns: whether anything moved; it is enough to ask for the update again then.
        Raises: StenoError: the proxy is gone, or no longer knows the update; WeightsUnavailable.
        """
        for want in update.wants:
            try:
                received = await client.upload_shard(update.update_id, want.shard, want.offset, self._read(want))
            except Conflict as refused:  # another upload, or another proxy, has moved that worker on
                log.debug("the proxy no longer wants %s from byte %d on: %s", want.shard, want.offset, refused)
                return True
            if received > want.offset:
                return True
        return False

    async def _read(self, want: Want) -> AsyncIterator[bytes]:
        if not 0 <= want.offset < self._sizes.get(want.shard, 0):
            raise WeightsUnavailable(
                f"the proxy wants byte {want.offset} of {want.shard}, but this update has no such byte"
            )
        with await asyncio.to_thread(self._open, want) as file:
            left = UPLOAD_BYTES
            while left and (data := await asyncio.to_thread(file.read, min(left, READ_BYTES))):
                left -= len(data)
                self.bytes_sent += len(data)
                yield data

    def _open(self, want: Want) -> IO[bytes]:
        file = (self._folder / want.shard).open("rb")
        file.seek(want.offset)
        return file
