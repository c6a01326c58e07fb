"""Completed groups on their way from the proxy into steps: leased ahead, read while a step runs, given back when they must be.

Owns the leases of one trainer and what is read for them; decides nothing about training. A group is held from its lease until
it is acknowledged, which is after the step that used it is durable (`LeaseFeed.acknowledge`), or released.

Leases can be lost, so the proxy may serve a group again while it is here. The group is then held under its new lease, and nothing
else changes: it is trained once, and acknowledged no earlier than its step is durable. If the checkpoint says that a served group
was trained, its acknowledgement was lost: it is acknowledged at once, and not trained again. The same goes for a group whose
acknowledgement the proxy had confirmed, and Redis has lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableSet
from dataclasses import dataclass, field
from typing import Self

from steno.client.client import AsyncClient
from steno.contracts.errors import Conflict, Gone, NotFound, StenoError, Superseded
from steno.contracts.records import Sample
from steno.contracts.runs.leases import MOST_LEASES, Lease, LeaseRequest
from steno_trainer.data.ledger import Ledger, Reason, book_missing

logger = logging.getLogger(__name__)

POLL_S = 20.0
"""How long one request waits for groups: short of what load balancers cut."""
SAY_AGAIN_S = 300.0
"""Seconds between two log messages that the trainer waits for groups."""
EXTENDED_AT_ONCE = 16
"""Leases that are extended at the same time: extending hundreds one by one may take longer than a lease lasts."""
READERS = 8
"""Sessions that are read at the same time."""
GIVE_BACK_S = 5.0
"""Longest time to give back, at the end, what is held: the proxy may be away, and the operator waits."""
MOST_ACKNOWLEDGED = 10_000
"""Groups that are remembered after the proxy has confirmed that it is done with them."""
AGAIN_S = 2.0
"""Pause after a request for leases that failed and may be repeated: the proxy may be restarting."""


@dataclass(frozen=True)
class LeasedGroup:
    """A group as it was served. samples: of all trials that can be trained, by session and in commit order of the leaves.

    books: what these trials sampled (as the lease says) and what of it no sample holds: a ledger of its own, so that a group
    that is given back leaves no trace.
    """

    lease: Lease
    samples: list[Sample]
    books: Ledger = field(default_factory=Ledger)

    @property
    def group_id(self) -> str:
        return self.lease.group.group_id


class LeaseFeed:
    """Groups of one run, oldest first. Use as a context manager: leaving gives back what is held.

    Args:
        consumer: names this trainer to operators.
        ahead: most groups held and not yet taken; as many more may be held that do not count.
        counts: whether a step waits for a group (DAPO's dynamic sampling). A group that does not count is reported to the proxy
            as used at once, so that another one is rolled out in its place; the next `take` returns it.
        trained: groups whose step is in the run's state; one is removed once the proxy has confirmed its acknowledgement.
        acknowledged: the newest groups so removed -> when each was created: the proxy's Redis may still lose that confirmation.
        ttl_s: of leases; extended at a third of it, so that two lost requests cost nothing.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        run_id: str | None,
        consumer: str,
        ahead: int,
        trained: MutableSet[str] | None = None,
        acknowledged: dict[str, float] | None = None,
        ttl_s: float = 600.0,
        counts: Callable[[Lease], bool] = lambda lease: True,
    ) -> None:
        self._client = client
        self._run_id, self._consumer, self._ttl_s = run_id, consumer, ttl_s
        self._ahead, self._counts = ahead, counts
        self._trained: MutableSet[str] = trained if trained is not None else set()
        self._acknowledged: dict[str, float] = acknowledged if acknowledged is not None else {}
        self._taken: dict[str, bool] = {}  # by a step that is not durable yet -> whether it has used them
        self._waiting: deque[LeasedGroup] = deque()
        self._aside: list[LeasedGroup] = []  # what does not count
        self._held: dict[str, Lease] = {}
        self._asked: LeaseRequest | None = None  # the answer has not come, or has not all been taken in
        self._changed = asyncio.Condition()
        self._no_more = False
        self._readers = asyncio.Semaphore(READERS)
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._pull()), asyncio.create_task(self._keep())]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await self._learn_what_was_leased()
                await asyncio.gather(*map(self._give_back, list(self._held)))
        except TimeoutError:
            logger.warning(
                "the proxy does not answer: groups that are still leased are served again when their leases end"
            )

    @property
    def waiting(self) -> int:
        """Groups that could be taken now."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Groups under lease, taken ones included."""
        return len(self._held)

    @property
    def settled(self) -> bool:
        """Whether all that is held can be taken, or was: nothing is being read."""
        return self._held.keys() <= self._taken.keys() | {leased.group_id for leased in self._waiting}

    async def no_more(self) -> None:
        """No more groups will come: a waiting `take` returns the groups that are here, perhaps none."""
        async with self._changed:
            self._no_more = True
            self._changed.notify_all()

    async def take(self, groups: int, *, at_least: int | None = None, wait_s: float | None = None) -> list[LeasedGroup]:
        """Wait for `groups` groups that count; return the oldest of them, and all that do not count. If `groups` that do not
        count are here first, return those alone. All stay held until they are acknowledged.

        at_least: after `wait_s`, this many are enough (default: `groups`, and only `no_more` ends the wait).
        Raises: StenoError: what ended the leasing for good (a key that opens nothing, say).
        """

        def there(enough: int) -> bool:
            here = len(self._waiting) >= enough or len(self._aside) >= groups
            return here or self._no_more or self._failure is not None

        enough, self._no_more = groups, False
        async with self._changed:
            try:
                async with asyncio.timeout(wait_s if at_least is not None else None):
                    await self._changed.wait_for(lambda: there(groups))
            except TimeoutError:
                enough = at_least or 0
                await self._changed.wait_for(lambda: there(enough))
            if self._failure is not None:
                raise self._failure
            taken, self._aside = self._aside, []
            if len(self._waiting) >= enough or self._no_more:
                taken += [self._waiting.popleft() for _ in range(min(groups, len(self._waiting)))]
            self._taken = dict.fromkeys((leased.group_id for leased in taken), False) | self._taken
            self._changed.notify_all()
            return taken

    async def acknowledge(self, group_ids: Iterable[str]) -> None:
        """Acknowledge groups whose steps are durable. A group whose lease was lost is acknowledged as soon as it is served
        again."""
        for group_id in group_ids:
            self._taken.pop(group_id, None)
            lease = self._held.pop(group_id, None)
            if lease is None:
                logger.warning(
                    "group %s: its lease was lost before its step was saved: it is acknowledged when it is served again",
                    group_id,
                )
            else:
                await self._acknowledge(lease)

    async def used(self, group_ids: Iterable[str]) -> None:
        """A step has used these groups, and is not durable yet: others may be started in their place."""
        for group_id in group_ids:
            if group_id not in self._taken:
                continue
            self._taken[group_id] = True
            if (lease := self._held.get(group_id)) is not None:
                await self._extend(group_id, lease)

    # -- leasing

    async def _pull(self) -> None:
        said_at = -SAY_AGAIN_S
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: max(len(self._waiting), len(self._aside)) < self._ahead)
                room = min(self._ahead - len(self._waiting), MOST_LEASES)
            if self._asked is None:  # else its answer was lost: the same request brings the same leases
                self._asked = LeaseRequest(
                    run_id=self._run_id, consumer=self._consumer, max_groups=room, wait_s=POLL_S, ttl_s=self._ttl_s,
                    request_id=uuid.uuid4().hex,
                )  # fmt: skip
            try:
                leases = await self._client.lease(self._asked)
            except StenoError as error:
                if not error.retryable:
                    raise
                logger.warning("can't lease groups now, trying again: %s", error)
                await asyncio.sleep(AGAIN_S)
                continue
            if not leases and time.monotonic() >= said_at + SAY_AGAIN_S:
                said_at = time.monotonic()
                here = "no group is ready"
                if held := len(self._waiting):
                    here = f"has {held} of the {self._ahead} groups of a step (groups_per_step, the same for `steno rollout`)"
                words = "run %s: %s, waiting; `steno rollout` makes them, `steno runs show` says where they are"
                logger.info(words, self._run_id, here)
            for lease in leases:
                await self._receive(lease)
            self._asked = None

    async def _learn_what_was_leased(self) -> None:
        """At exit, ask which leases an unanswered request was granted, so that they are given back too."""
        if self._asked is None:
            return
        try:
            leases = await self._client.lease(self._asked.model_copy(update={"max_groups": 0, "wait_s": 0.0}))
        except StenoError as error:
            logger.warning(
                "can't ask which groups were leased last, they are served again when their leases end: %s", error
            )
            return
        self._held |= {lease.group.group_id: lease for lease in leases}

    async def _receive(self, lease: Lease) -> None:
        group_id = lease.group.group_id
        if group_id in self._taken or any(leased.group_id == group_id for leased in self._waiting):
            logger.info("group %s was served again while this trainer has it: keeping the new lease", group_id)
            self._held[group_id] = lease
            await self._extend(group_id, lease)
            return
        if group_id in self._trained:
            logger.info("group %s was trained before: acknowledged", group_id)
            await self._acknowledge(lease)
            return
        if self._acknowledged.get(group_id) == lease.group.created_at:  # one that was made since then is another one
            words = "group %s was trained and acknowledged, and the proxy's Redis has forgotten it: acknowledged again"
            logger.warning(words, group_id)
            await self._acknowledge(lease)
            return
        self._held[group_id] = lease
        try:
            leased = await self._read(lease)
        except StenoError as error:
            if not error.retryable:
                raise
            logger.warning("can't read group %s, giving it back: %s", group_id, error)
            await self._give_back(group_id)
            return
        async with self._changed:
            if group_id not in self._held:  # its lease may have been lost while it was read
                return
            if counts := self._counts(lease):
                self._waiting.append(leased)
            else:
                self._aside.append(leased)
                self._taken[group_id] = True
            self._changed.notify_all()
        if not counts:
            await self._extend(group_id, lease)

    async def _read(self, lease: Lease) -> LeasedGroup:
        books = Ledger()
        for tokens in lease.tokens.values():
            for version, count in tokens.items():
                books.sampled(version, count)
        trained = [trial.trial_id for trial in lease.trials]
        read = await asyncio.gather(*(self._session(trial_id, lease.tokens[trial_id], books) for trial_id in trained))
        for trial_id in lease.tokens.keys() - set(trained):
            _book_deleted(lease.tokens[trial_id], books)
        return LeasedGroup(lease, [sample for samples in read for sample in samples], books)

    async def _session(self, trial_id: str, tokens: Mapping[str, int], books: Ledger) -> list[Sample]:
        async with self._readers:
            try:
                found = await self._client.sample_list(trial_id)
                samples, unreadable = found.items, {turn.turn_id for turn in found.unreadable}
                held = sum(part.end - part.start for s in samples for part in s.completions if not part.shared)
                # Only tokens of superseded or unreadable turns may be in no sample. Their versions are in the turns, which are
                # read only in this case.
                if held != sum(tokens.values()):
                    book_missing([turn async for turn in self._client.turns(trial_id)], samples, unreadable, books)
                for turn in found.unreadable:
                    words = "trial %s, turn %s: %d tokens are not trained, because the record can't be read: %s"
                    logger.warning(words, trial_id, turn.turn_id, turn.completion_tokens, turn.reason)
                return samples
            except (Gone, NotFound):
                logger.warning("trial %s was deleted while its group was leased", trial_id)
                _book_deleted(tokens, books)
                return []

    async def _keep(self) -> None:
        """Extend what is held, in time."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            held = list(self._held.items())
            for start in range(0, len(held), EXTENDED_AT_ONCE):
                await asyncio.gather(*(self._extend(*one) for one in held[start : start + EXTENDED_AT_ONCE]))

    async def _extend(self, group_id: str, lease: Lease) -> None:
        try:
            await self._client.extend(lease.lease_id, self._ttl_s, used=self._taken.get(group_id, False))
        except Superseded:  # another trainer has the run: there is nothing left to do here
            raise
        except (Conflict, NotFound, Gone):
            await self._lost(group_id, lease)
        except StenoError as error:
            if not error.retryable:
                raise
            logger.warning("can't extend the lease of group %s now, trying again: %s", group_id, error)

    async def _lost(self, group_id: str, lease: Lease) -> None:
        async with self._changed:
            if self._held.get(group_id) is not lease:  # it was acknowledged, or served again, while this was asked
                return
            logger.warning("group %s: its lease was lost", group_id)
            del self._held[group_id]
            self._waiting = deque(leased for leased in self._waiting if leased.group_id != group_id)
            self._changed.notify_all()

    async def _acknowledge(self, lease: Lease) -> None:
        group_id = lease.group.group_id
        try:
            await self._client.acknowledge(lease.lease_id)
        except StenoError as error:
            lost = isinstance(error, Conflict | NotFound | Gone) and not isinstance(error, Superseded)
            if not error.retryable and not lost:
                raise
            logger.warning("can't acknowledge group %s, it will be served again: %s", group_id, error)
        else:
            self._acknowledged.pop(group_id, None)  # it is the newest now
            self._acknowledged[group_id] = lease.group.created_at
            self._trained.discard(group_id)  # not before: it may be saved at any time, by another thread
            while len(self._acknowledged) > MOST_ACKNOWLEDGED:
                del self._acknowledged[next(iter(self._acknowledged))]

    async def _give_back(self, group_id: str) -> None:
        lease = self._held.pop(group_id, None)
        if lease is None:  # lost in the meantime
            return
        try:
            await self._client.release(lease.lease_id)
        except StenoError as error:
            logger.warning("can't release group %s, it is served again when its lease ends: %s", group_id, error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        self._failure = task.exception()
        wake = asyncio.ensure_future(self._wake())
        self._tasks.append(wake)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _book_deleted(tokens: Mapping[str, int], books: Ledger) -> None:
    for version, count in tokens.items():
        books.untrained(version, Reason.DELETED, count)
