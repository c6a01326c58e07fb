"""The policies' part of the Redis store keeps the contract, on one server and on a cluster."""

from __future__ import annotations

from steno_proxy.store.policies import SUPERSEDED_TTL_S
from steno_proxy.store.redis.schema import MODEL_NAMES, MODEL_POLICIES, update_key
from steno_proxy.store.redis.store import RedisStore
from tests.support.contracts.policy import PolicyContract, spec
from tests.support.machine.redis_server import PATIENT, RedisServer


class TestRedisPolicies(PolicyContract):
    async def test_what_nobody_needs_any_more_expires_and_what_is_served_does_not(
        self, store: RedisStore, server: RedisServer
    ) -> None:
        served, between, newest = [await store.policies.post(spec(step), now=float(step)) for step in (1, 2, 3)]
        await store.policies.serve(served.update_id)
        with server.client() as client:
            ttl = {row.update_id: client.ttl(update_key(row.update_id)) for row in (served, between, newest)}
            assert 0 < ttl[between.update_id] <= SUPERSEDED_TTL_S
            assert (ttl[served.update_id], ttl[newest.update_id]) == (-1, -1)
            await store.policies.serve(newest.update_id)
            assert 0 < client.ttl(update_key(served.update_id)) <= SUPERSEDED_TTL_S

    async def test_a_proxy_that_knows_names_alone_works_beside_one_that_knows_their_policies(
        self, store: RedisStore, server: RedisServer
    ) -> None:
        """The older one writes `SADD` and `SREM` to the set, and reads `SMEMBERS` of it."""
        policies = store.policies
        with server.client() as older:
            older.sadd(MODEL_NAMES, "told-by-older")
            await policies.keep_names({"actor": "default", "judge": "frozen"})
            assert await policies.names() == {"told-by-older": "", "actor": "default", "judge": "frozen"}
            assert older.smembers(MODEL_NAMES) == {b"told-by-older", b"actor", b"judge"}
            older.srem(MODEL_NAMES, "judge")
            assert await policies.names() == {"told-by-older": "", "actor": "default"}, "it is retired"
            assert not await policies.retire_name("judge") and await policies.retire_name("actor")
            assert older.smembers(MODEL_NAMES) == {b"told-by-older"}
            assert older.hgetall(MODEL_POLICIES) == {}, "nothing is left of what was retired by either"

    async def test_all_replicas_know_the_same(self, store: RedisStore, server: RedisServer) -> None:
        other = RedisStore(server.url, **PATIENT)
        row = await store.policies.post(spec(1), now=1.0)
        await other.policies.serve(row.update_id)
        assert await other.policies.heads() == await store.policies.heads()
        await other.close()
