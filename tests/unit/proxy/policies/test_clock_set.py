"""Somebody sets the machine's clock while a proxy runs: no update waits for it, and none is given up for it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from steno.contracts.policy import UpdateSpec
from steno.contracts.wire.frames import Apply, Prepare, Progress
from steno_proxy.policies.keeper import PolicyKeeper
from steno_proxy.store.policies import MemoryPolicies
from tests.support.contracts.policy import spec
from tests.unit.proxy.policies.test_lost_updates import Worker

NOON = 1_800_000_000.0
HOUR_S = 3600.0
DEADLINE_S = 600.0


class Machine:
    """A proxy's policies with one worker, on a machine whose clock is set by tests. now: seconds that have passed."""

    def __init__(self, store: MemoryPolicies | None = None) -> None:
        self.now, self.unix = 0.0, NOON
        self.keeper = PolicyKeeper(
            store or MemoryPolicies(), clock=lambda: self.unix + self.now, steady=lambda: self.now, settle_s=3.0
        )
        self.worker = Worker("base/0")
        self.keeper.admitted(cast(Any, self.worker))

    def set_clock(self, by_s: float) -> None:
        self.unix += by_s

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.keeper._tick()

    def says(self, update_id: str, state: str) -> None:
        self.keeper.progressed(cast(Any, self.worker), Progress(update_id, cast(Any, state)))

    def told(self) -> list[type]:
        found, self.worker.told = [type(frame) for frame in self.worker.told], []
        return found


def asked(step: int = 1) -> UpdateSpec:
    return spec(step, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("by_s", [-HOUR_S, HOUR_S])
@pytest.mark.parametrize("when", ["before", "posted", "ready"])
async def test_an_update_goes_on_at_once_when_the_clock_is_set(when: str, by_s: float) -> None:
    machine = Machine()
    try:
        if when == "before":
            machine.set_clock(by_s)
        update = await machine.keeper.post(asked())
        if when == "posted":
            machine.set_clock(by_s)
        machine.says(update.update_id, "ready")
        if when == "ready":
            machine.set_clock(by_s)
        assert machine.told() == [Prepare], "other workers may still be dialling"
        machine.passes(3.0)
        assert machine.told() == [Apply]
        machine.says(update.update_id, "served")
        found = await machine.keeper.update(update.update_id)
        assert (found.state, found.ended_at) == ("done", found.created_at + 3.0)
        await machine.keeper.sync()
        assert (await machine.keeper._store.update(update.update_id)).ended_at == found.ended_at
    finally:
        machine.keeper.close()


@pytest.mark.parametrize("by_s", [-HOUR_S, HOUR_S])
async def test_the_deadline_of_one_that_was_posted_again_comes_when_it_would_have(by_s: float) -> None:
    machine = Machine()
    try:
        update = await machine.keeper.post(asked())
        machine.passes(10.0)
        machine.says(update.update_id, "failed")
        assert machine.told() == [Prepare]
        assert (await machine.keeper.update(update.update_id)).state == "failed", "it was all there was"
        await machine.keeper.sync()
        await machine.keeper.post(asked())  # again
        machine.set_clock(by_s)
        assert machine.told() == [Prepare]
        machine.passes(DEADLINE_S - 1.0)
        assert (await machine.keeper.update(update.update_id)).state == "running"
        machine.passes(1.0)
        assert (await machine.keeper.update(update.update_id)).state == "failed"
    finally:
        machine.keeper.close()


@pytest.mark.parametrize("by_s", [-HOUR_S, HOUR_S])
async def test_one_that_is_posted_again_after_the_clock_was_set_runs_again(by_s: float) -> None:
    """It stayed `failed` here, and `running` on record: its trainer posted it for ever."""
    machine = Machine()
    try:
        update = await machine.keeper.post(asked())
        machine.passes(10.0)
        machine.says(update.update_id, "failed")
        await machine.keeper.sync()
        assert machine.told() == [Prepare]
        machine.set_clock(by_s)
        assert (await machine.keeper.post(asked())).state == "running"
        assert machine.told() == [Prepare]
        machine.passes(DEADLINE_S - 1.0)
        assert (await machine.keeper.update(update.update_id)).state == "running"
        machine.passes(1.0)
        assert (await machine.keeper.update(update.update_id)).state == "failed"
        await machine.keeper.sync()
        assert (await machine.keeper._store.update(update.update_id)).state == "failed"
    finally:
        machine.keeper.close()


async def test_one_that_is_posted_again_at_a_replica_whose_clock_is_behind_runs_again_at_all() -> None:
    store = MemoryPolicies()
    ahead, behind = machines = Machine(store), Machine(store)
    ahead.set_clock(60.0)
    try:
        update = await ahead.keeper.post(asked())
        await behind.keeper.sync()
        for machine in machines:
            machine.says(update.update_id, "failed")
            machine.passes(4.0)
            await machine.keeper.sync()
            assert machine.told() == [Prepare]
            assert (await machine.keeper.update(update.update_id)).state == "failed"
        assert (await behind.keeper.post(asked())).state == "running"
        await ahead.keeper.sync()
        for machine in machines:
            assert machine.told() == [Prepare]
            machine.passes(DEADLINE_S - 5.0)
            assert (await machine.keeper.update(update.update_id)).state == "running"
            machine.passes(5.0)
            assert (await machine.keeper.update(update.update_id)).state == "failed", "no deadline is delayed"
    finally:
        for machine in machines:
            machine.keeper.close()


async def test_who_waits_for_an_update_waits_as_long_as_was_asked() -> None:
    machine = Machine()
    try:
        update = await machine.keeper.post(asked())

        async def changed(timeout_s: float) -> None:
            machine.now += timeout_s
            if not waited:
                machine.set_clock(-HOUR_S)
            waited.append(timeout_s)

        waited: list[float] = []
        machine.keeper._changed = changed  # type: ignore[method-assign]
        await machine.keeper.update(update.update_id, wait_s=5.0)
        assert waited == [5.0]
    finally:
        machine.keeper.close()
