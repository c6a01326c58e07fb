"""What the log has of policies while the store is away, or has what this release can't read."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from steno.contracts.errors import StoreUnavailable
from steno.contracts.wire.frames import ModelCard
from steno_proxy.policies import keeper
from steno_proxy.store.policies import MemoryPolicies, UpdateRow
from tests.support.contracts.policy import spec
from tests.support.waiting import until
from tests.unit.proxy.policies.test_lost_updates import Worker


async def test_an_outage_of_the_store_is_logged_once_not_at_each_look(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "POLL_S", 0.001)
    looks, away = 0, True
    policies = keeper.PolicyKeeper(MemoryPolicies())

    async def sync() -> None:
        nonlocal looks
        looks += 1
        if away:
            raise StoreUnavailable("the session store does not answer")

    monkeypatch.setattr(policies, "sync", sync)

    async def look_again(times: int = 5) -> None:
        seen = looks
        await until(lambda: looks >= seen + times)

    running = asyncio.create_task(policies.run())
    await look_again()
    away = False
    await look_again()
    assert len(caplog.records) == 1 and "the session store does not answer" in caplog.records[0].getMessage()
    away = True
    await look_again()
    assert len(caplog.records) == 2, "another outage is another line"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class Newer(MemoryPolicies):
    """Has an update of a policy `judge` that a later release has posted."""

    async def update(self, update_id: str) -> UpdateRow:
        row = await super().update(update_id)
        newer = row.policy == "judge" and row.version == "run-a/2"
        return msgspec.structs.replace(row, spec=row.spec.replace(b'"filesystem"', b'"rdma"')) if newer else row


async def test_a_policy_that_can_not_be_read_holds_up_no_other_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    store, workers = Newer(), {"judge": Worker("run-a/1"), "default": Worker("run-a/1")}
    policies = keeper.PolicyKeeper(store, settle_s=0.0)

    def serves(policy: str, version: str) -> Any:
        worker = workers[policy]
        worker.id, worker.models = policy, [ModelCard("m", 100, policy=policy, policy_version=version)]
        return worker

    try:
        for policy in workers:
            await store.post(spec(1, policy=policy), now=1.0)
            policies.admitted(serves(policy, "run-a/1"))
        await policies.sync()
        for policy in workers:
            await store.post(spec(2, policy=policy), now=2.0)
            policies.announced(serves(policy, "run-a/2"))
        await policies.sync()
        [said] = [record.getMessage() for record in caplog.records if record.exc_info]
        assert said == "can't synchronise policy judge with the store"
        assert {view.policy: view.version for view in policies.views()} == {"default": "run-a/2", "judge": "run-a/1"}
        assert {head.policy: head.served for head in await store.heads()}["default"] == spec(2).update_id
        assert not workers["judge"].behind, "what it serves may be newer than what is in force"
    finally:
        policies.close()


async def test_an_update_that_is_done_is_not_superseded_by_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    """Each push that went well was counted once as done, and once as superseded."""
    caplog.set_level("INFO", logger=keeper.__name__)
    policies = keeper.PolicyKeeper(MemoryPolicies(), settle_s=0.0)
    worker: Any = Worker("run-a/0")
    worker.id, worker.models = "w", [ModelCard("m", 100, policy="default", policy_version="run-a/0")]
    policies.admitted(worker)
    try:
        for step in (1, 2, 3):
            await policies.post(spec(step))
            if step < 3:
                worker.models = [ModelCard("m", 100, policy="default", policy_version=f"run-a/{step}")]
                policies.announced(worker)
                policies._tick()
        await policies.post(spec(4))
        policies._tick()
    finally:
        policies.close()
    said = [record.getMessage().partition(" (")[2] for record in caplog.records if " is " in record.getMessage()]
    assert said == ["run-a/1) is done", "run-a/2) is done", "run-a/3) is superseded"]
