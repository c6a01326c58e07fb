"""Policy updates as they run: between the store, which all replicas share, the hub's workers, and the trainer that asks.

`policy_updates.py` and `update.py` decide; here are sockets, the clock and the store. All that is to be written to the store is
derived from what is known here and written by one task, so that a store that is away costs a delay and nothing else. No turn ever
waits for anything here: who may generate is worked out when something changes, and kept in `WorkerChannel.behind`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from steno.contracts.errors import BadRequest, Conflict, NotFound, StenoError
from steno.contracts.lenient import read_json
from steno.contracts.policy import ModelName, PolicyView, Update, UpdateSpec
from steno.contracts.wire.frames import Abandon, Apply, Chunk, ModelCard, Prepare, Progress
from steno_proxy import metrics
from steno_proxy.policies.model_names import ServedModelNames, policies_of
from steno_proxy.policies.policy_updates import FrameOrder, PolicyUpdates
from steno_proxy.policies.specs import check, recorded
from steno_proxy.policies.update import FrameKind, UpdateRun
from steno_proxy.policies.upload import Upload
from steno_proxy.store.policies import PolicyHead, PolicyStore, UpdateRow
from steno_proxy.workers.worker_channel import WorkerChannel

log = logging.getLogger(__name__)
POLL_S = 1.0
"""How often the store is asked what other replicas were told: two small reads, whatever the load."""
SETTLE_S = 3.0
"""How long after this proxy's start no update is taken for complete: its workers are still dialling."""
CAPABILITY = "policy_updates"


class PolicyKeeper:
    """Brings the workers of every policy to its newest version, at this replica. Keeps the hub's `Watcher` protocol.

    Attributes: names: of models that workers have served. on_names: called when they have changed, for turns that wait for one.
    Args: clock: Unix seconds, in which replicas share when an update was posted. steady: seconds, for all that is waited for
    here: it goes on evenly when somebody sets the machine's time.
    """

    def __init__(
        self, store: PolicyStore, *, clock: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic,
        settle_s: float = SETTLE_S,
    ) -> None:  # fmt: skip
        self._store = store
        self.names = ServedModelNames(store)
        self.on_names: Callable[[], None] = lambda: None
        self._clock, self._steady = clock, steady
        self._settled_at = steady() + settle_s
        self._updates: dict[str, PolicyUpdates] = {}
        self._workers: dict[str, WorkerChannel] = {}
        self._unsure: set[tuple[str, str]] = (
            set()
        )  # (worker, policy): it serves a version that is not known here; the store may know it
        self._uploading: Counter[tuple[str, str]] = Counter()
        self._waiters: set[asyncio.Future[None]] = set()
        self._kick = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._served: dict[str, str] = {}  # policy -> update that the store has as served

    # -- for the REST API

    async def post(self, spec: UpdateSpec) -> Update:
        """Begin an update; for a spec posted before, return its update. Raises: BadRequest, Conflict, StoreUnavailable."""
        check(spec)
        row = await self._store.post(spec, now=self._clock())
        self._adopt(row)
        return self._run(row.update_id).view()

    async def update(self, update_id: str, wait_s: float = 0.0) -> Update:
        """Return the update as it stands; with `wait_s`, first wait so long at most until it ends or has bytes to upload.

        Raises: NotFound, StoreUnavailable.
        """
        run = self._find(update_id)
        if run is None:
            await self.sync()
            run = self._find(update_id)
        if run is None:
            return recorded(await self._store.update(update_id))
        until = self._steady() + wait_s
        while not (run.ended or self._has_work(run)) and (left := until - self._steady()) > 0:
            await self._changed(left)
        return run.view()

    async def upload(self, update_id: str, name: str, offset: int, body: AsyncIterator[bytes]) -> int:
        """Pass bytes of a shard on to the workers that lack them. Returns: the offset in the shard up to which it got.

        Raises: NotFound, Conflict (superseded), BadRequest.
        """
        run = self._find(update_id)
        if run is None:
            await self.sync()
            run = self._run(update_id)
        shard = next((file for file in run.spec.manifest.files if file.name == name), None)
        if shard is None:
            raise NotFound(f"update {update_id} has no shard {name[:128]!r}", field="name")
        if run.spec.transport != "stream":
            raise BadRequest(
                f"transport: this update uses {run.spec.transport}; only stream has uploads", field="transport"
            )
        if not 0 <= offset <= shard.size:
            raise BadRequest(f"offset: got {offset}, shard {name} has {shard.size} bytes", field="offset")
        if run.state == "superseded":
            raise Conflict(f"version {run.version} has been superseded")
        key = (update_id, name)
        self._uploading[key] += 1
        try:
            upload = Upload(run, shard, offset, send=self._send_chunk, changed=self._changed, clock=self._steady)
            return await upload.forward(body)
        finally:
            self._uploading[key] -= 1
            if not self._uploading[key]:
                del self._uploading[key]
            self._arm()
            self._notify()

    def views(self) -> list[PolicyView]:
        """Every policy that a worker announces or that was updated, by name."""
        serving: dict[str, dict[str, list[str]]] = {policy: {} for policy in self._updates}
        for worker in self._workers.values():
            if worker.link is not None and worker.healthy:
                for card in worker.models:
                    serving.setdefault(card.policy, {}).setdefault(card.policy_version, []).append(worker.id)
        return [
            (self._updates.get(policy) or PolicyUpdates(policy)).view(
                {version: sorted(ids) for version, ids in found.items()}
            )
            for policy, found in sorted(serving.items())
        ]

    def models(self) -> list[ModelName]:
        """Every name that is kept, in order, with the workers that serve it here."""
        return [
            ModelName(name=name, policy=policy, workers=self._serving(name))
            for name, policy in self.names.all().items()
        ]

    async def retire(self, name: str) -> None:
        """Raises: as `ServedModelNames.retire`."""
        await self.names.retire(name, self._serving(name))
        self.on_names()

    def _serving(self, name: str) -> list[str]:
        return sorted(
            worker.id for worker in self._workers.values() if any(card.name == name for card in worker.models)
        )

    def _names_served(self) -> dict[str, str]:
        return policies_of(card for worker in self._workers.values() for card in worker.models)

    # -- for the hub (Watcher)

    def admitted(self, worker: WorkerChannel) -> None:
        known = self._workers.get(worker.id) is worker
        self._workers[worker.id] = worker
        self.names.hear(self._names_served())
        now = self._steady()
        for policy, version in _taking(worker):
            updates = self._updates_of(policy)
            said = updates.announced if known else updates.join
            self._carry_out(updates, said(worker.id, version, now))
        self._mark(worker)
        self._kick.set()

    def announced(self, worker: WorkerChannel) -> None:
        now = self._steady()
        if self.names.hear(self._names_served()):
            self._kick.set()
        for card in worker.models:
            if not card.text_only and not self._updates_of(card.policy).knows(card.policy_version):
                # Perhaps a version that was posted at another replica a moment ago: the store is asked before turns are refused.
                self._unsure.add((worker.id, card.policy))
                self._kick.set()
        for policy, version in _taking(worker):
            updates = self._updates_of(policy)
            self._carry_out(updates, updates.announced(worker.id, version, now))
        self._mark(worker)

    def progressed(self, worker: WorkerChannel, said: Progress) -> None:
        if self._workers.get(worker.id) is not worker:
            return
        for updates in self._updates.values():
            run = updates.runs.get(said.update_id)
            if run is None:
                continue
            member = run.members.get(worker.id)
            had, state = (member.received, member.state) if member is not None else (0, "")
            loaded = member is not None and member.load_s is not None  # it has said so before
            orders = updates.progress(worker.id, said, self._steady())
            metrics.POLICY_STAGED.labels(run.spec.transport).inc(max(0, said.received - had))
            if said.state == "served" and member is not None and member.load_s == said.load_s:
                metrics.POLICY_PAUSE.labels(run.spec.transport).observe(said.pause_s)
            if said.state == "served" and not loaded and run.spec.probe is not None:
                worker.trust(f"its probe of {run.version} has passed")
            if said.state != state:
                log.info(
                    "worker %s, policy update %s (%s): %s %s",
                    worker.id,
                    said.update_id,
                    run.version,
                    said.state,
                    said.message,
                )
            self._carry_out(updates, orders)

    def lost(self, worker: WorkerChannel) -> None:
        if self._workers.get(worker.id) is worker:
            del self._workers[worker.id]
            self._unsure = {(name, policy) for name, policy in self._unsure if name != worker.id}
            for updates in self._updates.values():
                self._carry_out(updates, updates.leave(worker.id, self._steady()))

    # -- the store

    async def run(self) -> None:
        """Keep up with the store, until cancelled."""
        said = ""
        while True:
            self._kick.clear()
            try:
                await self.sync()
                said = ""
            except StenoError as error:
                if error.message != said:  # once for an outage, not each second
                    log.warning("can't synchronise policies with the store, trying again: %s", error.message)
                said = error.message
            except Exception:  # it goes on trying, and the log has it every second
                log.exception("can't synchronise policies with the store")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._kick.wait()

    async def sync(self) -> None:
        """Learn what other replicas were told, and write what is known here. Raises StoreUnavailable."""
        unsure = set(self._unsure)
        if await self.names.sync(self._names_served()):
            self.on_names()
        unread: set[str] = set()
        for head in await self._store.heads():
            try:
                await self._learn(head)
            except StenoError:
                raise
            # A record that this release can't read, say: other policies go on, and the log has it every second.
            except Exception:
                log.exception("can't synchronise policy %s with the store", head.policy)
                unread.add(head.policy)
        for updates in list(self._updates.values()):
            force = updates.in_force
            if force is not None and self._served.get(updates.policy) != force.update_id:
                await self._store.serve(force.update_id)
                self._served[updates.policy] = force.update_id
            for run in list(updates.runs.values()):
                if run.state in ("done", "failed") and run.stored != run.state:
                    await self._store.end(run.update_id, run.state, now=run.ended_at or self._clock())
                    run.stored = run.state
        asked = {(worker_id, policy) for worker_id, policy in unsure if policy not in unread}
        self._unsure -= asked
        for worker_id in {worker_id for worker_id, _ in asked}:
            if worker_id in self._workers:
                self._mark(self._workers[worker_id])

    async def _learn(self, head: PolicyHead) -> None:
        """What the store has of a policy."""
        updates = self._updates_of(head.policy)
        posted = updates.runs.get(head.posted)
        if posted is None or posted.since < head.since:
            self._adopt(await self._store.update(head.posted))
        self._served[head.policy] = head.served
        if head.served and (updates.in_force is None or updates.in_force.update_id != head.served):
            await self._learn_served(updates, head.served)

    async def _learn_served(self, updates: PolicyUpdates, update_id: str) -> None:
        run = updates.runs.get(update_id)
        if run is None:
            try:
                run = self._run_of(await self._store.update(update_id))
            except NotFound:  # superseded between the two questions
                return
            self._carry_out(updates, updates.adopt(run, self._steady()))
        self._carry_out(updates, updates.serve(run, self._steady()))

    def _adopt(self, row: UpdateRow) -> None:
        updates, now = self._updates_of(row.policy), self._steady()
        run = updates.runs.get(row.update_id)
        if run is not None and row.since > run.since:
            run.unix_ahead_s = self._unix_ahead_s(row.since)
        if run is None:
            log.info("policy %s: update %s to version %s", row.policy, row.update_id, row.version)
            self._carry_out(updates, updates.adopt(self._run_of(row), now))
        elif row.since > run.since and run.state == "failed":
            run.stored = ""
            self._carry_out(updates, updates.revive(run, row.since, now))
        elif row.since > run.since:  # it had failed at another replica
            run.since = row.since
            self._carry_out(updates, updates.tick(now))

    def _run_of(self, row: UpdateRow) -> UpdateRun:
        return UpdateRun(
            row.update_id, read_json(UpdateSpec, row.spec), number=row.number, created_at=row.created_at,
            since=row.since, settle_until=max(self._steady(), self._settled_at), state=row.state, ended_at=row.ended_at,
            unix_ahead_s=self._unix_ahead_s(row.since),
        )  # fmt: skip

    def _unix_ahead_s(self, since: float) -> float:
        """How far Unix time is ahead of `steady`. A `since` in the future, set by another replica's clock, counts as now."""
        return max(self._clock(), since) - self._steady()

    # -- what is to be done

    def _carry_out(self, updates: PolicyUpdates, orders: Iterable[FrameOrder]) -> None:
        """Send what was decided, and see to everything that may follow from the facts."""
        for order in orders:
            worker = self._workers.get(order.worker_id)
            if worker is not None:
                self._order(updates, worker, order)
        self._note(updates)
        self._arm()
        self._notify()

    def _order(self, updates: PolicyUpdates, worker: WorkerChannel, order: FrameOrder) -> None:
        update_id = order.run.update_id
        try:
            if order.do is FrameKind.PREPARE:
                worker.send(Prepare(update_id, order.run.spec_json))
            elif order.do is FrameKind.APPLY:
                worker.send(Apply(update_id))
            else:
                worker.send(Abandon(update_id))
        except StenoError as error:  # the manifest fits in no packet
            failed = Progress(update_id, "failed", code=error.code, message=error.message)
            self._carry_out(updates, updates.progress(worker.id, failed, self._steady()))

    def _note(self, updates: PolicyUpdates) -> None:
        """Count updates that have ended, have them stored, and mark the workers that may generate or no longer may."""
        for run in updates.runs.values():
            had_ended = run.noted in ("done", "failed") and run.state == "superseded"  # whatever is in force now
            if run.ended and run.noted != run.state and not had_ended:
                log.info("policy update %s (%s) is %s", run.update_id, run.version, run.state)
                lasted_s = (run.ended_at or run.since) - run.since
                metrics.POLICY_UPDATE.labels(run.spec.transport, run.state).observe(max(0.0, lasted_s))
                self._kick.set()
            run.noted = run.state
        if updates.in_force is not None and self._served.get(updates.policy) != updates.in_force.update_id:
            self._kick.set()
        if updates.gate != updates.marked:
            updates.marked = updates.gate
            for worker in self._workers.values():
                self._mark(worker)

    def _mark(self, worker: WorkerChannel) -> None:
        """Work out for which policies a worker gets no turns."""
        behind = frozenset(
            card.policy for card in worker.models if not card.text_only and self._is_behind(worker, card)
        )
        if behind != worker.behind:
            log.info(
                "worker %s: %s",
                worker.id,
                f"has old weights and gets no turns of {', '.join(sorted(behind))}" if behind else "up to date",
            )
            worker.behind = behind
            worker.on_change()  # turns may wait for it

    def _is_behind(self, worker: WorkerChannel, card: ModelCard) -> bool:
        if (worker.id, card.policy) in self._unsure:
            return card.policy in worker.behind
        updates = self._updates.get(card.policy)
        return updates is not None and updates.behind(worker.id, card.policy_version)

    def _send_chunk(self, worker_id: str, chunk: Chunk) -> None:
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        try:
            worker.offer(chunk)
        except StenoError as error:  # not confirmed in time, so it is sent again (`ShardCursor.rewind`)
            log.warning(
                "can't send bytes of an update to worker %s now (update %s): %s",
                worker_id,
                chunk.update_id,
                error.message,
            )

    def _arm(self) -> None:
        due = [at for updates in self._updates.values() if (at := updates.next_deadline()) is not None]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due:
            wait_s = max(0.01, min(due) - self._steady())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for updates in list(self._updates.values()):
            self._carry_out(updates, updates.tick(self._steady()))

    def close(self) -> None:
        """No more timers. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- who waits

    async def _changed(self, timeout_s: float) -> None:
        """Wait until something has changed, at most `timeout_s`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait({waiter}, timeout=max(0.0, timeout_s))
        finally:
            self._waiters.discard(waiter)

    def _notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _has_work(self, run: UpdateRun) -> bool:
        """Whether there are bytes to upload that nobody is uploading."""
        return any(not self._uploading[run.update_id, want.shard] for want in run.wants())

    def _updates_of(self, policy: str) -> PolicyUpdates:
        return self._updates.setdefault(policy, PolicyUpdates(policy))

    def _find(self, update_id: str) -> UpdateRun | None:
        return next((updates.runs[update_id] for updates in self._updates.values() if update_id in updates.runs), None)

    def _run(self, update_id: str) -> UpdateRun:
        run = self._find(update_id)
        if run is None:
            raise NotFound(f"no policy update {update_id[:64]}")
        return run


def _taking(worker: WorkerChannel) -> Iterator[tuple[str, str]]:
    """Each policy that can be updated on this worker, with its version. The version of an unhealthy worker is not known: ""."""
    if CAPABILITY in worker.peer.capabilities:
        seen: set[str] = set()
        cards: list[ModelCard] = [card for card in worker.models if not card.text_only]
        for card in cards:
            if card.policy not in seen:
                seen.add(card.policy)
                yield card.policy, card.policy_version if worker.healthy else ""
