"""A Redis that refuses: full, or with fewer replicas than it wants. An error each time, nothing in part, and then all is well."""

from __future__ import annotations

import pytest

from steno.contracts.errors import StoreUnavailable
from steno_proxy.store.redis.schema import trial_keys
from steno_proxy.store.redis.store import RedisStore
from tests.support.contracts.recording import record
from tests.support.machine.redis_server import RedisServer
from tests.support.records.recordings import row, session, turn

REFUSALS = {
    "full": ({"maxmemory": "1", "maxmemory-policy": "noeviction"}, {"maxmemory": "0"}),
    "alone": ({"min-replicas-to-write": "1"}, {"min-replicas-to-write": "0"}),
}


@pytest.mark.parametrize("how", REFUSALS)
async def test_what_is_refused_is_unavailable_and_leaves_nothing(
    server: RedisServer, store: RedisStore, how: str
) -> None:
    refuse, allow = REFUSALS[how]
    made = await record(store, how, 2)
    late, keys = turn(5), trial_keys(how)
    with server.client() as client:
        before = {key: client.dump(key) for key in keys}
        for name, value in refuse.items():
            client.config_set(name, value)
        try:
            for call in (
                store.commit(how, late, row(late), now=1.0), store.register(session(f"new-{how}")),
                store.complete(how, status="completed", reward=1.0, end_reason="harness", metrics={}, now=2.0),
            ):  # fmt: skip
                with pytest.raises(StoreUnavailable):
                    await call
            assert await store.turns(how) == made, "who reads is answered"
            assert {key: client.dump(key) for key in keys} == before
        finally:
            for name, value in allow.items():
                client.config_set(name, value)
    assert await store.commit(how, late, row(late), now=3.0) == 2
    assert [one.turn_id for one in await store.turns(how)] == [one.turn_id for one in [*made, late]]
