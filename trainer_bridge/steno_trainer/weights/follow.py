"""Follows one update until a newer one takes its place: posts it, polls it, uploads what workers lack, posts it again.

A proxy that restarted without a store does not know the update any more and answers 404: the same spec again is the same update.
Everything that may pass is tried again for as long as this is the newest version; only a refusal ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from steno.contracts.errors import BadRequest, NotFound, StenoError
from steno.contracts.policy import Update, UpdateSpec
from steno_trainer.weights.publication import Publication
from steno_trainer.weights.stream import UploadClient, Uploader

log = logging.getLogger(__name__)

RUNNING_WAIT_S = 5.0
"""How long a poll may hang while workers are loading: it is answered when that has ended, or when bytes are wanted."""
CARRIED_WAIT_S = 0.25
"""The same for `nccl`: shorter, since all ranks wait for workers to begin loading."""
SETTLED_WAIT_S = 15.0
"""The same once the update is settled: only late workers and restarted proxies matter. Below the client's read timeout."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 5.0
"""Between attempts when something is wrong, doubling; a proxy that restarts is back in seconds."""

LATER = ("p90_tolerance", "mean_tolerance")
"""Fields of a probe that proxies before 2026-11-22 do not know."""
FAILED_PAUSE_S, MAX_FAILED_PAUSE_S = 15.0, 300.0
"""Before an update that no worker took is posted again, doubling: until then it rests at the proxy, and workers that are started
in the meantime get an older version, or none."""


class UpdateClient(UploadClient, Protocol):
    """The calls of `steno.client.client.AsyncClient` that are used here."""

    def post_update(self, spec: UpdateSpec) -> Awaitable[Update]: ...
    def update(self, update_id: str, *, wait_s: float = 0.0) -> Awaitable[Update]: ...


class Follower:
    """Of one publication. Several clients are replicas of one proxy: the next is asked when one does not answer."""

    def __init__(
        self,
        publication: Publication,
        clients: Sequence[UpdateClient],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publication = publication
        self._clients = clients
        self._turn = 0
        self._sleep = sleep
        self._now = now
        self._pause_s = 0.0
        folder = publication.folder
        stream = publication.spec.transport == "stream"
        self._uploader = Uploader(folder, publication.spec.manifest) if stream and folder is not None else None

    async def run(self) -> None:
        """Returns when the update was refused or superseded; otherwise it is cancelled, which is safe at any point."""
        publication = self._publication
        update: Update | None = None
        named: dict[str, str] = {}
        failed_s = FAILED_PAUSE_S
        while True:
            client = self._clients[self._turn % len(self._clients)]
            try:
                asked_at = self._now()
                moved, latest = await self._round(client, update)
                if publication.failed != named:
                    named = dict(publication.failed)
                    log.warning("update %s: workers that do not serve it: %s", publication.version, named or "none")
                if latest.state == "superseded":
                    return
                # A poll that comes back at once with nothing new must not become a busy loop.
                idle = not moved and latest == update and self._now() - asked_at < MIN_PAUSE_S
                update = latest
                if latest.state == "failed":
                    await self._sleep(failed_s)
                    failed_s, update = min(2 * failed_s, MAX_FAILED_PAUSE_S), None
                else:
                    failed_s = FAILED_PAUSE_S if latest.state == "done" else failed_s
                    await self._wait(idle)
            except NotFound:
                log.info("the proxy no longer knows update %s: posting it again", publication.version)
                update = None
                await self._wait(True)
            except StenoError as error:
                if not error.retryable:
                    log.error("update %s was refused: %s", publication.version, error)
                    publication.refuse(error)
                    return
                if publication.trouble is None:
                    log.warning("update %s makes no progress: %s", publication.version, error)
                publication.trouble = error
                self._turn += 1
                await self._wait(True)

    async def _round(self, client: UpdateClient, update: Update | None) -> tuple[bool, Update]:
        """Ask once, and upload what is wanted. Returns: whether bytes moved; the update."""
        if update is None:
            latest = await self._post(client)
        else:
            running_s = CARRIED_WAIT_S if update.transport == "nccl" else RUNNING_WAIT_S
            wait_s = running_s if update.state == "running" else SETTLED_WAIT_S
            latest = await client.update(update.update_id, wait_s=wait_s)
        self._publication.seen(latest)
        if self._uploader is None or not latest.wants:
            return False, latest
        try:
            return await self._uploader.serve(client, latest), latest
        finally:
            self._publication.bytes_sent = self._uploader.bytes_sent

    async def _post(self, client: UpdateClient) -> Update:
        """Post the update. If a proxy of an earlier release refuses a probe field of `LATER`, post it without those fields."""
        spec, bring = self._publication.spec, self._publication.bring
        if bring is not None:  # before each post: what somebody has removed is there again then
            self._publication.uploading = self._publication.update is None
            try:
                self._publication.bytes_sent += await asyncio.to_thread(bring)
            finally:
                self._publication.uploading = False
        try:
            return await client.post_update(spec)
        except BadRequest as refused:
            probe, field = spec.probe, (refused.field or "").rpartition(".")[2]
            if probe is None or getattr(probe, field, None) is None or field not in LATER:
                raise
            log.warning("the proxy has an earlier release: workers compare only the largest difference of the probe")
            earlier = probe.model_copy(update=dict.fromkeys(LATER))
            return await client.post_update(spec.model_copy(update={"probe": earlier}))

    async def _wait(self, needed: bool) -> None:
        self._pause_s = min(max(2 * self._pause_s, MIN_PAUSE_S), MAX_PAUSE_S) if needed else 0.0
        if self._pause_s:
            await self._sleep(self._pause_s)
