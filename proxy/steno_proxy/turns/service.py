"""From an agent's request to what answers it: the beginning of "One turn, start to end" in `docs/architecture.md`.

    enter the session > what an earlier response said > the trial's sampling law > recognise > is it a retry?
    > is it on record at the fork's origin? > open a stream on a worker for each choice

The rest is `request.py`, or, where nothing is to be sampled, `joined.py` and `replay.py`. When this refuses, nothing was sampled
or sent, and no turn is on record, but that of a forked trial that diverges (`forked.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os

import msgspec

from steno.contracts.chat import CanonicalRequest, Job
from steno.contracts.errors import StenoError
from steno.contracts.records import ForkReason
from steno_proxy import metrics
from steno_proxy.dialects.base import Dialect
from steno_proxy.pace import LARGE_BYTES, Pace
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.session_state import Recording
from steno_proxy.sessions import law, limits
from steno_proxy.store.interface import RetryKey
from steno_proxy.turns import forked, retry_matching, stored_responses
from steno_proxy.turns.choice import OpenChoice
from steno_proxy.turns.continuation import check_cut_off, plan
from steno_proxy.turns.interfaces import ABORT_S, ProxyStopping, RunningAnswer, TurnClient
from steno_proxy.turns.replay import Replay
from steno_proxy.turns.request import Request
from steno_proxy.turns.retry_matching import RequestIdentity
from steno_proxy.turns.transcript import ChoiceTranscript
from steno_proxy.turns.turn_record import TurnFacts
from steno_proxy.workers.hub import Hub
from steno_proxy.workers.placement import Order
from steno_proxy.workers.queue import NOT_YET
from steno_proxy.workers.routing import NoTokenizer
from steno_proxy.workers.stream import Stream

log = logging.getLogger(__name__)


class TurnService:
    """Runs requests. One per proxy."""

    def __init__(
        self,
        recorder: Recorder,
        hub: Hub,
        *,
        default_max_tokens: int | None = None,
        pace: Pace | None = None,
    ) -> None:
        """pace: of the process; None: one of its own."""
        self.recorder = recorder
        self.hub = hub
        self.clock = recorder.store.clock
        self.pace = pace or Pace()
        self._default_max_tokens = default_max_tokens
        self._running: set[Request] = set()
        self._draining = False

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, and wait for those in flight; what still runs after `timeout_s` is kept as partial turns.
        Requests that wait for a worker are refused: nothing of them has begun, and another replica has time for them."""
        self._draining = True
        self.hub.waiting.dismiss(_about_to_stop)
        waits = [asyncio.ensure_future(request.done.wait()) for request in self._running]
        if waits:
            log.info("waiting up to %.0f s for %d requests", timeout_s, len(waits))
            await asyncio.wait(waits, timeout=timeout_s)
            for request in list(self._running):
                request.abort(ProxyStopping("the proxy stopped"))
            await asyncio.wait(waits, timeout=2 * ABORT_S)
            for wait in waits:
                wait.cancel()

    async def open(
        self, trial_id: str, dialect: Dialect, asked: CanonicalRequest, client: TurnClient, *, again: int = 0,
        shown: int | None = None,
    ) -> RunningAnswer:  # fmt: skip
        """Make the request ready: its session entered, its place found, its streams open. Then `await` its `run()`.

        Args: again: how often the client says that it has sent this before (`retry_matching.py`).
            shown: the generation of the agent's key.
        Raises: StenoError, with nothing sampled and nothing sent.
        """
        queued = self.clock()
        recording = await self.recorder.enter(trial_id, again=bool(again), shown=shown)
        recording.entering += 1
        try:
            return await self._opened(recording, dialect, asked, client, queued, again)
        finally:
            recording.entering -= 1

    async def _opened(
        self,
        recording: Recording,
        dialect: Dialect,
        asked: CanonicalRequest,
        client: TurnClient,
        queued: float,
        again: int,
    ) -> RunningAnswer:
        trial_id, task_step = recording.trial_id, recording.task_step
        if asked.after or asked.refers:
            await stored_responses.complete(self.recorder, recording, asked)
        job, changed = self._allowed(recording, asked.job, asked.n)
        large = asked.body_bytes >= LARGE_BYTES
        if large:
            await self.pace.turn()
        found = await plan(self.recorder, recording, job, self.pace, merges=asked.merges)
        if asked.prefills:
            running = (one.plan for one in recording.in_flight if isinstance(one, Request))
            check_cut_off(recording.tree, found, running)
        sought = RequestIdentity(asked, found)
        key, superseded = sought.key(trial_id), dict[int, str]()
        if self._draining:
            await self._refused(recording, key, queued, again=bool(again))
            raise _about_to_stop()
        if again and (again := await self._noted(trial_id, sought, key, queued, again)):
            earlier = await self._earlier(recording, dialect, sought, key, client)
            if not isinstance(earlier, dict):
                return earlier
            superseded = earlier
            await self.recorder.check(recording)
        await self._check_room(recording, asked.n)
        session = recording.session
        if session is not None and session.fork_of is not None:
            told = await forked.from_record(
                self.recorder, recording, dialect, asked, found, client, self.clock, task_step
            )
            if isinstance(told, Replay):
                return told
            found = told
        request = Request(self, recording, dialect, found, again=bool(again))
        facts = TurnFacts(asked, changed, queued, request=RetryKey(key, bool(superseded)), task_step=task_step)
        try:
            for index in range(asked.n):
                facts.retry_of = superseded.get(index)
                if large:
                    await self.pace.turn()  # a frame is made of it
                    await self._check_room(recording, asked.n)  # others of its trial may have begun meanwhile
                try:
                    request.choices.append(await self._open(request, index, facts))
                except NoTokenizer:
                    if forked.is_replayed(recording, found):
                        raise  # what a fork samples goes on from its origin's ids, or waits
                    await self._check_room(recording, asked.n)  # it may have waited
                    request.plan = request.plan.rerooted(ForkReason.TOKENIZER_CHANGED)
                    request.choices.append(await self._open(request, index, facts))
            if self._draining:  # it began after the check above, and `drain` does not wait for this request
                raise _about_to_stop()
        except BaseException as error:
            request.let_go()
            for choice in request.choices:
                choice.cut_off("another completion of the request could not be started")
            if isinstance(error, StenoError | asyncio.CancelledError):  # cancelled: its client has left
                await self._refused(recording, key, queued, again=request.again)
            raise
        metrics.STREAMS.inc(asked.n)
        recording.in_flight.add(request)
        self._running.add(request)
        request.begin(client, queued)
        return request

    async def _earlier(
        self, recording: Recording, dialect: Dialect, sought: RequestIdentity, key: bytes, client: TurnClient
    ) -> RunningAnswer | dict[int, str]:
        """What answers a retry: a request that runs, or a recorded answer; or the turns, by choice, that a new one supersedes."""
        trial_id, count = recording.trial_id, metrics.RETRIES.labels
        running = [one for one in recording.in_flight if isinstance(one, Request) and one.key == key]
        for request in sorted(running, key=Request.urgency):
            joined = request.join(sought.asked, client)
            if joined is not None:
                count(dialect.name, "joined").inc()
                return joined
            await request.done.wait()
        # Turns that were recorded after the first `enter` and before `_noted` are seen only now.
        recording = await self.recorder.enter(trial_id, again=True)
        earlier = await retry_matching.on_record(self.recorder, recording, sought, self.clock())
        if earlier is None:
            count(dialect.name, "new").inc()
            return {}
        if earlier.whole:
            count(dialect.name, "replayed").inc()
            turns = [earlier.turns[choice] for choice in range(sought.asked.n)]
            prefix = sought.plan.prefix.ids
            return Replay(self.recorder.store, trial_id, dialect, sought.asked, client, turns, prefix)
        count(dialect.name, "superseded").inc()
        return {choice: turn.turn_id for choice, turn in earlier.turns.items()}

    async def _noted(self, trial_id: str, sought: RequestIdentity, key: bytes, queued: float, again: int) -> int:
        """Note the `again`th retry of a request, before the search for what it repeats. Returns: `again`; 0 if the repeated
        request was refused with nothing on record, so that this one is new.

        Raises: Gone, StoreUnavailable."""
        if await self.recorder.store.asked_again(
            trial_id, key, began=queued, count=again, n=sought.asked.n, now=self.clock()
        ):
            metrics.RETRIES.labels(sought.asked.dialect, "new").inc()
            return 0
        return again

    async def refused(self, request: Request) -> None:
        """The request ended with nothing on record."""
        queued = request.choices[0].facts.queued
        await self._refused(request.recording, request.key, queued, again=request.again)

    async def _refused(self, recording: Recording, key: bytes, queued: float, *, again: bool) -> None:
        """Note that a request left nothing on record, so that its retry is new. Not if it was itself a retry (`again`): its
        first try may be on record. A failure of the store is only counted and logged."""
        if again:
            return
        try:
            await self.recorder.store.refused(recording.trial_id, key, began=queued, now=self.clock())
        except StenoError as error:
            metrics.STORE_ERRORS.labels("refused").inc()
            log.warning("can't record a refused request: %s", error.message)

    def forget(self, request: Request) -> None:
        """The request is answered."""
        self._running.discard(request)

    async def _check_room(self, recording: Recording, n: int) -> None:
        """Raises: BudgetSpent: `n` more turns do not fit beside those in flight; with none in flight the session has ended."""
        session = recording.session
        assert session is not None
        running = sum(request.unrecorded()[0] for request in recording.in_flight)
        recorded = max(session.counts.turns, recording.turns)
        spent = limits.without_room(session.limits, session, n, recorded=recorded, running=running)
        if spent is not None and not (recording.in_flight or recording.has_open(self.clock())):
            raise await self.recorder.end(recording.trial_id, spent)
        if spent is not None:
            raise limits.used_up_by_running(spent)

    def _allowed(self, recording: Recording, job: Job, n: int) -> tuple[Job, dict[str, object]]:
        """The job under the trial's sampling policy and within its budget, and what that changed."""
        session = recording.session
        assert session is not None
        job, changed = law.apply(session.sampling, job)
        sampling = job.sampling
        if sampling.max_tokens is None and self._default_max_tokens is not None:
            sampling = msgspec.structs.replace(sampling, max_tokens=self._default_max_tokens)
        left = limits.tokens_left(session.limits, session, n)
        if left is not None and (sampling.max_tokens is None or sampling.max_tokens > left):
            sampling = msgspec.structs.replace(sampling, max_tokens=max(left, 1))
        if sampling is not job.sampling:
            job = msgspec.structs.replace(job, sampling=sampling)
        return job, changed

    async def _place(self, recording: Recording, order: Order, n: int) -> Stream:
        """Open a stream for the order, after a wait if every worker is busy. After a wait, session and limits are checked again.

        Raises: as `Hub.place`; Gone, BudgetSpent, StoreUnavailable, ProxyStopping.
        """
        if not self.hub.waits(order):
            try:
                return self.hub.open(order)
            except NOT_YET:
                pass
        if self._draining:
            raise _about_to_stop()
        stream = await self.hub.place(order)
        try:
            if self._draining:
                raise _about_to_stop()
            await self.recorder.enter(recording.trial_id)
            await self._check_room(recording, n)  # others of its trial may have been placed meanwhile
        except BaseException:
            stream.discard("its session has ended, or has no budget left")
            raise
        return stream

    async def _open(self, request: Request, index: int, facts: TurnFacts) -> OpenChoice:
        found, n = request.plan, facts.asked.n
        job = found.job
        if index and job.sampling.seed is not None:
            # The same seed would draw the same completion n times.
            seed = (job.sampling.seed + index + 2**63) % 2**64 - 2**63
            job = msgspec.structs.replace(job, sampling=msgspec.structs.replace(job.sampling, seed=seed))
        turn_id = os.urandom(6).hex()
        order = Order(
            trial_id=request.recording.trial_id,
            turn_id=turn_id,
            job=job,
            model=facts.asked.model,
            prefix=found.prefix,
            full_too=bool(index),
            returns_ids=facts.asked.returns_ids,
        )
        if not index and n > 1:
            self.hub.check_size(order, n)
        stream = await self._place(request.recording, order, n)
        transcript = ChoiceTranscript(turn_id, request.dialect.call_prefix, stream.card)
        first = request.choices[0].transcript.turn_id if index else turn_id
        facts = msgspec.structs.replace(facts, answer_id=first if n > 1 else None, moves=[])
        return OpenChoice(self.recorder, request.recording, index, order, stream, transcript, facts, found)


def _about_to_stop() -> ProxyStopping:
    return ProxyStopping("the proxy is about to stop")
