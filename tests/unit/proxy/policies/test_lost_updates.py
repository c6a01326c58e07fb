"""Redis came back empty, or as it was a while ago, and this proxy lived on: what is posted next is the newest (I10)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from steno.contracts.wire.frames import Apply, Frame, ModelCard, Prepare, Progress
from steno_proxy.policies.keeper import PolicyKeeper
from steno_proxy.policies.policy_updates import KEPT_RUNS
from steno_proxy.policies.update import UpdateRun
from steno_proxy.store.policies import MemoryPolicies
from tests.support.contracts.policy import spec
from tests.unit.proxy.policies.test_policy_updates import Fleet, run


def fleet_at(step: int) -> Fleet:
    """Two workers that serve this step; each step was posted a second after the one before."""
    fleet = Fleet()
    fleet.start("a")
    fleet.start("b")
    for one in (step - 1, step):
        fleet.now = float(one)
        fleet.take(fleet.updates.adopt(run(one, now=fleet.now), fleet.now))
        while fleet.work("a") or fleet.work("b"):
            pass
    assert set(fleet.versions.values()) == {f"run-a/{step}"}
    return fleet


def on_record(step: int, number: int, state: str) -> UpdateRun:
    asked, at = spec(step), float(step)
    return UpdateRun(
        asked.update_id, asked, number=number, created_at=at, since=at, settle_until=at, state=state, ended_at=at
    )


@pytest.mark.parametrize("number", [1, 51, 57])
def test_the_next_update_is_the_newest_whatever_its_number(number: int) -> None:
    fleet = fleet_at(57)
    for step, again in ((58, number), (59, number + 1)):
        fleet.now = float(step)
        posted = run(step, now=fleet.now, number=again)
        fleet.take(fleet.updates.adopt(posted, fleet.now))
        assert fleet.eligible() == {"a", "b"}
        fleet.settle()
        assert set(fleet.versions.values()) == {f"run-a/{step}"}
        assert fleet.updates.posted is posted and fleet.updates.in_force is posted and posted.state == "done"
        assert fleet.eligible() == {"a", "b"}
        assert fleet.updates.behind("c", f"run-a/{step - 1}")


def test_a_store_that_knows_an_older_one_sends_nobody_back() -> None:
    fleet = fleet_at(57)
    old = on_record(50, 50, "done")
    assert fleet.updates.adopt(old, fleet.now) == []
    assert fleet.updates.serve(old, fleet.now) == []
    assert fleet.updates.announced("a", "run-a/57", fleet.now) == []
    assert fleet.eligible() == {"a", "b"} and fleet.updates.behind("c", "run-a/50")
    fleet.start("late", "run-a/50")
    fleet.settle()
    assert set(fleet.versions.values()) == {"run-a/57"}, "also where the record of that is lost"


def test_two_that_were_posted_since_may_be_heard_of_in_either_order() -> None:
    fleet = fleet_at(57)
    newest, served = on_record(59, 2, "running"), on_record(58, 1, "superseded")
    fleet.now = 59.0
    fleet.updates.adopt(newest, fleet.now)
    fleet.updates.adopt(served, fleet.now)
    fleet.updates.serve(served, fleet.now)
    assert fleet.updates.posted is newest and fleet.updates.in_force is served
    assert [fleet.updates.behind("c", f"run-a/{step}") for step in (57, 58, 59)] == [True, False, False]


class Worker:
    """As much of a `WorkerChannel` as a keeper asks for. It keeps what it was told."""

    def __init__(self, version: str) -> None:
        self.id, self.healthy, self.link = "w", True, None
        self.peer = SimpleNamespace(capabilities=["policy_updates"])
        self.models = [ModelCard("m", 100, policy_version=version)]
        self.behind: frozenset[str] = frozenset()
        self.told: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self.told.append(frame)

    def on_change(self) -> None: ...

    def trust(self, why: str) -> None: ...


async def test_after_redis_has_lost_all_the_next_push_reaches_the_workers_of_every_proxy() -> None:
    now = 0.0
    before, after = MemoryPolicies(), MemoryPolicies()
    keepers = [PolicyKeeper(before, clock=lambda: now, steady=lambda: now, settle_s=0.0) for _ in range(2)]
    workers = [Worker("base/0") for _ in keepers]  # one, as each replica sees it

    async def push(step: int) -> None:
        nonlocal now
        now += 10.0
        update = await keepers[0].post(spec(step))
        await keepers[1].sync()
        for keeper, worker in zip(keepers, workers, strict=True):
            for said in ("ready", "served"):
                if said == "served":
                    worker.models = [ModelCard("m", 100, policy_version=update.version)]
                    keeper.announced(cast(Any, worker))
                keeper.progressed(cast(Any, worker), Progress(update.update_id, said))
            assert [type(frame) for frame in worker.told] == [Prepare, Apply], step
            assert not worker.behind
            worker.told.clear()
            await keeper.sync()
        for keeper in keepers:
            assert (await keeper.update(update.update_id)).state == "done"
            assert keeper.views()[0].version == update.version

    try:
        for keeper, worker in zip(keepers, workers, strict=True):
            keeper.admitted(cast(Any, worker))
        for step in (55, 56, 57):
            await push(step)
        for keeper in keepers:
            keeper._store = after
            await keeper.sync()
        assert not [frame for worker in workers for frame in worker.told]
        await push(58)
        await push(59)
    finally:
        for keeper in keepers:
            keeper.close()


async def test_what_is_kept_of_updates_does_not_grow_with_their_number() -> None:
    keeper, worker = PolicyKeeper(MemoryPolicies(), settle_s=0.0), Worker("base/0")
    try:
        keeper.admitted(cast(Any, worker))
        for step in range(1, 51):
            update = await keeper.post(spec(step))
            for said in ("ready", "served"):
                keeper.progressed(cast(Any, worker), Progress(update.update_id, said))
            await keeper.sync()
            assert (await keeper._store.update(update.update_id)).state == "done"
        kept = {name: len(each) for name, each in vars(keeper).items() if isinstance(each, dict | set)}
        assert max(kept.values()) <= KEPT_RUNS, kept
        assert len(keeper._updates["default"].runs) == KEPT_RUNS
    finally:
        keeper.close()


async def test_who_had_not_failed_takes_over_the_new_deadline_of_an_update_that_was_posted_again() -> None:
    now, store = 0.0, MemoryPolicies()
    keepers = [PolicyKeeper(store, clock=lambda: now, steady=lambda: now, settle_s=0.0) for _ in range(2)]
    asked = spec(1, deadline_s=30.0)

    async def states() -> list[str]:
        for keeper in keepers:
            await keeper.sync()
            keeper._tick()
        return [(await keeper.update(asked.update_id)).state for keeper in keepers]

    try:
        for keeper in keepers:
            keeper.admitted(cast(Any, Worker("base/0")))
        await keepers[0].post(asked)
        assert await states() == ["running", "running"]
        keepers[0].progressed(cast(Any, keepers[0]._workers["w"]), Progress(asked.update_id, "failed", code="x"))
        now = 31.0  # at the second one nobody has looked since
        keepers[0]._tick()
        await keepers[0].sync()
        assert (await store.update(asked.update_id)).state == "failed"
        await keepers[0].post(asked)
        await keepers[1].sync()
        assert await states() == ["running", "running"]
        at = keepers[1]._updates["default"].next_deadline()
        assert at == 61.0
        now = 61.0
        assert (await states())[1] == "failed"
    finally:
        for keeper in keepers:
            keeper.close()
