"""Names that workers have served, while workers come and go."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from steno_proxy.policies.model_names import KeptModelNames
from steno_proxy.store.policies import MemoryPolicies


async def test_workers_may_come_and_go_while_the_store_is_asked() -> None:
    store = MemoryPolicies()
    names, served = KeptModelNames(store), {"a": "model-a"}
    await names.sync(served.values())
    asked, answer = asyncio.Event(), asyncio.Event()
    read = store.names

    async def slow() -> Any:
        asked.set()
        await answer.wait()
        return await read()

    cast(Any, store).names = slow
    syncing = asyncio.create_task(names.sync(name for name in served.values()))
    await asked.wait()
    served["b"] = "model-b"
    assert names.hear(["model-b"])
    answer.set()
    assert await syncing
    assert names.all() == ["model-a", "model-b"], "what was heard meanwhile is not forgotten"
