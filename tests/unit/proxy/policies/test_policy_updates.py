"""One policy: who may generate, and which update everybody is brought to (I10)."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from steno.contracts.wire.frames import Progress
from steno_proxy.policies.policy_updates import KEPT_RUNS, FrameOrder, PolicyUpdates
from steno_proxy.policies.update import FrameKind, UpdateRun
from tests.support.contracts.policy import spec


def run(step: int, *, now: float = 0.0, number: int | None = None) -> UpdateRun:
    asked = spec(step, deadline_s=100.0)
    return UpdateRun(asked.update_id, asked, number=number or step, created_at=now, since=now, settle_until=now)


class Fleet:
    """Workers that do as they are told, one order at a time, in whatever order a test has them; and fail where it says so."""

    def __init__(self) -> None:
        self.updates = PolicyUpdates("default")
        self.now = 0.0
        self.versions: dict[str, str] = {}
        self.inbox: dict[str, deque[FrameOrder]] = {}
        self.ready: dict[str, set[str]] = {}
        self.refusing: set[str] = set()

    def take(self, orders: list[FrameOrder]) -> None:
        for order in orders:
            if order.worker_id in self.inbox:
                self.inbox[order.worker_id].append(order)

    def start(self, worker: str, version: str = "base/0") -> None:
        self.kill(worker)
        self.versions[worker], self.inbox[worker], self.ready[worker] = version, deque(), set()
        self.take(self.updates.join(worker, version, self.now))

    def kill(self, worker: str) -> None:
        if self.inbox.pop(worker, None) is not None:
            del self.versions[worker]
            self.take(self.updates.leave(worker, self.now))

    def post(self, step: int) -> None:
        self.take(self.updates.adopt(run(step, now=self.now), self.now))

    def work(self, worker: str) -> bool:
        """Do the next thing this worker was told."""
        if not self.inbox.get(worker):
            return False
        order = self.inbox[worker].popleft()
        update_id = order.run.update_id
        if order.do is FrameKind.ABANDON:
            self.ready[worker].discard(update_id)
        elif worker in self.refusing:
            self.say(worker, Progress(update_id, "failed", code="weights_refused", message="no"))
        elif order.do is FrameKind.PREPARE:
            self.ready[worker].add(update_id)
            self.say(worker, Progress(update_id, "ready", order.run.spec.manifest.size))
        elif update_id in self.ready[worker]:
            self.versions[worker] = order.run.version
            self.take(self.updates.announced(worker, order.run.version, self.now))
            self.say(worker, Progress(update_id, "served"))
        else:
            self.say(worker, Progress(update_id, "failed", code="not_found", message="not prepared"))
        return True

    def say(self, worker: str, said: Progress) -> None:
        if worker in self.inbox:
            self.take(self.updates.progress(worker, said, self.now))

    def settle(self) -> None:
        for _ in range(60):
            while busy := [worker for worker, inbox in self.inbox.items() if inbox]:
                for worker in busy:
                    self.work(worker)
            due = self.updates.next_deadline()
            self.now = max(self.now, due if due is not None else self.now + 400.0)
            self.take(self.updates.tick(self.now))

    def eligible(self) -> set[str]:
        return {worker for worker, version in self.versions.items() if not self.updates.behind(worker, version)}


def test_before_the_first_update_every_version_may_generate() -> None:
    fleet = Fleet()
    fleet.start("a", "base/0")
    fleet.start("b", "other/7")
    assert fleet.eligible() == {"a", "b"}
    fleet.post(1)
    assert fleet.eligible() == {"a", "b"}, "also while the first one is on its way"


def test_all_generate_throughout_an_update_that_goes_well() -> None:
    fleet = Fleet()
    for worker in "abc":
        fleet.start(worker)
    fleet.post(1)
    for worker in "abccba":
        fleet.work(worker)
        assert fleet.eligible() == {"a", "b", "c"}
    assert set(fleet.versions.values()) == {"run-a/1"}


def test_nobody_is_brought_back_to_an_older_version_by_a_straggler() -> None:
    fleet = Fleet()
    for worker in "ab":
        fleet.start(worker)
    fleet.post(1)
    fleet.work("a"), fleet.work("b"), fleet.work("a")  # a serves 1, b is told to load it
    fleet.post(2)
    assert fleet.eligible() == {"a", "b"}
    fleet.settle()
    assert set(fleet.versions.values()) == {"run-a/2"}
    assert fleet.updates.in_force is fleet.updates.posted
    fleet.start("old", "run-a/1")
    assert fleet.eligible() == {"a", "b"}


def test_while_the_newest_has_failed_late_workers_are_brought_to_what_is_in_force() -> None:
    fleet = Fleet()
    fleet.start("a")
    fleet.post(1)
    fleet.settle()
    fleet.refusing = {"a"}
    fleet.post(2)
    fleet.work("a")
    assert fleet.updates.posted is not None
    assert (fleet.updates.posted.state, fleet.eligible()) == ("failed", {"a"})
    fleet.start("late")
    assert fleet.eligible() == {"a"}
    fleet.settle()
    assert (fleet.versions, fleet.eligible()) == ({"a": "run-a/1", "late": "run-a/1"}, {"a", "late"})
    fleet.refusing = set()
    fleet.take(fleet.updates.revive(fleet.updates.posted, fleet.now, fleet.now))
    fleet.settle()
    assert set(fleet.versions.values()) == {"run-a/2"}


def failed(fleet: Fleet) -> UpdateRun:
    """a and b serve 1; a refuses 2, and b's channel is lost while it loads 2: nobody is known to serve it."""
    fleet.start("a")
    fleet.start("b")
    fleet.post(1)
    fleet.settle()
    fleet.refusing = {"a"}
    fleet.post(2)
    fleet.work("b"), fleet.work("a")
    posted = fleet.updates.posted
    assert posted is not None and posted.switching("b")
    fleet.kill("b")
    assert (posted.state, fleet.eligible()) == ("failed", {"a"})
    return posted


def loads_2_after_all(fleet: Fleet, posted: UpdateRun) -> None:
    assert (posted.state, fleet.updates.in_force, fleet.updates.active) == ("done", posted, posted)
    assert "a" not in fleet.eligible()
    assert not fleet.inbox["a"], "it refused a moment ago"
    fleet.settle()
    assert posted.members["a"].attempts > 1
    assert "a" not in fleet.eligible()
    fleet.refusing = set()
    fleet.settle()
    assert set(fleet.versions.values()) == {"run-a/2"}
    assert fleet.eligible() == set(fleet.versions)


def test_a_failed_update_is_done_once_a_worker_comes_back_that_has_loaded_it() -> None:
    fleet = Fleet()
    posted = failed(fleet)
    fleet.start("b", "run-a/2")
    assert not fleet.inbox["b"], "nobody is told to load an older version"
    loads_2_after_all(fleet, posted)


def test_a_failed_update_is_done_once_a_worker_that_was_back_meanwhile_has_loaded_it() -> None:
    fleet = Fleet()
    posted = failed(fleet)
    fleet.start("b", "run-a/1")  # it loads 2 still
    fleet.versions["b"] = "run-a/2"
    fleet.take(fleet.updates.announced("b", "run-a/2", fleet.now))
    assert not fleet.inbox["b"]
    loads_2_after_all(fleet, posted)


def test_a_failed_update_is_done_once_the_store_says_that_a_worker_of_another_replica_serves_it() -> None:
    fleet = Fleet()
    posted = failed(fleet)
    fleet.start("late")
    fleet.take(fleet.updates.serve(posted, fleet.now))
    loads_2_after_all(fleet, posted)


def test_who_became_ready_while_an_update_rested_loads_it_once_it_is_done() -> None:
    fleet = Fleet()
    fleet.start("a")
    fleet.post(1)
    fleet.settle()
    fleet.refusing = {"a"}
    fleet.post(2)
    fleet.work("a")
    posted = fleet.updates.posted
    assert posted is not None and (posted.state, posted.applied) == ("failed", False)
    fleet.ready["a"].add(posted.update_id)
    fleet.say("a", Progress(posted.update_id, "ready"))  # as asked by another replica
    fleet.refusing = set()
    fleet.take(fleet.updates.serve(posted, fleet.now))
    fleet.work("a"), fleet.work("a")
    assert (posted.state, fleet.versions) == ("done", {"a": "run-a/2"})


def test_an_older_update_that_a_worker_serves_is_in_force_where_the_newest_has_failed() -> None:
    fleet = Fleet()
    fleet.start("a")
    for step in (1, 2):
        fleet.post(step)
        fleet.settle()
        fleet.refusing = {"a"}
    fleet.post(3)
    fleet.work("a"), fleet.work("a")
    assert fleet.updates.posted is not None and fleet.updates.posted.state == "failed"
    fleet.start("b", "run-a/2")
    assert not fleet.inbox["b"]
    assert (fleet.updates.in_force, fleet.eligible()) == (fleet.updates.active, {"b"})
    fleet.refusing = set()
    fleet.settle()
    assert set(fleet.versions.values()) == {"run-a/2"}


def test_a_version_posted_at_another_replica_is_not_behind_once_it_is_known() -> None:
    fleet = Fleet()
    fleet.start("a", "run-a/1")
    first, second = run(1), run(2)
    fleet.take(fleet.updates.adopt(first, 0.0))
    assert not fleet.updates.knows("run-a/2")
    fleet.take(fleet.updates.adopt(second, 0.0))
    assert fleet.updates.knows("run-a/2")
    assert not fleet.updates.behind("b", "run-a/2"), "newer than what is in force here"
    fleet.take(fleet.updates.serve(second, 0.0))
    assert fleet.updates.behind("c", "run-a/1")


def test_an_update_that_a_worker_serves_before_it_is_heard_of_is_in_force_at_once() -> None:
    fleet = Fleet()
    fleet.start("a", "run-a/1")
    fleet.start("b", "run-a/2")
    fleet.take(fleet.updates.adopt(run(2), 0.0))
    assert fleet.updates.in_force is fleet.updates.posted
    assert fleet.eligible() == {"b"}


def test_old_updates_are_forgotten() -> None:
    fleet = Fleet()
    fleet.start("a")
    for step in range(1, 40):
        fleet.post(step)
        fleet.settle()
        assert len(fleet.updates.runs) <= KEPT_RUNS
    assert fleet.versions == {"a": "run-a/39"}


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_whatever_fails_in_between_all_that_live_serve_the_newest_in_the_end(seed: int, workers: int) -> None:
    """I10. Until then nobody generates with an older version than the one in force, unless it is just loading."""
    dice = random.Random(seed)
    fleet, step = Fleet(), 0
    names = [f"w{i}" for i in range(workers)]
    for name in names:
        fleet.start(name)
    for _ in range(dice.randrange(5, 80)):
        what = dice.choice(["work"] * 6 + ["post", "kill", "start", "refuse", "relent", "wait"])
        name = dice.choice(names)
        if what == "work":
            fleet.work(name)
        elif what == "post":
            step += 1
            fleet.post(step)
        elif what == "kill":
            fleet.kill(name)
        elif what == "start":
            fleet.start(name)
        elif what == "refuse":
            fleet.refusing.add(name)
        elif what == "relent":
            fleet.refusing.discard(name)
        else:
            fleet.now += dice.choice([0.5, 20.0, 150.0])
            fleet.take(fleet.updates.tick(fleet.now))
        force = fleet.updates.in_force
        for worker in fleet.eligible():
            if force is not None and int(fleet.versions[worker].partition("/")[2]) < force.spec.step:
                assert any(one.switching(worker) for one in fleet.updates.runs.values())
    fleet.refusing = set()
    for name in names:
        if name not in fleet.versions:
            fleet.start(name)
    posted = fleet.updates.posted
    if posted is not None and posted.state == "failed":
        fleet.take(fleet.updates.revive(posted, fleet.now, fleet.now))
    fleet.settle()
    if posted is not None and posted.state == "failed":
        fleet.take(fleet.updates.revive(posted, fleet.now, fleet.now))
        fleet.settle()
    assert set(fleet.versions.values()) == {f"run-a/{step}" if step else "base/0"}
    assert fleet.eligible() == set(names)
