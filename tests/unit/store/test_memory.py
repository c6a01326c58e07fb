"""The memory store keeps the contract."""

from __future__ import annotations

import pytest

from proxy.contracts.errors import NotFound
from proxy.store.memory import MemoryStore
from tests.support.recordings import session
from tests.support.store_contract import StoreContract


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


class TestMemoryStore(StoreContract):
    async def test_a_tombstone_ends_with_its_time(self, store: MemoryStore) -> None:
        await store.register(session("ghost", created_at=10.0))
        await store.delete("ghost", now=20.0, tombstone_s=60.0)
        await store.expire(now=81.0, retention_s=1_000.0)
        with pytest.raises(NotFound):
            await store.session("ghost")
