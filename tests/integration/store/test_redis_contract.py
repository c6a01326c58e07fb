"""The Redis store keeps the contract, on one server and on a cluster."""

from __future__ import annotations

from tests.support.store_contract import StoreContract


class TestRedisStore(StoreContract):
    """Fixtures in conftest.py."""
