"""One policy: its updates, the version in force, and which workers may generate (I10). No I/O; time is an argument.

The version in force is the newest that some worker has served. A worker that serves another one gets no new turns, unless what it
serves was posted later, or it has been told to load just now. Workers are brought to the newest update; while that has failed, to
the version in force.

The store numbers updates as they are posted. A store that came back empty, or as it was a while ago, numbers new ones from there:
they are told from older ones by when they were posted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from steno.contracts.policy import PolicyView
from steno.contracts.wire.frames import Progress
from steno_proxy.policies.update import FrameKind, MemberFrame, UpdateRun

KEPT_RUNS = 8
"""Updates of a policy that are kept in memory; older ones are in the store for a while."""


class FrameOrder(NamedTuple):
    """A frame that is to be sent to a worker."""

    worker_id: str
    do: FrameKind
    run: UpdateRun


class PolicyUpdates:
    """The updates of one policy, the version in force, and which workers are behind it.

    Attributes:
    posted: the newest update. active: the one that workers are brought to. in_force: the newest that some worker has served.
    gate: grows whenever the answer of `behind` may have changed. marked: the gate at which the workers were last marked.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.runs: dict[str, UpdateRun] = {}
        self.posted: UpdateRun | None = None
        self.active: UpdateRun | None = None
        self.in_force: UpdateRun | None = None
        self.gate = self.marked = 0
        self._versions: dict[str, str] = {}  # of the workers that take updates, "" where it is not to be trusted
        self._loading: frozenset[str] = frozenset()
        self._losses: list[
            float
        ] = []  # for each loss of updates in the store: when the newest update before it was posted

    # -- facts; each returns what is to be sent because of it

    def adopt(self, run: UpdateRun, now: float) -> list[FrameOrder]:
        """An update is on record. Idempotent."""
        if run.update_id in self.runs:
            return []
        self._notice_loss(run)
        self.runs[run.update_id] = run
        run.served = run.served or run.version in self._versions.values()
        self.gate += 1
        if self.posted is not None and self._place(run) < self._place(self.posted):
            return []
        before, self.posted = self.posted, run
        orders: list[FrameOrder] = []
        if before is not None:
            orders = _orders(before, before.supersede(now))
        return orders + self._settle(now)

    def serve(self, run: UpdateRun, now: float) -> list[FrameOrder]:
        """Some worker serves it, as the store knows, or as that worker says. If it had failed, it is done after all."""
        run.served = True
        return _orders(run, run.tick(now)) + self._settle(now)

    def join(self, worker_id: str, version: str, now: float) -> list[FrameOrder]:
        """A worker that takes updates is there, new or started again."""
        self._versions[worker_id] = version
        orders = self._said(version, now)
        if self.active is not None:
            orders += _orders(self.active, self.active.join(worker_id, version, now))
        return orders + self._settle(now)

    def announced(self, worker_id: str, version: str, now: float) -> list[FrameOrder]:
        self._versions[worker_id] = version
        orders = self._said(version, now)
        for run in self._concerned(worker_id):
            orders += _orders(run, run.announced(worker_id, version, now))
        return orders + self._settle(now)

    def leave(self, worker_id: str, now: float) -> list[FrameOrder]:
        self._versions.pop(worker_id, None)
        orders = []
        for run in self._concerned(worker_id):
            orders += _orders(run, run.leave(worker_id, now))
        return orders + self._settle(now)

    def progress(self, worker_id: str, said: Progress, now: float) -> list[FrameOrder]:
        """Raises ProtocolError."""
        run = self.runs.get(said.update_id)
        if run is None:
            return []
        return _orders(run, run.progress(worker_id, said, now)) + self._settle(now)

    def revive(self, run: UpdateRun, since: float, now: float) -> list[FrameOrder]:
        """It had failed and was posted again."""
        return _orders(run, run.revive(since, now)) + self._settle(now)

    def tick(self, now: float) -> list[FrameOrder]:
        orders = []
        for run in list(self.runs.values()):
            orders += _orders(run, run.tick(now))
        return orders + self._settle(now)

    # -- what it has come to

    def behind(self, worker_id: str, version: str) -> bool:
        """Whether a worker with this version gets no new turns. Cheap, but asked when something changes, never per turn."""
        force = self.in_force
        if force is None or version == force.version:
            return False
        return not any(
            self._place(run) >= self._place(force) and (run.version == version or run.switching(worker_id))
            for run in self.runs.values()
        )

    def knows(self, version: str) -> bool:
        return any(run.version == version for run in self.runs.values())

    def next_deadline(self) -> float | None:
        due = [at for run in self.runs.values() if (at := run.next_deadline()) is not None]
        return min(due) if due else None

    def view(self, serving: dict[str, list[str]]) -> PolicyView:
        """serving: version -> workers."""
        return PolicyView(
            policy=self.policy,
            version=self.in_force.version if self.in_force else None,
            update_id=self.posted.update_id if self.posted else None,
            workers=serving,
        )

    def _said(self, version: str, now: float) -> list[FrameOrder]:
        """Note that a worker serves this version, before any update makes that worker load an older one."""
        said = [run for run in self.runs.values() if run.version == version and not run.served]
        return [order for run in said for order in self.serve(run, now)]

    def _concerned(self, worker_id: str) -> list[UpdateRun]:
        return [run for run in self.runs.values() if run is self.active or worker_id in run.members]

    def _settle(self, now: float) -> list[FrameOrder]:
        """After any fact: what is in force, and which update everybody is brought to."""
        for run in self.runs.values():
            if run.served and (self.in_force is None or self._place(run) > self._place(self.in_force)):
                self.in_force = run
                self.gate += 1
        orders = self._choose(now)
        loading = frozenset(
            worker_id for run in self.runs.values() for worker_id in run.members if run.switching(worker_id)
        )
        if loading != self._loading:
            self._loading = loading
            self.gate += 1
        self._prune()
        return orders

    def _choose(self, now: float) -> list[FrameOrder]:
        wanted = self.posted
        if wanted is None or (wanted.state == "failed" and self.in_force is not None):
            wanted = self.in_force
        if wanted is None or wanted is self.active:
            return []
        before, self.active = self.active, wanted
        orders: list[FrameOrder] = []
        if before is not None and before is not self.posted:
            orders = _orders(before, before.supersede(now))
        if wanted is not self.posted:
            wanted.bring_along()
        for worker_id, version in list(self._versions.items()):
            # lost: it came back while another was active
            if worker_id not in wanted.members or wanted.members[worker_id].lost:
                orders += _orders(wanted, wanted.join(worker_id, version, now))
        return orders

    def _prune(self) -> None:
        if len(self.runs) > KEPT_RUNS:
            kept = (self.posted, self.active, self.in_force)
            old = [run for run in self.runs.values() if run not in kept]
            # Drop those that came first: an old one that the store names again after a loss came last, and so stays.
            for run in old[: len(self.runs) - KEPT_RUNS]:
                del self.runs[run.update_id]

    def _place(self, run: UpdateRun) -> tuple[int, int]:
        """Sort key in the order of posting. Numbers can be compared only if the store lost no updates in between."""
        return sum(run.created_at > at for at in self._losses), run.number

    def _notice_loss(self, run: UpdateRun) -> None:
        """Note if the store has lost updates. A run that is not superseded is the store's newest. If it was posted after the
        newest one here, but has no larger number, the store has lost the one here. If it was posted before that one, the store
        is out of date, and workers do not go back to this run."""
        newest = self.posted
        if newest is None or run.state == "superseded" or run.created_at <= newest.created_at:
            return
        if self._place(run) <= self._place(newest):
            self._losses.append(newest.created_at)


def _orders(run: UpdateRun, steps: Iterable[MemberFrame]) -> list[FrameOrder]:
    return [FrameOrder(step.worker_id, step.do, run) for step in steps]
