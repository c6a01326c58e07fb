"""A cluster named by several of its nodes: a proxy starts while one of them is away."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from steno_cli.doctor import redis_checks
from steno_cli.doctor.findings import FindingLevel
from steno_cli.doctor.redis_checks import check_redis
from steno_proxy.store.redis.store import RedisStore
from tests.integration.store.outages.test_redis_failover import cluster as cluster
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.recordings import session
from tests.support.waiting import insist


@pytest.fixture
def own_cluster() -> Iterator[RedisServer]:
    """Of one node."""
    with contextlib.closing(RedisServer(cluster=True)) as server:
        yield server


async def test_a_proxy_starts_by_whichever_node_is_there(
    cluster: tuple[RedisServer, RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_checks, "TIMEOUT_S", 60.0)
    primary, replica = cluster
    url = f"redis+cluster://127.0.0.1:{primary.port},127.0.0.1:{replica.port}"
    store = RedisStore(url, **PATIENT)
    await store.open()
    await store.register(session("before"))
    await store.close()
    assert not [one for one in check_redis(url) if one.check in ("redis.nodes", "redis.role")]
    primary.kill()
    with replica.client() as client:
        client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
    later = RedisStore(url, **PATIENT)
    await insist(later.open)  # a new primary may answer a moment later that the cluster is down
    assert (await insist(lambda: later.session("before"))).trial_id == "before"
    await insist(lambda: later.register(session("after")))
    assert (await insist(lambda: later.session("after"))).trial_id == "after"
    await later.close()
    found = {one.check: one for one in check_redis(url)}
    assert found["redis.nodes"].level == FindingLevel.WARNING and str(primary.port) in found["redis.nodes"].message
    assert found["redis.reachable"].level == FindingLevel.OK and "redis.role" not in found


async def test_a_replica_that_is_named_first_is_not_taken_for_the_primary(
    cluster: tuple[RedisServer, RedisServer],
) -> None:
    primary, replica = cluster
    url = f"redis+cluster://127.0.0.1:{replica.port},127.0.0.1:{primary.port}"
    store = RedisStore(url, **PATIENT)
    await store.open()
    await store.register(session("one"))
    await store.close()
    assert "redis.role" not in {one.check for one in check_redis(url)}


@pytest.mark.parametrize(
    "bounds", [PATIENT, {"reply_timeout_s": 60.0, "call_timeout_s": 1.0}], ids=["refused", "silent"]
)
async def test_a_cluster_whose_addresses_have_all_changed_is_found_again_by_its_names(
    own_cluster: RedisServer, bounds: dict[str, float]
) -> None:
    """As where all of its pods were made anew: what the cluster told is gone, and the name of the URL leads to what is there.
    What is at the old addresses refuses; or it says nothing, and the time is over before that is known."""
    with own_cluster.client() as client, contextlib.ExitStack() as stack:

        def move_to(address: str) -> None:
            client.config_set("cluster-announce-ip", address)
            client.config_set("bind", f"127.0.0.1 {address}")

        move_to("127.0.0.2")
        store = RedisStore(own_cluster.url, **bounds)
        await insist(store.open)
        await insist(lambda: store.register(session("before")))
        move_to("127.0.0.3")
        if bounds is not PATIENT:
            stack.enter_context(socket.create_server(("127.0.0.2", own_cluster.port)))
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert (await insist(lambda: store.session("before"))).trial_id == "before"
        await insist(lambda: store.register(session("after")))
        await store.close()
