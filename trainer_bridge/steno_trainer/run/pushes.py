"""The pushes of a run, one at a time: weights are handed over, travel while training goes on, and are served. The push's groups,
those that its weights are the first to be trained on, are let go of only after that."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from steno.contracts.errors import Superseded
from steno_trainer.distributed.collective_calls import CollectiveCalls
from steno_trainer.errors import PushFailed
from steno_trainer.reporting.console import ConsoleView
from steno_trainer.run.ending import Ending
from steno_trainer.run.training_state import TrainingState
from steno_trainer.weights.publication import Publication

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""Between looks at how far a push is."""
SETTLING_S = 60.0
"""Added to `push_deadline_s`: time for the proxy to name the workers that have not loaded a push by then."""


class Pushes:
    """Args: deadline_s: how long a worker may take to load a push. unserved: groups whose weights no worker serves, as far as is
    known. let_go: called with these groups once a worker serves their weights."""

    def __init__(
        self, calls: CollectiveCalls, state: TrainingState, view: ConsoleView, ending: Ending, *, deadline_s: float,
        unserved: Callable[[], list[str]], let_go: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._calls, self._state, self._view, self._ending = calls, state, view, ending
        self._deadline_s = deadline_s
        self._unserved, self._let_go = unserved, let_go
        self._pushing: asyncio.Task[None] | None = None
        # Each waits for one push to be served, and lets go of its groups.
        self._serving: set[asyncio.Task[None]] = set()
        self._numbers: dict[str, float] = {}
        self._newest: Publication | None = None
        self.sends_whole = False
        """Whether the push that is being handed over is a full copy, in place of a push by difference that no worker took."""

    @property
    def served(self) -> bool:
        """Whether a worker serves the newest weights that were handed over."""
        return self._newest is not None and self._newest.served

    def numbers(self) -> dict[str, float]:
        """Metrics of the newest push that was done since the last call; empty: none was."""
        numbers, self._numbers = self._numbers, {}
        return numbers

    async def first(self) -> None:
        """Push the weights before any data is waited for: a broken path to the workers fails here, and not after an hour.

        Raises: PushFailed: no worker takes them."""
        self._view.phase("pushing the first weights")
        await self.publish()
        await self.over()
        if not self.numbers() and not self._ending.wanted.is_set():
            assert self._newest is not None
            why = "".join(f"; worker {worker_id}: {reason}" for worker_id, reason in self._newest.failed.items())
            raise PushFailed(f"no worker serves {self._state.version}: its update is {self._newest.outcome}{why}")

    async def publish(self) -> float:
        """Hand the weights over; they travel in the background. Returns: seconds for which training stood still."""
        await self.over()
        self._ending.check()
        started = time.monotonic()
        self._view.phase("handing the weights over")
        publication: Publication = await self._calls.do("publish", self._state.version)
        self._newest = publication
        serving = asyncio.create_task(self._let_go_once_served(publication, self._unserved()))
        self._serving.add(serving)
        serving.add_done_callback(self._served)
        self._pushing = asyncio.create_task(self._follow(publication))
        return time.monotonic() - started

    async def send_whole(self) -> None:
        """Send the newest weights as a full copy, if no worker could take them by difference. Called while the loop waits for
        groups or before an evaluation, when the model still holds the weights of that version."""
        if self._pushing is not None:
            await asyncio.wait({self._pushing})
        if self._newest is None or self._newest.served or not self._newest.patches_refused:
            return
        logger.warning("no worker took %s by difference: a full copy is sent", self._newest.version)
        self.sends_whole = True
        try:
            await self.publish()
        finally:
            self.sends_whole = False

    async def over(self) -> None:
        """Wait until the newest push has ended, well or not. Raises: Superseded."""
        if self._pushing is not None:
            pushing, self._pushing = self._pushing, None
            await self._ending.patiently(pushing)

    async def finish(self) -> None:
        """The last push is over, and nobody waits any longer for one that no worker serves."""
        await self.over()
        self._newest = None
        await self._ending.patiently(asyncio.gather(*self._serving))

    async def _let_go_once_served(self, publication: Publication, groups: Sequence[str]) -> None:
        """Args: groups: those that these weights are the first to be trained on. If no worker takes the push, it is posted again,
        or a newer push comes, which has these groups too. The groups are held until a worker serves it: trials that began before
        would be older than admission expects."""
        while not publication.served:
            if publication is not self._newest:
                return
            await asyncio.sleep(LOOK_S)
        await self._let_go(groups)

    def _served(self, task: asyncio.Task[None]) -> None:
        """An acknowledgement that failed for good ends the run, whichever push it was of."""
        self._serving.discard(task)
        self._ending.ended(task)

    async def _follow(self, publication: Publication) -> None:
        self._view.push(f"pushing {publication.version}")
        await self._settled(publication)
        try:
            update = publication.wait(0.0)
        except (PushFailed, TimeoutError) as error:
            if isinstance(error.__cause__, Superseded):
                raise error.__cause__ from None
            logger.warning("weights: %s", error)
            self._view.push(f"{publication.version} was not taken: {error}")
            return
        pauses = [worker.pause_s for worker in update.workers if worker.pause_s is not None]
        if update.state == "done":
            self._numbers = {"time/push_s": publication.push_s or 0.0, "time/pause_s": max(pauses, default=0.0)}
        for worker_id, why in publication.failed.items():
            logger.warning("worker %s does not serve %s: %s", worker_id, publication.version, why)
        served = sum(worker.state == "served" for worker in update.workers)
        self._view.push(f"{publication.version} is served by {served} of {len(update.workers)} workers")

    async def _settled(self, publication: Publication) -> None:
        """Wait until it is settled, at most as long as workers have to load it. Uploads to an object store do not count."""
        patience_s = self._deadline_s + SETTLING_S
        started = said = seen = time.monotonic()
        waited_s, uploading = 0.0, publication.uploading
        while not publication.settled and waited_s < patience_s:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            # At neither look: between them this process may have stood still.
            if not (uploading or publication.uploading):
                waited_s += now - seen
            elif now - said >= patience_s:
                said = now
                logger.warning("weights: %s is still being uploaded after %.0f s", publication.version, now - started)
            seen, uploading = now, publication.uploading
