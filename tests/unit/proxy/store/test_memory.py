"""The memory store keeps the contract."""

from __future__ import annotations

import tracemalloc

import pytest

from steno.contracts.errors import NotFound
from steno_proxy.store.memory.store import MemoryStore
from tests.support.contracts.account import AccountContract
from tests.support.contracts.claim import ClaimContract
from tests.support.contracts.lease import LeaseContract
from tests.support.contracts.retry import RetryContract
from tests.support.contracts.store import StoreContract
from tests.support.records.recordings import conversation, session


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


class TestMemoryAccounts(AccountContract):
    """Of groups and what is booked of them."""


class TestMemoryClaims(ClaimContract):
    """Of launchers, on trials."""


class TestMemoryLeases(LeaseContract):
    """Of leases."""


class TestMemoryRetries(RetryContract):
    """Of requests that clients send again."""


class TestMemoryStore(StoreContract):
    async def test_a_tombstone_ends_with_its_time(self, store: MemoryStore) -> None:
        await store.register(session("ghost", created_at=10.0))
        await store.delete("ghost", now=20.0, tombstone_s=60.0)
        await store.expire(now=81.0, retention_s=1_000.0)
        with pytest.raises(NotFound):
            await store.session("ghost")


async def test_two_hundred_sessions_of_twenty_turns_are_small() -> None:
    """Tokens, text and 1 KB a turn for all the rest: no pydantic objects, nothing stored twice."""
    store = MemoryStore()
    conversations = [conversation(20, seed=seed) for seed in range(10)]
    payload = sum(
        len(one.new_prompt_ids) + len(one.completion_ids) + len(one.sampling_logprobs)
        for made in conversations
        for one, _ in made
    )
    tracemalloc.start()
    try:
        for number in range(200):
            await store.register(session(f"t{number}", metadata={"instance": f"i-{number}"}))
            for one, its_row in conversations[number % 10]:
                await store.commit(f"t{number}", one, its_row, now=1.0)
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    text_bytes = sum(len(packed) for recording in store._recordings.values() for packed in recording.texts)
    assert grown_bytes < 20 * payload + text_bytes + 200 * 20 * 1_000
    assert grown_bytes < 40_000_000
