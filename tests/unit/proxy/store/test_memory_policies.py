"""The policies' part of the store in memory, held to the common suite."""

from __future__ import annotations

import pytest

from steno.contracts.errors import NotFound
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.store.policies import SUPERSEDED_TTL_S
from tests.support.contracts.policy import PolicyContract, spec


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


class TestMemoryPolicies(PolicyContract):
    async def test_what_nobody_needs_any_more_is_forgotten_and_what_is_served_is_not(self, store: MemoryStore) -> None:
        served, between, newest = [await store.policies.post(spec(step), now=float(step)) for step in (1, 2, 3)]
        await store.policies.serve(served.update_id)
        late = await store.policies.post(spec(4), now=10.0 + SUPERSEDED_TTL_S)
        with pytest.raises(NotFound):
            await store.policies.update(between.update_id)
        for row in (served, newest, late):
            assert (await store.policies.update(row.update_id)).spec == row.spec
