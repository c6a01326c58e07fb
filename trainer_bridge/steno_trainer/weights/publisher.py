"""Publishes new weights: a copy, full or by difference, a post to the proxy, and a thread that follows it while training goes on.

    publisher = Publisher(FilesystemTransport(WeightsCopies(folder, ranks=ranks)), [AsyncClient(url, key)], ranks=ranks)
    first = publisher.publish(version, ModelWeights(model))    # before any data is waited for: a broken path fails here
    publisher.wait(first, timeout_s=600)
    ...
    publisher.publish(next_version, ModelWeights(model), probe)    # after each step; returns once the copy is written

Only the newest version is followed: workers that still lack an older one get the newer one. After it has settled it is followed
on, for workers that come late and proxies that forget.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, Self

from steno.contracts.policy import Probe, Update, UpdateSpec
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.errors import PushFailed
from steno_trainer.weights.exchange import GlooExchange
from steno_trainer.weights.follow import Follower, UpdateClient
from steno_trainer.weights.publication import Publication
from steno_trainer.weights.source import WeightSource
from steno_trainer.weights.transports import Transport

log = logging.getLogger(__name__)
FULL_AFTER_REFUSAL = 10
"""How many pushes are full copies after differences were refused."""


class Publisher:
    """One policy's. `publish`, `wait` and `close` are called on all ranks; the first rank alone speaks to the proxy."""

    def __init__(
        self,
        transport: Transport,
        clients: Sequence[UpdateClient],
        *,
        ranks: Ranks | None = None,
        policy: str = "default",
        run_id: str | None = None,
        kv: Literal["recompute", "keep"] = "recompute",
        deadline_s: float = 600.0,
        takes_patches: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            clients: `AsyncClient`, one for each replica of the proxy; used in this publisher's thread alone, and closed with it.
            deadline_s: a worker that has not loaded an update by then is named as failed.
            takes_patches: whether every worker knows them now; asked on the first rank, before each push.
        """
        self._transport = transport
        self._clients = clients
        self._exchange = GlooExchange(ranks)
        self._policy, self._run_id, self._kv, self._deadline_s = policy, run_id, kv, deadline_s
        self._thread: _Thread | None = None
        self._takes_patches = takes_patches
        self._newest: Publication | None = None
        self._full_left = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(
        self,
        version: PolicyVersion,
        source: WeightSource,
        probe: Probe | None = None,
        *,
        parent: PolicyVersion | None = None,
    ) -> Publication:
        """Send the weights that `source` holds now. Returns once they may change; what follows is in the background.

        The same version with the same weights again is the same update. Raises, on all ranks: CopyFailed;
        PushFailed (`nccl`, where the weights have been sent when this returns).
        """
        started = time.monotonic()
        while True:
            publication = self._post(version, source, probe, parent)
            if self._transport.carry(publication, source):
                publication.copy_s = time.monotonic() - started
                return publication

    def _post(
        self, version: PolicyVersion, source: WeightSource, probe: Probe | None, parent: PolicyVersion | None
    ) -> Publication:
        staged = self._transport.stage(version, source, full=self._exchange.is_first and self._wants_full())
        spec = UpdateSpec(
            run_id=self._run_id,
            policy=self._policy,
            lineage=version.lineage,
            step=version.step,
            parent=str(parent) if parent else None,
            transport=self._transport.name,
            location=staged.location,
            manifest=staged.manifest,
            kv=self._kv,
            probe=probe,
            deadline_s=self._deadline_s,
        )
        publication = self._newest = Publication(spec, staged.folder, staged.bring)
        if self._exchange.is_first:
            if self._thread is None:
                self._thread = _Thread(self._clients)
            self._thread.follow(publication)
        return publication

    def _wants_full(self) -> bool:
        """Whether some worker could not take the next weights by difference. One that refused them gets full copies for a while:
        what is wrong there (a full disk, a release that knows no patches behind a proxy that does not say so) may last."""
        if self._newest is not None and self._newest.patches_refused:
            self._full_left = FULL_AFTER_REFUSAL
            log.warning("the differences of %s were refused: the next pushes are full copies", self._newest.version)
        if self._full_left:
            self._full_left -= 1
            return True
        return not self._takes_patches()

    def wait(self, publication: Publication, timeout_s: float | None = None) -> Update:
        """`Publication.wait`, for all ranks at once: the others wait on gloo, and hear how it ended.

        Raises: PushFailed: refused, or not settled in time.
        """
        return Update.model_validate(self._exchange.first(lambda: publication.wait(timeout_s).model_dump()))

    def close(self) -> None:
        """Stop following. Workers that still lack the newest version go on where the next publisher posts it."""
        self._transport.close()  # first: the thread is waited for, and may be in the middle of an upload
        if self._thread is not None:
            self._thread.close()
            self._thread = None


class _Thread:
    """An event loop in a thread of its own, which follows the newest publication and no other."""

    def __init__(self, clients: Sequence[UpdateClient]) -> None:
        self._clients = clients
        self._loop = asyncio.new_event_loop()
        self._newest: asyncio.Queue[Publication | None] = asyncio.Queue()
        self._thread = threading.Thread(target=self._run, name="steno-publisher", daemon=True)
        self._thread.start()

    def follow(self, publication: Publication) -> None:
        self._loop.call_soon_threadsafe(self._newest.put_nowait, publication)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._newest.put_nowait, None)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        async with contextlib.AsyncExitStack() as closing:
            for client in self._clients:
                if isinstance(client, contextlib.AbstractAsyncContextManager):
                    await closing.enter_async_context(client)
            following: asyncio.Task[None] | None = None
            current: Publication | None = None
            while True:
                publication = await self._newest.get()
                if following is not None:
                    await _ended(following)
                if current is not None and not current.settled:
                    current.refuse(PushFailed("replaced by a newer update"))
                if publication is None:
                    return
                current = publication
                following = asyncio.create_task(_follow(Follower(publication, self._clients), publication))


async def _follow(follower: Follower, publication: Publication) -> None:
    try:
        await follower.run()
    except Exception as error:
        log.exception("stopped following update %s", publication.version)
        publication.refuse(PushFailed(f"{type(error).__name__}: {error}"))


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
