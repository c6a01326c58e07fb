"""Open sessions in this process: reads their trees, commits their turns, ends them at their limits. An LRU cache.

A `Recording` is one session's tree, brought up to date from the tail of its index rows at each request, so that any replica can
serve any turn. It is a cache: bounded in bytes, dropped and rebuilt at will, while the store holds the truth. Recognition
itself is `steno_proxy/sessions/`; what is done with a plan is `steno_proxy/turns/service.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

import msgspec

from steno.contracts.chat import Message
from steno.contracts.errors import BudgetSpent, Conflict, Gone, NotFound, ReplayDiverged, StenoError, StoreUnavailable
from steno.contracts.records import OPEN, IndexRow, Session, Turn
from steno_proxy import metrics
from steno_proxy.auth.keys import check_generation
from steno_proxy.session_cache.fork_origins import ForkOrigins
from steno_proxy.session_cache.path_cache import LEAST_BYTES, PathCache
from steno_proxy.session_cache.session_state import AnswerSoFar, Recording, RunningRequest
from steno_proxy.session_cache.store_capacity import StoreCapacity
from steno_proxy.sessions import limits
from steno_proxy.sessions.messages.normalise import DIGEST_BYTES, message_digest
from steno_proxy.sessions.tree import Tree
from steno_proxy.store.interface import ParentLost, RecordedOtherwise, RetryKey, SessionStore, SessionTail, TokenPath
from steno_proxy.tracing.traces import Traces

log = logging.getLogger(__name__)

OF_TIME = ("max_wall_s", "max_idle_s")
"""Limits that are spent by a clock."""
FREEZE_WAIT_S = 10.0
"""How long completing a session waits for its cancelled turns to be recorded. Seconds; commits take milliseconds."""


class Recorder:
    """The recordings of this process, least recently used dropped first. Turns of one trial may run at the same time.

    clock: Unix seconds, for what is recorded; None: the store's.
    traces: what turns and ends are handed over to; None: nothing is traced.
    """

    def __init__(
        self,
        store: SessionStore,
        *,
        cache_bytes: int,
        implicit: bool,
        clock: Callable[[], float] | None = None,
        capacity: StoreCapacity | None = None,
    ) -> None:
        """implicit: register a session on its first use (where auth is off), where there is room for it."""
        self.store = store
        self._cache_bytes = cache_bytes
        self._implicit = implicit
        self._clock = clock or store.clock
        self._capacity = capacity or StoreCapacity(store)
        self._recordings: OrderedDict[str, Recording] = OrderedDict()
        self._bytes = 0
        self._paths = PathCache(max(LEAST_BYTES, cache_bytes // 2))
        self.origins = ForkOrigins(store)
        self._accounting: set[asyncio.Task[None]] = set()
        self.traces: Traces | None = None

    async def enter(self, trial_id: str, *, again: bool = False, shown: int | None = None) -> Recording:
        """The session's recording, up to date, open for one more turn. again: it may be a retry that makes no new turn, so limits
        are not checked; call `check` before a new turn.
        shown: the generation of the key that the agent shows; None where no key is asked for.

        Raises: Forbidden (a key that has been rotated away), NotFound, Gone (completed or deleted), BudgetSpent (and the
            session has ended), StoreUnavailable.
        """
        recording = await self._refresh(trial_id)
        session = recording.session
        assert session is not None
        check_generation(shown, session.key_generation)
        if session.status != "open":
            raise Gone(f"the session has ended ({session.end_reason or session.status})")
        if session.rescore_of is not None:
            raise Gone("this trial is a recorded one that steno rescore scores again; it takes no model calls")
        if not again:
            await self.check(recording)
        return recording

    async def check(self, recording: Recording) -> None:
        """Check the trial's limits. Raises: BudgetSpent: a limit is spent, and the session has ended; it has not if the limit is
        `max_turns` and a turn on record may still run. StoreUnavailable: the store is asked for its time, if a limit of time
        seems to be spent."""
        session, now = recording.session, self._clock()
        assert session is not None
        spent = limits.spent(session.limits, session, now, busy=recording.in_use)
        if spent in OF_TIME:
            earliest, session = await self.store.earliest(), recording.session
            assert session is not None
            spent = limits.spent(session.limits, session, earliest, busy=recording.in_use)
        if spent == "max_turns" and recording.has_open(now):
            raise limits.used_up_by_running(spent)
        if spent is not None:
            raise await self.end(recording.trial_id, spent)

    async def end(self, trial_id: str, spent: str) -> BudgetSpent:
        """A limit is spent: the session ends, and what runs is kept as partial turns. Idempotent. Returns what agents are told.

        Raises: Gone (it has ended otherwise), NotFound, StoreUnavailable.
        """
        reason, told = f"limit:{spent}", BudgetSpent(f"this trial has reached its limit {spent}; the session has ended")
        try:
            session = await self.store.complete(
                trial_id, status="completed", reward=None, end_reason=reason, metrics={}, now=self._clock(), final=False
            )
        except Conflict:
            raise Gone("the session has ended") from None
        if recording := self._recordings.get(trial_id):
            recording.session = session
        log.info("session %s ended: %s", trial_id, reason)
        if self.traces is not None:
            self.traces.ended(session)
        task = asyncio.create_task(self._account_for(trial_id, self.abort(trial_id, told)))
        self._accounting.add(task)
        task.add_done_callback(self._accounting.discard)
        return told

    async def diverged(self, trial_id: str, told: ReplayDiverged) -> None:
        """A forked trial has asked what its origin was not asked: it is given up, and what runs is kept as partial turns.
        Idempotent.

        Raises: NotFound, StoreUnavailable."""
        try:
            session = await self.store.complete(
                trial_id, status="aborted", reward=None, end_reason=told.code, metrics={}, now=self._clock()
            )
        except (Conflict, Gone):
            return
        if recording := self._recordings.get(trial_id):
            recording.session = session
        log.info("session %s ended: %s", trial_id, told.code)
        if self.traces is not None:
            self.traces.ended(session)
        task = asyncio.create_task(self._account_for(trial_id, self.abort(trial_id, told)))
        self._accounting.add(task)
        task.add_done_callback(self._accounting.discard)

    async def _account_for(self, trial_id: str, running: list[RunningRequest]) -> None:
        """Account for an ended session once its running requests are recorded. If that fails, the store's sweep does it later."""
        await self.settle(running)
        try:
            await self.store.settle(trial_id, now=self._clock())
        except StoreUnavailable as error:
            metrics.STORE_ERRORS.labels("settle").inc()
            log.warning("can't account for session %s yet, will try again: %s", trial_id, error.message)

    async def close(self) -> None:
        """Wait until sessions that have just ended are accounted for, within FREEZE_WAIT_S. Call it before closing the store."""
        if self._accounting:
            await asyncio.wait(self._accounting)

    async def end_timed_out(self, *, now: float | None = None) -> int:
        """End the open sessions whose wall or idle time is over though no agent asks: somebody may wait for them. Returns how
        many. Any replica may do it; a turn that runs at another one does not keep a session from being idle.

        Args: now: Unix seconds; None: by `clock`."""
        ended, at = 0, self._clock() if now is None else now
        async for session in self.store.due(now=at):
            recording = self._recordings.get(session.trial_id)
            busy = recording is not None and recording.in_use
            spent = limits.timed_out(session.limits, session, at, busy=busy)
            if spent is None:
                continue
            try:
                await self.end(session.trial_id, spent)
            except (Gone, NotFound):
                continue  # somebody was faster
            ended += 1
        return ended

    async def look(self, trial_id: str) -> Recording:
        """The session's recording, up to date, to be read: also of one that has ended, and never registering one.

        Raises: NotFound, Gone (deleted), StoreUnavailable.
        """
        await self.store.session(trial_id)
        return await self._refresh(trial_id)

    async def _refresh(self, trial_id: str) -> Recording:
        """Read the rows that the recording lacks, and return it; one round trip to the store, unless something has changed. The
        last known row is read again: it shows whether the store still has what is known here."""
        while True:
            recording = self._recordings.get(trial_id) or Recording(trial_id)
            tree, known, start = recording.tree, recording.turns, recording.unread(self._clock())
            first = max(start - 1, 0)
            session, rows = await self._tail(trial_id, first, known=start - first)
            current = self._recordings.get(trial_id, recording)
            if current is not recording or recording.tree is not tree:
                continue  # another request came first, with a tree of its own: use that
            if recording.session is not None and recording.session.created_at != session.created_at:
                self.forget(trial_id)  # deleted, and its id is in use again: nothing of this tree holds
                continue
            if (lost := recording.lost(first, known, rows)) >= 0:
                self._reread(recording, f"turn {tree.ids[lost]}, number {lost}, is not on record any more")
                continue
            rows = rows[start - first :]
            self._recordings[trial_id] = recording
            recording.session = session
            if recording.open_elsewhere and recording.outdated(start, rows):
                recording.reset()  # rare: a turn of a replica that this one saw while it was open
                continue
            if recording.open_here and recording.ended_unseen(rows[recording.turns - start :]):
                recording.reset()  # rare: what goes on from such a turn stands after its reply, which is not in this tree
                continue
            # Another request may have added rows while this one waited: the list only ever grows at its end.
            for row in rows[recording.turns - start :]:
                recording.add(row, self._clock())
            self._account(recording)
            self._recordings.move_to_end(trial_id)
            self._evict()
            return recording

    def _reread(self, recording: Recording, why: str) -> None:
        """The store has lost what it had confirmed (docs/operations.md): nothing of this tree holds."""
        words = "session %s: %s: the store has lost what it had confirmed; the session is read again from what is left"
        log.error(words, recording.trial_id, why)
        recording.reset()
        if not (recording.in_use or recording.passed_fork):
            self.forget(recording.trial_id)

    async def path(self, recording: Recording, number: int, tree: Tree) -> TokenPath:
        """The tokens of the conversation that a turn ends, and its reply.

        Args: tree: that `number` is of; the recording's may be read again meanwhile.
        Raises: NotFound, Gone, StoreUnavailable.
        """
        assert recording.session is not None
        held = self._paths.get(recording.trial_id, recording.session.created_at, tree.ids[number])
        return held or await self.store.path(recording.trial_id, tree.path(number))

    async def reply(self, recording: Recording, number: int, tree: Tree) -> Message:
        """What a turn said. Args, raises: as `path`."""
        assert recording.session is not None
        held = self._paths.reply(recording.trial_id, recording.session.created_at, tree.ids[number])
        if held is not None:
            return held
        return (await self.store.path(recording.trial_id, [number])).reply  # of the path, this turn's own tokens only

    def keep_path(self, recording: Recording, turn_id: str, path: TokenPath, parent_id: str | None) -> None:
        """Keep what `path` will return for a turn that was committed here, whole. parent_id: the turn that it goes on from."""
        assert recording.session is not None
        self._paths.put(recording.trial_id, recording.session.created_at, turn_id, path, parent_id)

    async def _tail(self, trial_id: str, start: int, *, known: int = 0) -> SessionTail:
        try:
            return await self.store.tail(trial_id, start, known=known)
        except NotFound:
            self.forget(trial_id)
            if not self._implicit:
                raise
            await self._capacity.check()
            now = self._clock()
            await self.store.register(Session(trial_id=trial_id, created_at=now, updated_at=now))
            log.info("session registered on first use")
            return await self.store.tail(trial_id, 0)
        except Gone:
            self.forget(trial_id)
            raise
        except StoreUnavailable:
            metrics.STORE_ERRORS.labels("tail").inc()
            raise

    def _account(self, recording: Recording) -> None:
        self._bytes += recording.recount()

    def _evict(self) -> None:
        excess = self._bytes - self._cache_bytes
        if excess <= 0:
            return
        old: list[str] = []
        for trial_id, recording in islice(self._recordings.items(), len(self._recordings) - 1):
            if excess <= 0:
                break
            if not recording.in_use:
                excess -= recording.cost_bytes
                old.append(trial_id)
        for trial_id in old:
            self.forget(trial_id)

    def forget(self, trial_id: str) -> None:
        """Drop what the process remembers of a session; the store is not touched."""
        recording = self._recordings.pop(trial_id, None)
        if recording is not None:
            self._bytes -= recording.cost_bytes
            recording.cost_bytes = 0  # a request that waits for the store may bring it back

    async def commit(self, recording: Recording, turn: Turn, row: IndexRow, retry_key: RetryKey | None = None) -> int:
        """Make a turn durable (I3), whole or still open. When this returns, the event that waits for it may leave.

        Args: retry_key: as `SessionStore.commit`.

        Raises: Gone (deleted; or frozen, and the turn is not partial), RecordedOtherwise, StoreUnavailable (ParentLost).
        """
        began = time.perf_counter()
        if row.finish == OPEN:
            recording.open_here.setdefault(row.turn_id, -1)
        try:
            number = await self.store.commit(recording.trial_id, turn, row, now=self._clock(), retry_key=retry_key)
        except StoreUnavailable as error:
            metrics.STORE_ERRORS.labels("commit").inc()
            if isinstance(error, ParentLost):
                self._reread(recording, error.message)
            raise
        except RecordedOtherwise:
            recording.open_here.pop(row.turn_id, None)
            recording.reset()
            raise
        metrics.COMMIT.observe(time.perf_counter() - began)
        if recording.contradicts(number, row.turn_id):
            if row.finish != OPEN:
                recording.open_here.pop(row.turn_id, None)
            self._reread(recording, f"turn {row.turn_id} came on record as number {number}")
        elif row.finish != OPEN:
            recording.ended(number, row, self._clock())
        elif number == recording.turns:
            recording.add(row, self._clock())
        if self._recordings.get(recording.trial_id) is recording:
            self._account(recording)
        return number

    async def seal(self, recording: Recording, number: int) -> None:
        """A request goes on from a turn that is open on record: its proxy is dead, or does not know yet that its client has left.
        It is a cancelled turn from now on, and what its proxy may still commit of it changes nothing, since what goes on from it
        begins with its ids as they are. The recording is up to date afterwards, also if its proxy was faster.

        Raises: NotFound, Gone, StoreUnavailable.
        """
        trial_id, turn_id = recording.trial_id, recording.tree.ids[number]
        rows = (await self.store.tail(trial_id, number)).rows
        turns = await self.store.turns(trial_id, start=number, limit=1)
        for row, turn in zip(rows, turns, strict=False):  # none, or others, where the store has lost it
            if (row.turn_id, turn.turn_id) != (turn_id, turn_id):
                break
            if row.finish == OPEN and _are_of_one_commit(row, turn):
                error = "proxy_lost: the client went on before the end of this turn was recorded"
                sealed = turn.model_copy(update={"finish_reason": "cancelled", "error": error})
                ended = msgspec.structs.replace(row, finish="cancelled")
                with contextlib.suppress(RecordedOtherwise):
                    await self.store.commit(trial_id, sealed, ended, now=self._clock())
        recording.reset()
        session, rows = await self._tail(trial_id, 0)
        if not recording.turns:
            recording.session = session
            for row in rows:
                recording.add(row, self._clock())

    def give_up(self, recording: Recording, turn_id: str) -> None:
        """A turn that runs here has ended, and could not be committed: what is on record of it, if anything, is all there is."""
        if recording.open_here.pop(turn_id, None) is not None:
            recording.reset()

    # -- what others do to running turns

    def abort(self, trial_id: str, error: StenoError) -> list[RunningRequest]:
        """Stop the session's turns in flight here; they are kept as partial ones. Returns them."""
        recording = self._recordings.get(trial_id)
        running = list(recording.in_flight) if recording else []
        for request in running:
            request.abort(error)
        return running

    def under_way(self, trial_id: str, most: int) -> list[AnswerSoFar]:
        """The session's answers that are being sampled here, the newest last. Others may be at other replicas."""
        recording = self._recordings.get(trial_id)
        running = recording.in_flight if recording else ()
        found = [answer for request in list(running) for answer in request.under_way(most)]
        return sorted(found, key=lambda answer: answer.queued)

    async def settle(self, running: list[RunningRequest]) -> None:
        """Wait until these turns are recorded, within reason."""
        waits = [asyncio.ensure_future(request.done.wait()) for request in running]
        if not waits:
            return
        _, late = await asyncio.wait(waits, timeout=FREEZE_WAIT_S)
        for wait in late:
            wait.cancel()
        if late:
            log.warning("%d turns are still not recorded, %.0f s after they were cancelled", len(late), FREEZE_WAIT_S)

    def refused(self, trial_id: str, error: StenoError) -> None:
        """Trace a request that was refused with nothing on record, if its session is known here."""
        recording = self._recordings.get(trial_id)
        if self.traces is not None and recording is not None and recording.session is not None:
            self.traces.refused(recording.session, error, self._clock())

    def trees(self) -> tuple[int, int]:
        """How many recordings are in memory, and their bytes, about."""
        return len(self._recordings), self._bytes


def _are_of_one_commit(row: IndexRow, turn: Turn) -> bool:
    """Whether an open turn and its row, which were read one after the other, are of the same commit: it may have grown between.
    What grew without a count (text alone) has another reply."""
    counted = turn.completion_tokens == (row.completion_tokens or 0)
    return counted and row.digests[-DIGEST_BYTES:] == message_digest(turn.reply)
