"""The Redis store keeps the contract, on one server and on a cluster."""

from __future__ import annotations

import pytest

from steno.contracts.errors import Gone
from steno_proxy.store.redis.store import RedisStore
from tests.support.contracts.account import AccountContract
from tests.support.contracts.claim import ClaimContract
from tests.support.contracts.lease import LeaseContract
from tests.support.contracts.retry import RetryContract
from tests.support.contracts.store import StoreContract
from tests.support.machine.redis_server import RedisServer
from tests.support.records.recordings import session


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
