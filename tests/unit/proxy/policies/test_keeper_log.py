"""What the log has of policies while the store is away."""

from __future__ import annotations

import asyncio

import pytest

from steno.contracts.errors import StoreUnavailable
from steno_proxy.policies import keeper
from steno_proxy.store.policies import MemoryPolicies
from tests.support.waiting import until


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
