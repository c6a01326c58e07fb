"""The Redis store keeps the contract, on one server and on a cluster."""

from __future__ import annotations

import pytest

from steno.contracts.errors import Gone
from steno_proxy.store.redis.store import RedisStore
from tests.support.account_contract import AccountContract
from tests.support.claim_contract import ClaimContract
from tests.support.lease_contract import LeaseContract
from tests.support.recordings import session
from tests.support.redis_server import RedisServer
from tests.support.retry_contract import RetryContract
from tests.support.store_contract import StoreContract


class TestRedisStore(StoreContract):
    """Fixtures in conftest.py."""


class TestRedisAccounts(AccountContract):
    """Of groups and what is booked of them."""


class TestRedisClaims(ClaimContract):
    """Of launchers, on trials."""


class TestRedisLeases(LeaseContract):
    """Of leases."""


class TestRedisRetries(RetryContract):
    """Of requests that clients send again."""

    async def test_what_comes_late_adds_nothing_to_a_tombstone(self, store: RedisStore, server: RedisServer) -> None:
        await store.register(session("late"))
        await store.delete("late", now=1.0, tombstone_s=60.0)
        await store.refused("late", b"k" * 16, began=2.0, now=2.0)
        with pytest.raises(Gone):
            await store.asked_again("late", b"k" * 16, began=3.0, count=1, n=1, now=3.0)
        with server.client() as client:
            assert client.keys("steno:{late}:*") == [b"steno:{late}:session"]
