"""The Redis store keeps the contract, on one server and on a cluster."""

from __future__ import annotations

from tests.support.lease_contract import LeaseContract
from tests.support.retry_contract import RetryContract
from tests.support.store_contract import StoreContract


class TestRedisStore(StoreContract):
    """Fixtures in conftest.py."""


class TestRedisLeases(LeaseContract):
    """Of groups and leases."""


class TestRedisRetries(RetryContract):
    """Of requests that clients send again."""
